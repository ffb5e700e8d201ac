"""
Predicts which layout finishes the rest of a rollout sooner: few sequences decode faster on engines with more GPUs
each, many do not (PAT, "Accelerating Long-Tail Generation in Synchronous RLHF Training via Adaptive Tensor
Parallelism", Algorithm 1).

The prediction has three parts: decoding time in either layout, the time to prefill the tokens decoded elsewhere, and
the time of the switch itself.

Invariants: a switch never pays if its predicted gain is below [`MIN_GAIN`], or if the other layout is slower for the
sequences running now. Remaining lengths are positive and within the limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError
from .censoring import FAR_TAIL, log_normal_fit
from .latency import LatencyCurve
from .latency_profile import LatencyProfile, PrefillCurve
from .latency_surface import LatencySurface


Array: TypeAlias = NDArray[np.float64]
Work: TypeAlias = tuple[Array, Array]
"""Of one engine's sequences: tokens in their contexts, prompts included, and tokens left to decode."""

MIN_GAIN = 0.1
"""Smallest share of the remaining time that a switch must save: about the predictor's own error."""

HANDOVER_S = 0.1
"""Minimum seconds of a switch: aborts, their responses and new requests."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class EngineTimes:
    """Speed of one engine of a layout. Without `prefill`, prefilling tokens decoded elsewhere takes no time."""

    latency: LatencySurface | LatencyCurve
    prefill: PrefillCurve | None = None
    max_num_seqs: int | None = None  # sequences that it decodes at once; the others wait

    @classmethod
    def of(cls, profile: LatencyProfile) -> EngineTimes:
        """Builds the times from a measured profile."""
        return cls(profile.surface or profile.curve, profile.prefill, profile.curve.metadata.get("max_num_seqs"))

    def step(self, batch_size: float, context_tokens: float) -> float:
        """
        Seconds per token of each of `batch_size` sequences with `context_tokens` tokens of context in total. Sequences
        beyond `max_num_seqs` take turns.
        """
        turns = 1.0 if self.max_num_seqs is None else max(1.0, batch_size / self.max_num_seqs)
        if isinstance(self.latency, LatencySurface):
            return turns * self.latency(batch_size / turns, context_tokens / turns)
        return turns * self.latency(batch_size / turns)

    def decode(self, work: Work) -> float:
        """Seconds until all sequences have ended. The batch shrinks and the contexts grow meanwhile."""
        order = np.argsort(work[1], kind="stable")
        contexts, remaining = work[0][order], work[1][order]
        running, tokens, seconds = len(order), float(contexts.sum()), 0.0
        for context, end, steps in zip(contexts, remaining, np.diff(remaining, prepend=0.0), strict=True):
            if steps:
                seconds += steps * self.step(running, tokens + running * steps / 2)
                tokens += running * steps
            running -= 1
            tokens -= context + end
        return float(seconds)

    def read(self, contexts: Array) -> float:
        """Seconds to rebuild the caches of sequences that were decoded elsewhere (PAT, Eq. 3 and 4)."""
        return 0.0 if self.prefill is None or not len(contexts) else self.prefill.batch(contexts)


class Layout(NamedTuple):
    """Number of engines of one kind, and GPUs of each."""

    num_engines: int
    size: int

    @classmethod
    def parse(cls, name: str, text: str) -> tuple[Layout, Layout]:
        """Parses main and tail engines, such as `4x1+1x4`. A [`ConfigurationError`] refers to the text as `name`."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)x([1-9]\d*)", text)
        if match is not None:
            main, tail = (cls(int(match[i]), int(match[i + 1])) for i in (1, 3))
            if main != tail:
                return main, tail
        raise ConfigurationError(
            f"`{name}` ({text!r}) must be main and tail engines that differ, each as number × GPUs. Write it like "
            "4x1+1x4."
        )


