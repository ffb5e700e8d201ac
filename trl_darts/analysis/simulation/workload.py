"""
What a simulated training trains on: prompts, how long their answers are, and what a step costs beside its rollout.

Invariant: the length of a prompt's i-th candidate in an epoch depends on the seed, the loader's batch, the place in it
and i alone. So schedules that are compared see the same candidates, whenever they start them and however many they
start.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigurationError


ENDLESS = 2**31 - 1
"""Length of a response that never ends by itself."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class LengthModel(Protocol):
    """Knows a data set's response lengths. Prompts are numbers from 0."""

    @property
    def num_prompts(self) -> int:
        """Prompts in the data set."""

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """Lengths in tokens, of shape `(len(prompts), num_candidates)`, at least 1, that nothing cuts off."""


def _check_finite(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigurationError(f"`{name}` ({value}) must be finite and not negative.")


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
        median_length (`float`, *optional*, defaults to `800.0`):
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
    median_length: float = 800.0
    inter_prompt_std: float = 0.6
    intra_prompt_std: float = 0.5
    endless_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or not 1 <= self.median_length < math.inf:
            raise ConfigurationError(
                f"`num_prompts` ({self.num_prompts}) and `median_length` ({self.median_length}) must be at least 1."
            )
        _check_finite(inter_prompt_std=self.inter_prompt_std, intra_prompt_std=self.intra_prompt_std)
        if not 0 <= self.endless_share <= 0.1:
            raise ConfigurationError(f"`endless_share` ({self.endless_share}) must be between 0 and 0.1.")

    @cached_property
    def _parameters(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Each prompt's mean and deviation of log-lengths, and its share of endless candidates."""
        rng = np.random.default_rng([self.seed, 2])
        means = math.log(self.median_length) + self.inter_prompt_std * rng.standard_normal(self.num_prompts)
        stds = self.intra_prompt_std * np.exp(0.4 * rng.standard_normal(self.num_prompts))
        wild = rng.random(self.num_prompts) < 0.1
        return means, stds, np.where(wild, 5.0, 0.5 / 0.9) * self.endless_share

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """See [`LengthModel`]."""
        normal, uniform = _streams(seed, len(prompts), num_candidates)
        means, stds, endless = (values[prompts, None] for values in self._parameters)
        lengths = np.exp(np.minimum(means + stds * normal, 20.0)).astype(np.int64)
        return np.where(uniform < endless, ENDLESS, np.maximum(lengths, 1))


@dataclass(frozen=True)
class RecordedLengths:
    """
    Lengths like those of a recorded run: each candidate is one that its prompt was seen to have.

    A recorded candidate that was aborted, or cut off at the limit, is longer than it was seen. It is replaced by one
    of the trace's complete candidates that are longer, of any prompt; where there is none, it never ends.

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
        sizes = [len(own) for own in self.lengths]
        if not sizes or not all(sizes) or [len(own) for own in self.censored] != sizes:
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

    @property
    def num_prompts(self) -> int:
        """Prompts that were recorded."""
        return len(self.lengths)

    @cached_property
    def _flat(self) -> tuple[IntArray, NDArray[np.bool_], IntArray, IntArray]:
        """All lengths, whether they are bounds, and where each prompt's begin and how many they are."""
        lengths = np.concatenate([np.asarray(own, np.int64) for own in self.lengths])
        bounds = np.concatenate([np.asarray(own, bool) for own in self.censored])
        sizes = np.array([len(own) for own in self.lengths])
        return np.maximum(lengths, 1), bounds, np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """See [`LengthModel`]."""
        _, uniform = _streams(seed, len(prompts), num_candidates)
        all_lengths, all_bounds, starts, sizes = self._flat
        place = uniform * sizes[prompts, None]
        chosen = np.minimum(place.astype(np.int64), sizes[prompts, None] - 1)
        lengths = all_lengths[starts[prompts, None] + chosen]
        bounds = all_bounds[starts[prompts, None] + chosen]
        # What is left of the uniform number is uniform again, and chooses among the longer ones.
        return np.where(bounds, self._longer_than(lengths, place - chosen), lengths)

    def _longer_than(self, bounds: IntArray, uniform: FloatArray) -> IntArray:
        all_lengths, all_bounds, _, _ = self._flat
        complete = np.sort(all_lengths[~all_bounds])
        if not len(complete):
            return np.full_like(bounds, ENDLESS)
        first = np.searchsorted(complete, bounds, side="right")
        rest = len(complete) - first
        chosen = np.minimum(first + (uniform * rest).astype(np.int64), len(complete) - 1)
        return np.where(rest > 0, complete[chosen], ENDLESS)


@dataclass(frozen=True)
class Workload:
    """
    What is trained on, and what a step costs beside its rollout.

    Args:
        lengths ([`LengthModel`]):
            Response lengths of the data set's prompts.
        prompts_per_step (`int`):
            N.
        max_completion_length (`int`):
            Tokens at which responses are cut off.
        prompt_tokens (`int`, *optional*, defaults to `0`):
            Length of each prompt.
        train_seconds_per_token (`float`, *optional*, defaults to `0.0`):
            Forward and backward pass, per token of prompts and kept responses.
        fixed_seconds (`float`, *optional*, defaults to `0.0`):
            Per step: weight sync, rewards, optimizer.
        shaping (`float`, *optional*, defaults to `0.0`):
            How fast the policy follows what is selected, an assumption. A candidate stops at each of its tokens with a
            probability of 1 over its length, a batch with the geometric mean of its candidates. Each step adds
            `shaping` times (that of the kept candidates − that of all) to what every candidate stops with: the longest
            shrink most, and those that never end come to an end. Rewards play no part in it.
        uniform_share (`float`, *optional*, defaults to `0.0`):
            Share of groups whose rewards have no spread: nothing is learned from them. At most 0.9.
        redraws (`bool`, *optional*, defaults to `False`):
            Whether a candidate that begins anew gets a new length, as one that is sampled anew would. Otherwise it has
            its length again, so that all schedules that keep all candidates train on the same ones.

    Raises:
        [`ConfigurationError`]: If a number is out of range.
    """

    lengths: LengthModel
    prompts_per_step: int
    max_completion_length: int
    prompt_tokens: int = 0
    train_seconds_per_token: float = 0.0
    fixed_seconds: float = 0.0
    shaping: float = 0.0
    uniform_share: float = 0.0
    redraws: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.prompts_per_step <= self.lengths.num_prompts:
            raise ConfigurationError(
                f"`prompts_per_step` ({self.prompts_per_step}) must be at least 1, and at most the number of prompts "
                f"({self.lengths.num_prompts})."
            )
        if self.max_completion_length < 1:
            raise ConfigurationError(f"`max_completion_length` ({self.max_completion_length}) must be at least 1.")
        if not 0 <= self.uniform_share <= 0.9:
            raise ConfigurationError(f"`uniform_share` ({self.uniform_share}) must be between 0 and 0.9.")
        costs = ("prompt_tokens", "train_seconds_per_token", "fixed_seconds", "shaping")
        _check_finite(**{name: getattr(self, name) for name in costs})

    def epochs(self, seed: int) -> Iterator[list[IntArray]]:
        """Batches of prompts, a new order in each epoch; what does not fill a batch at its end is left out."""
        rng = np.random.default_rng([seed, 3])
        size = self.prompts_per_step
        while True:
            order = rng.permutation(self.lengths.num_prompts)
            yield [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


class BatchLengths:
    """The lengths of the candidates of the loader's `number`-th batch, in a training with this seed."""

    def __init__(self, model: LengthModel, seed: int, number: int, prompts: IntArray) -> None:
        self.prompts = prompts
        self._model = model
        self._seed = (seed, number)
        self._attempts: dict[int, IntArray] = {}

    def all(self, num_candidates: int, stop_rate: float) -> list[list[int]]:
        """Of each prompt's first candidates; `stop_rate` is what training has added to their probability to stop."""
        drawn = self._model.draw(self.prompts, num_candidates, self._seed)
        lengths: list[list[int]] = _shaped(drawn, stop_rate).tolist()
        return lengths

    def of(self, place: int, num_candidates: int, attempt: int, stop_rate: float) -> list[int]:
        """Of the prompt at a place, when it is sampled anew for the `attempt`-th time."""
        if attempt not in self._attempts:
            # A generator takes a seed's missing numbers for zeros, and a length model appends 0 or 1: hence the 1.
            key = (*self._seed, attempt + 1) if attempt else self._seed
            self._attempts[attempt] = self._model.draw(self.prompts, num_candidates, key)
        lengths: list[int] = _shaped(self._attempts[attempt][place], stop_rate).tolist()
        return lengths

    def informative(self, uniform_share: float) -> NDArray[np.bool_]:
        """Of which prompts the rewards have a spread."""
        drawn = np.random.default_rng((*self._seed, 5)).random(len(self.prompts))
        return np.asarray(drawn >= uniform_share)


def _shaped(lengths: IntArray, stop_rate: float) -> IntArray:
    """A candidate stopped at each token with a probability of 1 / length, and now does with `stop_rate` more."""
    if not stop_rate:
        return lengths
    return np.rint(1 / np.clip(1 / lengths + stop_rate, 1 / ENDLESS, 1.0)).astype(np.int64)
