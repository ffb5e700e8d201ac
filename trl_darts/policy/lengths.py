"""
What is remembered of response lengths: per prompt over the epochs, of the whole data set over the steps, and how they
go with the length of the prompt.

A prompt is known by a 64-bit key. 100,000 prompts take about 20 MB in memory and 2.8 MB on disk.

Invariants: what a group adds to the tracker depends on earlier steps only, never on the order of the groups within a
step; a restored tracker goes on exactly as the saved one would have.
"""

import math
import operator
import os
import zipfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError, StateMismatchError
from .censoring import group_moments


PromptKey: TypeAlias = SupportsIndex | str
"""A 64-bit integer, or a string that is hashed to one."""

HALF_LIFE = 1024
"""Groups after which an observation counts half, because the policy's lengths drift: 16 steps of 64 prompts."""

SHRINKAGE = 8
"""
Prompts that speak for no trend, each at a distance of e from the mean prompt length: a few dozen prompts of about the
same length say little of others.
"""

_UNSEEN = (math.nan, math.nan)
_PER_PROMPT = {"keys": np.uint64, "means": np.float64, "variances": np.float64}
# Moving averages of (mean, mean square, log-scale deviation within groups, steps), and the step's sums of (count,
# length, square, weight of a group's log-scale deviation, that times it); the sums of a `PromptLengthPrior`, and those
# of the step.
_PER_DATASET = {"dataset": (4,), "pending": (5,), "prior": (2, 10)}


def _as_64_bits(key: PromptKey) -> int:
    """Key modulo 2^64, or the BLAKE2b hash of a string: the same in every process, unlike `hash`."""
    if isinstance(key, str):
        return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    number = operator.index(key)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"`key` ({number}) must fit in 64 bits. Pass a string, which is hashed.")
    return number & 0xFFFF_FFFF_FFFF_FFFF


