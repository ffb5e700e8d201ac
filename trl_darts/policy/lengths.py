"""
Statistics of response lengths: per prompt over epochs, of the data set over steps, and by the prompt's length.

Prompts are identified by 64-bit keys. 100,000 prompts take about 20 MB in memory and 2.8 MB on disk.

Invariants: a group's contribution depends on earlier steps only, never on the order of the groups within a step. A
restored tracker behaves exactly like the saved one.
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
"""Number of groups (16 steps of 64) after which an observation's weight is halved, because lengths drift."""

SHRINKAGE = 8
"""
Pseudo-observations for a slope of zero, each at a log distance of 1 from the mean prompt length: a few dozen prompts
of similar length say little about other lengths.
"""

DEFAULT_EMA = 0.5  # weight of the newest observation
_UNSEEN = (math.nan, math.nan)
_PER_PROMPT = {"keys": np.uint64, "means": np.float64, "variances": np.float64}
# "dataset": moving averages of mean, mean square and log-scale deviation within groups; number of steps.
# "pending": this step's sums of count, length, square, weight of the log-scale deviation, weighted deviation.
# "prior": the sums of a `PromptLengthPrior`, earlier ones and this step's.
_PER_DATASET = {"dataset": (4,), "pending": (5,), "prior": (2, 10)}


def _as_64_bits(key: PromptKey) -> int:
    """Returns an integer modulo 2^64, or the BLAKE2b hash of a string. Unlike `hash`, equal in every process."""
    if isinstance(key, str):
        return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    number = operator.index(key)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"`key` ({number}) must fit in 64 bits. Pass a string, which is hashed.")
    return number & 0xFFFF_FFFF_FFFF_FFFF


