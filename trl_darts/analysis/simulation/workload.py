"""
The workload of a simulated training: prompts, the lengths of their responses, and the costs of a step beside its
rollout.

Invariant: the length of a prompt's i-th candidate in an epoch depends only on the seed, the loader's batch, the
prompt's place in it and i. So all schedules see the same candidates, whenever and however many they start.
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
Calls = list[tuple[int, float]]  # of a conversation: tokens decoded before each, and its seconds


class LengthModel(Protocol):
    """The response lengths of a data set. Prompts are numbers from 0."""

    @property
    def num_prompts(self) -> int:
        """Prompts in the data set."""

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """Returns lengths in tokens, of shape `(len(prompts), num_candidates)`, at least 1, without any limit."""


def _check_finite(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigurationError(f"`{name}` ({value}) must be finite and not negative.")


def _streams(seed: Sequence[int], num_prompts: int, num_candidates: int) -> tuple[FloatArray, FloatArray]:
    """Draws normal and uniform numbers, candidate by candidate, so that further candidates change no earlier one."""
    shape = (num_candidates, num_prompts)
    normal = np.random.default_rng([*seed, 0]).standard_normal(shape)
    uniform = np.random.default_rng([*seed, 1]).random(shape)
    return normal.T, uniform.T


@dataclass(frozen=True)
class LogNormalLengths:
    """
    Lengths that are log-normal within each prompt and between prompts.

    Args:
        num_prompts (`int`, *optional*, defaults to `10_000`):
            Prompts in the data set.
        median_length (`float`, *optional*, defaults to `800.0`):
            Median of the prompts' median lengths, in tokens.
        inter_prompt_std (`float`, *optional*, defaults to `0.6`):
            Standard deviation of the prompts' mean log-lengths.
        intra_prompt_std (`float`, *optional*, defaults to `0.5`):
            Median standard deviation of the log-lengths of one prompt. It varies between prompts by a log-normal
            factor with a standard deviation of 0.4.
        endless_share (`float`, *optional*, defaults to `0.0`):
            Share of candidates that never end by themselves. Half of them belong to a tenth of the prompts.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the prompts' own parameters.

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


# Log-normals near the quantiles that others published. How much of the spread is within a prompt was not published:
# half of the variance here.
WORKLOADS = {
    # LLaMA-3.1-8B on DeepScaleR: 10.85 % of the answers are longer than 8K tokens, 2.18 % than 16K (PAT, Figure 3b). A
    # log-normal with these has p50 2,748, p90 8,540 and p99 21,525.
    "llama_8b_deepscaler": LogNormalLengths(1_024, 2_748.0, 0.60, 0.50),
    # DeepSeek-R1 in production: p50 833, p90 4,541 and p99 13,915 (ServeGen). No log-normal has all three.
    "deepseek_r1": LogNormalLengths(1_024, 833.0, 0.84, 0.71),
}


@dataclass(frozen=True)
class RecordedLengths:
    """
    Lengths like those of a recorded run: each candidate has one of its prompt's recorded lengths.

    The full length of a recorded candidate that was aborted or truncated is unknown. A longer complete candidate of
    any prompt replaces it. If there is none, it never ends.

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
        """All lengths, whether each is a lower bound, and the start and number of each prompt's lengths."""
        lengths = np.concatenate([np.asarray(own, np.int64) for own in self.lengths])
        bounds = np.concatenate([np.asarray(own, bool) for own in self.censored])
        sizes = np.array([len(own) for own in self.lengths])
        return np.maximum(lengths, 1), bounds, np.cumsum(sizes) - sizes, sizes

    def draw(self, prompts: IntArray, num_candidates: int, seed: Sequence[int]) -> IntArray:
        """See [`LengthModel`]."""
        _, uniform = _streams(seed, len(prompts), num_candidates)
        all_lengths, all_bounds, starts, sizes = self._flat
        place = uniform * sizes[prompts, None]
        chosen = np.minimum(place.astype(np.int64), sizes[prompts, None] - 1)
        lengths = all_lengths[starts[prompts, None] + chosen]
        bounds = all_bounds[starts[prompts, None] + chosen]
        # The fraction of the uniform number is uniform too, and chooses among the longer ones.
        return np.where(bounds, self._longer_than(lengths, place - chosen), lengths)

    def _longer_than(self, bounds: IntArray, uniform: FloatArray) -> IntArray:
        all_lengths, all_bounds, _, _ = self._flat
        complete = np.append(np.sort(all_lengths[~all_bounds]), ENDLESS)
        first = np.searchsorted(complete[:-1], bounds, side="right")
        return complete[first + (uniform * (len(complete) - 1 - first)).astype(np.int64)]