class LengthTracker:
    """
    Smoothed mean and standard deviation of response lengths, with censored lengths taken for lower bounds
    ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2 and Appendices B and C).

    Per prompt, σ̃²_L(q_i) and the mean are exponential moving averages over epochs; the first epoch initialises them.
    For the data set, σ̃_L and L̃ come from moving averages over steps of the first two moments of all candidates.

    Args:
        ema (`float`, *optional*, defaults to `0.5`):
            Weight of the newest observation, in (0, 1]: `1.0` remembers nothing but the last epoch.
        horizon (`float`, *optional*, defaults to infinity):
            No censored length is taken to be longer than this many tokens, see [`group_moments`]. The trainer sets
            twice its `max_completion_length`.
        source (`str`, *optional*, defaults to `""`):
            Whose responses they are. Saved with them: the state of another source is refused.

    Example:

    ```python
    >>> from trl_darts.policy import LengthTracker

    >>> tracker = LengthTracker()
    >>> tracker.update("What is 2 + 2?", lengths=[10, 20, 30], censored=[False, False, False])
    >>> tracker.end_step()
    >>> tracker.mean("What is 2 + 2?"), tracker.std("What is 2 + 2?")
    (20.0, 10.0)

    ```
    """

    def __init__(self, ema: float = 0.5, horizon: float = math.inf, source: str = "") -> None:
        if not 0 < ema <= 1:
            raise ConfigurationError(
                f"`ema` ({ema}) must be above 0 and at most 1: it is the weight of the newest observation."
            )
        if not horizon >= 1:
            raise ConfigurationError(f"`horizon` ({horizon}) must be at least 1, in tokens.")
        self.ema = ema
        self.horizon = horizon
        self.source = source
        self.prior = PromptLengthPrior()
        self._prompts: dict[int, tuple[float, float]] = {}  # by key: mean, variance
        self._dataset = np.array([0.0, 0.0, math.nan, 0.0])
        self._pending = np.zeros(5)

    def __len__(self) -> int:
        return len(self._prompts)

    def update(
        self,
        key: PromptKey,
        lengths: Sequence[int],
        censored: Sequence[bool] | None = None,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """
        Add one epoch's candidates of one prompt: all of them, also the discarded and the aborted ones.

        Args:
            key (`int` or `str`):
                The prompt's identity.
            lengths (`Sequence[int]` of shape `(B,)`):
                Response lengths in tokens.
            censored (`Sequence[bool]` of shape `(B,)`, *optional*):
                Whether the length is a lower bound: the candidate was aborted or hit the limit. By default none is.
            num_prompt_tokens (`int`, *optional*):
                Length of the prompt, from which other prompts' lengths are predicted.

        Raises:
            [`ValueError`]: If there are no lengths, one is negative, or `censored` has another length.
        """
        number = _as_64_bits(key)
        moments = group_moments(lengths, censored, float(self._dataset[2]), self.horizon)
        mean, variance = self._prompts.get(number, (moments.mean, moments.variance))
        mean += self.ema * (moments.mean - mean)
        variance += self.ema * (moments.variance - variance)
        self._prompts[number] = mean, variance
        if num_prompt_tokens is not None:
            self.prior.update(num_prompt_tokens, mean, math.sqrt(variance))
        num, weight = len(lengths), max(moments.num_complete - 1, 0)
        log_std = moments.log_std if weight else 0.0
        self._pending += (num, num * moments.mean, num * moments.square, weight, weight * log_std)

    def mean(self, key: PromptKey) -> float:
        """Smoothed mean length of a prompt in tokens, NaN if it was never seen."""
        return self._prompts.get(_as_64_bits(key), _UNSEEN)[0]

    def std(self, key: PromptKey) -> float:
        """Smoothed standard deviation of a prompt's lengths in tokens, σ̃_L(q_i), NaN if it was never seen."""
        return math.sqrt(self._prompts.get(_as_64_bits(key), _UNSEEN)[1])

    @property
    def dataset_mean(self) -> float:
        """L̃, the smoothed mean length over the data set in tokens. NaN before there is data."""
        mean, _, _, steps = map(float, self._folded())
        return mean if steps else math.nan

    @property
    def rho(self) -> float:
        """
        ρ = σ̃_L / L̃ of the data set ([DARTS](https://huggingface.co/papers/2605.30859), Appendix B), the step that
        has not been ended included. NaN before there is data.
        """
        mean, square, _, steps = map(float, self._folded())
        if not steps:
            return math.nan
        return math.sqrt(max(square - mean * mean, 0.0)) / mean if mean else 0.0

    def _folded(self) -> NDArray[np.float64]:
        """The data set's averages with the pending step."""
        num, total, squares, weight, log_stds = self._pending
        if not num:
            return self._dataset
        old, steps = self._dataset[:3], self._dataset[3]
        new = np.array([total / num, squares / num, log_stds / weight if weight else math.nan])
        new = np.where(np.isnan(new), old, new)
        averages = np.where(np.isnan(old), new, old + self.ema * (new - old)) if steps else new
        return np.append(averages, steps + 1)

    def end_step(self) -> None:
        """Fold the step's pooled moments into the data set's moving average, if it had data."""
        self._dataset, self._pending = self._folded(), np.zeros(5)
        self.prior.end_step()

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Everything but the configuration, as copies: one array per quantity."""
        rows = [(key, *values) for key, values in self._prompts.items()]
        columns = zip(*rows, strict=True) if rows else [()] * len(_PER_PROMPT)
        state = {
            name: np.array(column, dtype) for (name, dtype), column in zip(_PER_PROMPT.items(), columns, strict=True)
        }
        dataset = {"dataset": self._dataset.copy(), "pending": self._pending.copy(), "prior": self.prior.state()}
        return {**state, **dataset, "source": np.array(self.source)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, or raise [`StateMismatchError`]. `ema` and `horizon` stay as configured."""
        num = len({int(key) for key in state.get("keys", ())})
        expected = dict.fromkeys(_PER_PROMPT, (num,)) | _PER_DATASET | {"source": ()}
        found = {name: np.shape(state[name]) for name in sorted(state)}
        if found != expected:
            raise StateMismatchError(
                f"The state of a `LengthTracker` with {num} distinct prompts has the keys and shapes {expected}, and "
                f"this one has {found}. Load the state that the tracker saved, or start without one."
            )
        self.check_source(str(state["source"]))
        keys, *values = (np.asarray(state[name], dtype).tolist() for name, dtype in _PER_PROMPT.items())
        self._prompts = dict(zip(keys, zip(*values, strict=True), strict=True))
        self._dataset, self._pending, prior = (np.array(state[name], float) for name in _PER_DATASET)
        self.prior.load_state(prior)

    def check_source(self, source: str) -> None:
        """[`StateMismatchError`] if lengths of `source` are not of this tracker's, as far as both are known."""
        if source and self.source and source != self.source:
            raise StateMismatchError(
                f"These are lengths of {source}, and this training is of {self.source}. Load lengths of the same "
                "model and tokenizer, or start without."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to exactly this path, as NumPy's `.npz` without pickles. Replaces the file at once."""
        arrays: dict[str, Any] = self.state_dict()
        partial = Path(f"{os.fspath(path)}.partial")
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """
        Go on from the state in a file that [`~LengthTracker.save`] wrote. [`ConfigurationError`] if it is missing or
        not in NumPy's `.npz` format, [`StateMismatchError`] if it holds something else.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                state = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigurationError(
                f"`path` ({os.fspath(path)!r}) must name a file that `LengthTracker.save` wrote, and reading it "
                f"failed: {error}. Point it to the checkpoint's file, or start without one."
            ) from error
        self.load_state_dict(state)


class PromptLengthPrior:
    """
    Mean and standard deviation of the responses to a prompt never seen, by its length.

    The logarithms of the mean and of the deviation are regressed on that of the prompt's length, and the slopes are
    drawn to zero: what is left then is the mean of the prompts seen. Beyond two deviations of the lengths seen, the
    prediction is that of the end. Ours, for the budget and for the order of submission (StreamRL trains a model).
    """

    def __init__(self) -> None:
        # 1, x, x², y, x·y, z, x·z, z², mean, deviation, where x, y, z are logarithms of prompt length, mean, deviation
        self._sums, self._pending = np.zeros(10), np.zeros(10)

    def update(self, num_prompt_tokens: int, mean: float, std: float) -> None:
        """Add what is known of a prompt's responses by now."""
        x, y, z = (math.log(max(value, 1.0)) for value in (num_prompt_tokens, mean, std))
        self._pending += (1.0, x, x * x, y, x * y, z, x * z, z * z, mean, std)

    def end_step(self) -> None:
        """Let what was known before the step fade."""
        self._sums = self._sums * 0.5 ** (self._pending[0] / HALF_LIFE) + self._pending
        self._pending = np.zeros(10)

    def predict(self, num_prompt_tokens: int) -> tuple[float, float]:
        """Mean and standard deviation in tokens, NaN before the first update."""
        count, averages = self._averages()
        if not count:
            return _UNSEEN
        _, x, xx, y, xy, z, xz, _, mean, std = averages
        spread = max(xx - x * x, 0.0)
        reach = 2 * math.sqrt(spread)
        shift = min(max(math.log(max(num_prompt_tokens, 1)) - x, -reach), reach)
        levels = []
        for level, covariance in ((mean, xy - x * y), (std, xz - x * z)):
            slope = count * covariance / (count * spread + SHRINKAGE)
            levels.append(level * math.exp(slope * shift - slope * slope * spread / 2))  # `level` is their mean
        return levels[0], levels[1]

    def typical_stds(self) -> tuple[float, float] | None:
        """The range of most prompts' standard deviations, `None` before the first update."""
        count, averages = self._averages()
        if not count:
            return None
        z, zz = averages[5], averages[7]
        reach = 2 * math.sqrt(max(zz - z * z, 0.0))
        return math.exp(z - reach), math.exp(z + reach)

    def _averages(self) -> tuple[float, list[float]]:
        sums = self._sums + self._pending
        count = float(sums[0])
        return count, (sums / count).tolist() if count else []

    def state(self) -> NDArray[np.float64]:
        """As an array, with [`load_state`]."""
        return np.array([self._sums, self._pending])

    def load_state(self, state: NDArray[np.float64]) -> None:
        self._sums, self._pending = state.copy()
