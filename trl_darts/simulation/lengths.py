"""
Where simulated response lengths come from: a distribution, or a recorded trace.

Invariant: what a prompt's i-th candidate would be in a step depends on the seed, the step and i alone. So two
schedules that are compared see the same candidates, and the more of them one takes, the further it looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError


ENDLESS = 2**31 - 1
"""Length of a response that never ends by itself."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class LengthModel(Protocol):
    """Knows a data set's response lengths. Prompts are numbers from 0."""

    @property
    def num_prompts(self) -> int:
        """Prompts in the data set."""
        ...

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """Lengths in tokens, of shape `(len(prompts), num_candidates)`, at least 1, that nothing cuts off."""
        ...


def _streams(seed: Sequence[int], num_prompts: int, num_candidates: int) -> tuple[FloatArray, FloatArray]:
    """Normal scores and uniform numbers, candidate by candidate, so that further candidates change no earlier one."""
    shape = (num_candidates, num_prompts)
    normal = np.random.default_rng([*seed, 0]).standard_normal(shape)
    uniform = np.random.default_rng([*seed, 1]).random(shape)
    return normal.T, uniform.T


@dataclass(frozen=True)
class LogNormalLengths:
    """
    Log-normal within each prompt and between prompts.

    Args:
        num_prompts (`int`, *optional*, defaults to `10_000`):
            Prompts in the data set.
        median (`float`, *optional*, defaults to `800.0`):
            Median of the prompts' median lengths, in tokens.
        inter_prompt_std (`float`, *optional*, defaults to `0.6`):
            Standard deviation of the prompts' mean log-lengths.
        intra_prompt_std (`float`, *optional*, defaults to `0.5`):
            Median standard deviation of the log-lengths of one prompt. It differs from prompt to prompt by a
            log-normal factor with a standard deviation of 0.4.
        endless_share (`float`, *optional*, defaults to `0.0`):
            Share of candidates that never end by themselves. They are not spread evenly: half of them belong to a
            tenth of the prompts.
        seed (`int`, *optional*, defaults to `0`):
            Of the prompts' own parameters.

    Raises:
        [`ConfigurationError`]: If a number is out of range.
    """

    num_prompts: int = 10_000
    median: float = 800.0
    inter_prompt_std: float = 0.6
    intra_prompt_std: float = 0.5
    endless_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or not 1 <= self.median < math.inf:
            raise ConfigurationError(
                f"`num_prompts` ({self.num_prompts}) and `median` ({self.median}) must be at least 1."
            )
        for name in ("inter_prompt_std", "intra_prompt_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be finite and not negative.")
        if not 0 <= self.endless_share <= 0.1:
            raise ConfigurationError(f"`endless_share` ({self.endless_share}) must be between 0 and 0.1.")
        rng = np.random.default_rng([self.seed, 2])
        means = math.log(self.median) + self.inter_prompt_std * rng.standard_normal(self.num_prompts)
        stds = self.intra_prompt_std * np.exp(0.4 * rng.standard_normal(self.num_prompts))
        wild = rng.random(self.num_prompts) < 0.1
        endless = np.where(wild, 5.0, 0.5 / 0.9) * self.endless_share
        for name, value in (("_means", means), ("_stds", stds), ("_endless", endless)):
            object.__setattr__(self, name, value)

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """See [`LengthModel`]."""
        normal, uniform = _streams(seed, len(prompts), num_candidates)
        means, stds, endless = (getattr(self, name)[prompts, None] for name in ("_means", "_stds", "_endless"))
        lengths = np.exp(np.minimum(means + stds * normal, 20.0)).astype(np.int64)
        return np.where(uniform < endless, ENDLESS, np.maximum(lengths, 1))


@dataclass(frozen=True)
class RecordedLengths:
    """
    Lengths like those of a recorded run: each candidate is one that its prompt was seen to have.

    A recorded candidate that was aborted, or cut off at the limit, is known to be longer than it was seen. It is
    replaced by one of the trace's complete candidates that are longer, of any prompt; where there is none, it never
    ends.

    Args:
        lengths (`Sequence[Sequence[int]]` of shape `(num_prompts, C_i)`):
            Recorded lengths of each prompt, over all epochs. At least one each.
        censored (`Sequence[Sequence[bool]]` of shape `(num_prompts, C_i)`):
            Whether a length is only a lower bound.

    Raises:
        [`ConfigurationError`]: If there is no prompt, a prompt without a length, or a length that is negative or not
            finite.
    """

    lengths: Sequence[Sequence[int]]
    censored: Sequence[Sequence[bool]]

    def __post_init__(self) -> None:
        sizes = np.array([len(own) for own in self.lengths])
        if not sizes.size or not sizes.all() or [len(own) for own in self.censored] != sizes.tolist():
            raise ConfigurationError(
                f"`lengths` ({len(self.lengths)} prompts) and `censored` ({len(self.censored)} prompts) must have at "
                "least one prompt, at least one length for each, and as many flags as lengths."
            )
        given = np.concatenate([np.asarray(own, np.float64) for own in self.lengths])
        if wrong := given[~(np.isfinite(given) & (given >= 0))].tolist():
            raise ConfigurationError(
                f"`lengths` ({wrong[0]} is one of {len(wrong)} such) must be finite and not negative: they are "
                "numbers of tokens. Leave these candidates out."
            )
        flat = given.astype(np.int64)
        bounds = np.concatenate([np.asarray(own, bool) for own in self.censored])
        for name, value in (
            ("_sizes", sizes),
            ("_starts", np.concatenate([[0], np.cumsum(sizes)[:-1]])),
            ("_flat", np.maximum(flat, 1)),
            ("_bounds", bounds),
            ("_complete", np.sort(flat[~bounds])),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_prompts(self) -> int:
        """Prompts that were recorded."""
        return len(self.lengths)

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """See [`LengthModel`]."""
        _, uniform = _streams(seed, len(prompts), num_candidates)
        sizes, starts = (getattr(self, name)[prompts, None] for name in ("_sizes", "_starts"))
        place = uniform * sizes
        chosen = np.minimum(place.astype(np.int64), sizes - 1)
        lengths: IntArray = self._flat[starts + chosen]  # type: ignore[attr-defined]
        bounds = self._bounds[starts + chosen]  # type: ignore[attr-defined]
        # What is left of the uniform number is uniform again, and chooses among the longer ones.
        return np.where(bounds, self._longer_than(lengths, place - chosen), lengths)

    def _longer_than(self, bounds: IntArray, uniform: FloatArray) -> IntArray:
        complete: IntArray = self._complete  # type: ignore[attr-defined]
        first = np.searchsorted(complete, bounds, side="right")
        rest = len(complete) - first
        chosen = np.minimum(first + (uniform * rest).astype(np.int64), len(complete) - 1)
        longer = complete[chosen] if len(complete) else bounds
        return np.where(rest > 0, longer, ENDLESS)