@dataclass(frozen=True)
class ToolCalls:
    """
    Calls of tools in a workload's conversations (an assumption): their number has a Poisson distribution, they divide
    what the model decodes at random, and their seconds are log-normal.

    Args:
        mean_calls (`float`):
            Calls of a conversation, on average.
        median_seconds (`float`, *optional*, defaults to `1.0`):
            Median seconds of a call.
        seconds_std (`float`, *optional*, defaults to `1.0`):
            Standard deviation of the seconds' logarithms.

    Raises:
        [`ConfigurationError`]: If a number is negative or not finite.
    """

    mean_calls: float
    median_seconds: float = 1.0
    seconds_std: float = 1.0

    def __post_init__(self) -> None:
        _check_finite(**vars(self))

    def draw(self, length: int, seed: Sequence[int]) -> Calls:
        """Returns the calls of a conversation of so many decoded tokens."""
        rng = np.random.default_rng(seed)
        places = np.unique(rng.integers(1, max(2, length), rng.poisson(self.mean_calls)))
        places = places[places < length]  # each turn has a token
        seconds = self.median_seconds * np.exp(self.seconds_std * rng.standard_normal(len(places)))
        return list(zip(places.tolist(), seconds.tolist(), strict=True))


@dataclass(frozen=True)
class Workload:
    """
    The data set of a training, and the costs of a step beside its rollout.

    Args:
        lengths ([`LengthModel`]):
            Response lengths of the data set's prompts.
        prompts_per_step (`int`):
            Prompts of each step [N].
        max_completion_length (`int`):
            Tokens at which responses are truncated.
        prompt_tokens (`int`, *optional*, defaults to `0`):
            Length of each prompt.
        train_seconds_per_token (`float`, *optional*, defaults to `0.0`):
            Seconds of the forward and backward pass, per token of prompts and kept responses.
        fixed_seconds (`float`, *optional*, defaults to `0.0`):
            Seconds per step for weight sync, rewards and optimizer.
        shaping (`float`, *optional*, defaults to `0.0`):
            How fast the policy follows the selection (an assumption). A candidate stops at each token with a
            probability of 1 / its length; for a batch, the length is the geometric mean. Each step adds `shaping` ×
            (probability of the kept candidates − probability of all) to every candidate's probability, so the longest
            shrink most, and those that never end do end. Rewards have no influence.
        uniform_share (`float`, *optional*, defaults to `0.0`):
            Share of groups whose rewards have no spread, from which nothing is learned. At most 0.9.
        redraws (`bool`, *optional*, defaults to `False`):
            Whether a restarted candidate gets a new length, as in reality. By default it gets the same length, so
            that all schedules that keep all candidates train on the same ones.

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
    tools: ToolCalls | None = None

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

    def train_seconds(self, lengths: Sequence[int]) -> float:
        """Returns the seconds of a step beside its rollout, for rows of these lengths."""
        num_tokens = sum(lengths) + len(lengths) * self.prompt_tokens
        return self.fixed_seconds + num_tokens * self.train_seconds_per_token

    def epochs(self, seed: int) -> Iterator[list[IntArray]]:
        """Yields an epoch's batches of prompts, in a new order each epoch, without an incomplete last batch."""
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
        """Returns the lengths of each prompt's first candidates; see `_shaped` for `stop_rate`."""
        drawn = self._model.draw(self.prompts, num_candidates, self._seed)
        lengths: list[list[int]] = _shaped(drawn, stop_rate).tolist()
        return lengths

    def of(self, place: int, num_candidates: int, attempt: int, stop_rate: float) -> list[int]:
        """Returns the lengths of the prompt at a place, when it is restarted for the `attempt`-th time."""
        if attempt not in self._attempts:
            # A generator reads a seed's missing numbers as zeros, and a length model appends 0 or 1: hence the 1.
            key = (*self._seed, attempt + 1) if attempt else self._seed
            self._attempts[attempt] = self._model.draw(self.prompts, num_candidates, key)
        lengths: list[int] = _shaped(self._attempts[attempt][place], stop_rate).tolist()
        return lengths

    def calls(self, tools: ToolCalls, place: int, candidate: int, length: int) -> Calls:
        """Returns the calls of a candidate of the prompt at a place."""
        return tools.draw(length, (*self._seed, 6, place, candidate))

    def informative(self, uniform_share: float) -> NDArray[np.bool_]:
        """Returns a mask of the prompts whose rewards have a spread."""
        drawn = np.random.default_rng((*self._seed, 5)).random(len(self.prompts))
        return np.asarray(drawn >= uniform_share)


def _shaped(lengths: IntArray, stop_rate: float) -> IntArray:
    """Adds `stop_rate` to the probability with which a candidate stops at each token, 1 / its length."""
    if not stop_rate:
        return lengths
    return np.rint(1 / np.clip(1 / lengths + stop_rate, 1 / ENDLESS, 1.0)).astype(np.int64)