class LengthTracker:
    """
    Smoothed mean and standard deviation of response lengths, with censored lengths as lower bounds
    ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2 and Appendices B and C).

    Per prompt, σ̃²_L(q_i) and the mean are exponential moving averages over epochs, initialised by the first epoch.
    For the data set, σ̃_L and L̃ come from moving averages over steps of the first two moments of all candidates.

    Args:
        ema (`float`, *optional*, defaults to `0.5`):
            Weight of the newest observation, in (0, 1]. `1.0` keeps only the last epoch.
        horizon (`float`, *optional*, defaults to infinity):
            Upper bound of the estimate for a censored length in tokens, see [`group_moments`]. The trainer sets twice
            its `max_completion_length`.
        source (`str`, *optional*, defaults to `""`):
            Model and tokenizer of the responses. It is saved with the state, and a state of another source is
            rejected.

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

    def __init__(self, ema: float = DEFAULT_EMA, horizon: float = math.inf, source: str = "") -> None:
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
        Add one epoch's candidates of one prompt, including the discarded and the aborted ones.

        Args:
            key (`int` or `str`):
                Identity of the prompt.
            lengths (`Sequence[int]` of shape `(B,)`):
                Response lengths in tokens.
            censored (`Sequence[bool]` of shape `(B,)`, *optional*):
                Whether each length is a lower bound because the candidate was aborted or hit the limit. By default,
                none is.
            num_prompt_tokens (`int`, *optional*):
                Length of the prompt. Used to predict the completion lengths of unseen prompts, and required for the
                spread within prompts, by which spare candidates are added or left out.

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
        """Returns the smoothed mean length of a prompt in tokens, NaN if it was never seen."""
        return self._prompts.get(_as_64_bits(key), _UNSEEN)[0]

    def std(self, key: PromptKey) -> float:
        """Returns the smoothed standard deviation of a prompt's lengths, σ̃_L(q_i), NaN if it was never seen."""
        return math.sqrt(self._prompts.get(_as_64_bits(key), _UNSEEN)[1])

    @property
    def dataset_mean(self) -> float:
        """L̃, the smoothed mean length over the data set in tokens. NaN before there is data."""
        mean, _, _, steps = map(float, self._folded())
        return mean if steps else math.nan

    @property
    def rho(self) -> float:
        """
        ρ = σ̃_L / L̃ of the data set ([DARTS](https://huggingface.co/papers/2605.30859), Appendix B), including the
        current step. NaN before there is data.
        """
        mean, square, _, steps = map(float, self._folded())
        if not steps:
            return math.nan
        return math.sqrt(max(square - mean * mean, 0.0)) / mean if mean else 0.0

    def _folded(self) -> NDArray[np.float64]:
        """Returns the data set's averages, including the pending step."""
        num, total, squares, weight, log_stds = self._pending
        if not num:
            return self._dataset
        old, steps = self._dataset[:3], self._dataset[3]
        new = np.array([total / num, squares / num, log_stds / weight if weight else math.nan])
        new = np.where(np.isnan(new), old, new)
        averages = np.where(np.isnan(old), new, old + self.ema * (new - old)) if steps else new
        return np.append(averages, steps + 1)

    def end_step(self) -> None:
        """Add the step's pooled moments, if any, to the data set's moving averages."""
        self._dataset, self._pending = self._folded(), np.zeros(5)
        self.prior.end_step()

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Returns the state without the configuration, as copied arrays."""
        rows = [(key, *values) for key, values in self._prompts.items()]
        columns = zip(*rows, strict=True) if rows else [()] * len(_PER_PROMPT)
        state = {
            name: np.array(column, dtype) for (name, dtype), column in zip(_PER_PROMPT.items(), columns, strict=True)
        }
        dataset = {"dataset": self._dataset.copy(), "pending": self._pending.copy(), "prior": self.prior.state()}
        return {**state, **dataset, "source": np.array(self.source)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, or raise [`StateMismatchError`]. `ema` and `horizon` stay as configured."""
        num = len({int(key) for key in state.get("keys", ())})
        expected = dict.fromkeys(_PER_PROMPT, (num,)) | _PER_DATASET | {"source": ()}
        found = {name: np.shape(state[name]) for name in sorted(state)}
        if found != expected:
            raise StateMismatchError(
                f"`state` ({found}) must have the keys and shapes of a `LengthTracker` with {num} distinct prompts "
                f"({expected}). Load a state that `LengthTracker` saved, or start without one."
            )
        self.check_source(str(state["source"]))
        keys, *values = (np.asarray(state[name], dtype).tolist() for name, dtype in _PER_PROMPT.items())
        self._prompts = dict(zip(keys, zip(*values, strict=True), strict=True))
        self._dataset, self._pending, prior = (np.array(state[name], float) for name in _PER_DATASET)
        self.prior.load_state(prior)

    def check_source(self, source: str) -> None:
        """Raise [`StateMismatchError`] if both sources are known and differ."""
        if source and self.source and source != self.source:
            raise StateMismatchError(
                f"`source` of the saved lengths ({source}) must be that of this run ({self.source}). Load lengths of "
                "the same model and tokenizer, or start without."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to exactly this path in NumPy's `.npz` format without pickles, atomically."""
        arrays: dict[str, Any] = self.state_dict()
        partial = Path(f"{os.fspath(path)}.partial")
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """
        Restore the state from a file that [`~LengthTracker.save`] wrote. Raises [`ConfigurationError`] if the file is
        missing or not in NumPy's `.npz` format, [`StateMismatchError`] if it holds a different state.
        """
        try:
            with open(path, "rb") as file:
                if not zipfile.is_zipfile(file):  # NumPy's error advises to load a pickle
                    raise zipfile.BadZipFile("it is not in NumPy's .npz format")
                file.seek(0)
                with np.load(file, allow_pickle=False) as archive:
                    state = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigurationError(
                f"`path` ({os.fspath(path)!r}) must name a file that `LengthTracker.save` wrote, and reading it "
                f"failed: {error}. Point it to the checkpoint's file, or start without one."
            ) from error
        self.load_state_dict(state)


class PromptLengthPrior:
    """
    Predicts mean and standard deviation of the response lengths of an unseen prompt from the prompt's length.

    The logarithms of mean and standard deviation are regressed on that of the prompt's length. The slopes are shrunk
    towards zero, which gives the mean of the seen prompts. Beyond two standard deviations of the seen prompt lengths,
    the prediction is constant. The method is ours (StreamRL trains a model) and serves the budget and the order of
    submission.
    """

    def __init__(self) -> None:
        # Sums of 1, x, x², y, x·y, z, x·z, z², mean, std; x, y, z are the logs of prompt length, mean and std.
        self._sums, self._pending = np.zeros(10), np.zeros(10)

    def update(self, num_prompt_tokens: int, mean: float, std: float) -> None:
        """Add the current estimates of one prompt."""
        x, y, z = (math.log(max(value, 1.0)) for value in (num_prompt_tokens, mean, std))
        self._pending += (1.0, x, x * x, y, x * y, z, x * z, z * z, mean, std)

    def end_step(self) -> None:
        """Decay the observations of earlier steps."""
        self._sums = self._sums * 0.5 ** (self._pending[0] / HALF_LIFE) + self._pending
        self._pending = np.zeros(10)

    def predict(self, num_prompt_tokens: int) -> tuple[float, float]:
        """Returns mean and standard deviation in tokens, NaN before the first update."""
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
        """Returns the range of the standard deviations of most prompts, `None` before the first update."""
        count, averages = self._averages()
        if not count:
            return None
        z, zz = averages[5], averages[7]
        reach = 2 * math.sqrt(max(zz - z * z, 0.0))
        return math.exp(z - reach), math.exp(z + reach)

    def typical_spread(self) -> float:
        """Returns the mean standard deviation of a prompt's lengths over their mean, NaN before the first update."""
        count, averages = self._averages()
        return averages[-1] / max(averages[-2], 1.0) if count else math.nan

    def _averages(self) -> tuple[float, list[float]]:
        sums = self._sums + self._pending
        count = float(sums[0])
        return count, (sums / count).tolist() if count else []

    def state(self) -> NDArray[np.float64]:
        """Returns the state as an array for [`load_state`]."""
        return np.array([self._sums, self._pending])

    def load_state(self, state: NDArray[np.float64]) -> None:
        self._sums, self._pending = state.copy()