@dataclass(frozen=True)
class Forecast:
    """Seconds until the batch is ready: without a switch (`here`), and with it (`there`)."""

    here: float
    there: float

    @property
    def pays(self) -> bool:
        """Whether the predicted saving exceeds [`MIN_GAIN`]."""
        return self.here - self.there > MIN_GAIN * self.here


@dataclass(frozen=True)
class TailTimes:
    """Predicts the time of a switch from the main layout to the tail layout."""

    main: EngineTimes
    tail: EngineTimes
    switch_seconds: float = 0.0  # to put the main engines to sleep and wake the tail engines, if they share GPUs

    def faster_now(self, here: Sequence[Array], there: Sequence[Array]) -> bool:
        """
        Whether the running sequences, given as contexts by engine, would decode faster in the tail layout right now.
        PAT can switch back. We switch once, so a switch that already pays still waits for this condition.
        """
        contexts, num = np.concatenate([*here, *there]), len(there)
        merged = self.tail.step(max(1.0, len(contexts) / num), contexts.sum() / num)
        return merged < max(self.main.step(len(tokens), tokens.sum()) for tokens in here if len(tokens))

    def forecast(self, here: Sequence[Work], there: Sequence[Work]) -> Forecast:
        """Predicts both times from each engine's current work (PAT, Algorithm 1, lines 4 to 9)."""
        contexts, remaining = (np.concatenate([work[i] for work in here]) for i in (0, 1))
        order = np.argsort(-remaining, kind="stable")
        seconds = []
        for i, work in enumerate(there):
            moved = order[i :: len(there)]
            merged = (np.append(work[0], contexts[moved]), np.append(work[1], remaining[moved]))
            seconds.append(self.tail.read(contexts[moved]) + self.tail.decode(merged))
        stay = [self.main.decode(work) for work in here] + [self.tail.decode(work) for work in there]
        return Forecast(max(stay), max(seconds) + HANDOVER_S + self.switch_seconds)


def remaining_lengths(
    lengths: ArrayLike,
    running: ArrayLike,
    complete: ArrayLike,
    expected: ArrayLike,
    limit: int,
) -> Array:
    """
    Predicts the tokens left to decode for each running candidate of a rollout. A log-normal is fitted to the lengths
    of all candidates, relative to the expected length of their prompts; the prediction is a quantile of it beyond the
    current length.

    The arguments have one entry per candidate, the result one per running candidate. The length of a candidate that is
    not `complete` is a lower bound. `expected` is constant if nothing is known. `limit` is the longest completion.
    """
    tokens, means = np.asarray(lengths, float), np.maximum(np.asarray(expected, float), 1.0)
    unfinished, ended = np.asarray(running, bool), np.asarray(complete, bool)
    unit = means / means.mean()
    mu, sigma, _, _ = log_normal_fit((tokens / unit).tolist(), (~ended).tolist(), min_log_std=0.0)
    current, unit = tokens[unfinished], unit[unfinished]
    num = len(current)
    # One evenly spaced level per candidate. Neighbours belong to one prompt, so consecutive levels are far apart.
    shares = (np.argsort(np.argsort(np.arange(num) * _GOLDEN % 1.0)) + 0.5) / max(1, num)
    finals = [
        scale * _quantile_beyond(length / scale, mu, sigma, share)
        for length, scale, share in zip(current, unit, shares, strict=True)
    ]
    return np.asarray(np.maximum(np.minimum(finals, limit) - current, 1.0), np.float64)


def _quantile_beyond(bound: float, mu: float, sigma: float, share: float) -> float:
    """Returns the quantile of level `share` of a log-normal, given that the length exceeds `bound`."""
    bound = max(bound, 1.0)
    z = min((math.log(bound) - mu) / sigma, FAR_TAIL)
    survival = math.erfc(z / math.sqrt(2.0)) / 2
    score = -NormalDist().inv_cdf(max(survival * (1 - share), 1e-300))
    return bound * math.exp(sigma * (score - z))
