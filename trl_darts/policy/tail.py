"""
Which layout is done sooner with what is left of a rollout: few sequences decode faster on engines of more GPUs each,
many do not (PAT, "Accelerating Long-Tail Generation in Synchronous RLHF Training via Adaptive Tensor Parallelism",
Algorithm 1).

Three parts are compared: seconds per token in either layout, the time to read anew what has been decoded, and the time
of the switch itself.

Invariants: no switch is worth it whose predicted gain is below [`MIN_GAIN`], or to a layout that is slower for the
sequences of now; no remaining length is negative, or beyond the limit.
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
"""Of one engine's sequences: tokens in their contexts, prompts included, and tokens that they lack."""

MIN_GAIN = 0.1
"""Share of the time left that a switch must save: the predictor's own error. What is worth less is noise."""

HANDOVER_S = 0.1
"""What a switch takes at least: aborts, their answers and new requests."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class EngineTimes:
    """How fast one engine of a layout is. Without `prefill`, to read anew what others have decoded takes no time."""

    latency: LatencySurface | LatencyCurve
    prefill: PrefillCurve | None = None
    max_num_seqs: int | None = None  # that it decodes at once; the others wait

    @classmethod
    def of(cls, profile: LatencyProfile) -> EngineTimes:
        """As it was measured."""
        return cls(profile.surface or profile.curve, profile.prefill, profile.curve.metadata.get("max_num_seqs"))

    def step(self, batch_size: float, context_tokens: float) -> float:
        """
        Seconds per token of each of `batch_size` sequences with `context_tokens` in all their contexts. More than it
        decodes at once take turns.
        """
        turns = 1.0 if self.max_num_seqs is None else max(1.0, batch_size / self.max_num_seqs)
        if isinstance(self.latency, LatencySurface):
            return turns * self.latency(batch_size / turns, context_tokens / turns)
        return turns * self.latency(batch_size / turns)

    def decode(self, work: Work) -> float:
        """Seconds until all sequences have ended: those that are left speed up, and their contexts grow."""
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
    """Engines of one kind: how many, and the GPUs of each."""

    num_engines: int
    size: int

    @classmethod
    def parse(cls, name: str, text: str) -> tuple[Layout, Layout]:
        """Main and tail engines, such as `4x1+1x4`. A [`ConfigurationError`] calls the text `name`."""
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
    """Seconds until the batch is ready: `here`, or `there` with the switch."""

    here: float
    there: float

    @property
    def pays(self) -> bool:
        """Whether a switch saves enough to trust the prediction."""
        return self.here - self.there > MIN_GAIN * self.here


@dataclass(frozen=True)
class TailTimes:
    """What a switch from the main layout to the tail's is predicted from."""

    main: EngineTimes
    tail: EngineTimes
    switch_seconds: float = 0.0  # that engines which share GPUs take to sleep and to wake

    def faster_now(self, here: Sequence[Array], there: Sequence[Array]) -> bool:
        """
        Whether the main engines' sequences, given as contexts by engine, would decode faster at this moment. PAT can
        switch back; we switch once, and a switch that pays already pays more once it is also faster at the moment.
        """
        contexts, num = np.concatenate([*here, *there]), len(there)
        merged = self.tail.step(max(1.0, len(contexts) / num), contexts.sum() / num)
        return merged < max(self.main.step(len(own), own.sum()) for own in here if len(own))

    def forecast(self, here: Sequence[Work], there: Sequence[Work]) -> Forecast:
        """For what each engine of either layout has now, if anything (PAT, Algorithm 1, lines 4 to 9)."""
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
    Tokens that the running ones of a rollout's candidates still lack: the quantiles of a log-normal that is fitted to
    all of the rollout's lengths, relative to what was expected of their prompts, beyond what each has already.

    All lists are of every candidate, but the result. The length of one that is not `complete` is a lower bound;
    `expected` is the same number for all where nothing is known, and `limit` the most tokens of a completion.
    """
    tokens, means = np.asarray(lengths, float), np.maximum(np.asarray(expected, float), 1.0)
    goes_on, ended = np.asarray(running, bool), np.asarray(complete, bool)
    unit = means / means.mean()
    mu, sigma, _, _ = log_normal_fit((tokens / unit).tolist(), (~ended).tolist(), min_log_std=0.0)
    own, unit = tokens[goes_on], unit[goes_on]
    num = len(own)
    # The middles of as many equal parts of probability, spread evenly over neighbours, which are of one prompt.
    shares = (np.argsort(np.argsort(np.arange(num) * _GOLDEN % 1.0)) + 0.5) / max(1, num)
    finals = [
        scale * _quantile_beyond(length / scale, mu, sigma, share)
        for length, scale, share in zip(own, unit, shares, strict=True)
    ]
    return np.asarray(np.maximum(np.minimum(finals, limit) - own, 1.0), np.float64)


def _quantile_beyond(bound: float, mu: float, sigma: float, share: float) -> float:
    """The length that `share` of a log-normal's lengths beyond `bound` are below."""
    bound = max(bound, 1.0)
    z = min((math.log(bound) - mu) / sigma, FAR_TAIL)
    survival = math.erfc(z / math.sqrt(2.0)) / 2
    score = -NormalDist().inv_cdf(max(survival * (1 - share), 1e-300))
    return bound * math.exp(sigma * (score - z))
