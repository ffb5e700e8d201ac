"""
How long a rollout takes: per-token latency as a function of the number of running sequences, and the cost model built
on it.

Invariants: a curve is positive, continuous and non-decreasing for every batch size, also beyond the measured ones;
hence a rollout never gets faster by adding a response or lengthening one.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trl_darts.errors import ConfigurationError
from trl_darts.policy import latency_file
from trl_darts.policy.curve_fitting import fit_piecewise_linear


_NOUN = "latency curve"
_KIND = "latency_curve"
_LARGEST_KNEE = 65_536  # of a curve that does not rise
_VERSION = 1


@dataclass(frozen=True)
class LatencyCurve:
    """
    Per-token latency PTL in seconds as a continuous piecewise-linear function of the number of running sequences
    ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.1 and Appendix A).

    Below the first knot the curve is flat, beyond the last one it goes on with the last segment's slope.

    Args:
        knots (`Sequence[float]`):
            Batch sizes at which the slope changes, first and last included. Positive and strictly increasing.
        values (`Sequence[float]`):
            Seconds per token at the knots. Positive and non-decreasing.
        metadata (`dict`, *optional*):
            What was measured, for humans: model, hardware, tensor parallel size. Must be serialisable as JSON. Curves
            that differ only here are equal.

    Example:

    ```python
    >>> from trl_darts.policy import LatencyCurve

    >>> curve = LatencyCurve(knots=[8, 64], values=[0.010, 0.038])
    >>> round(curve(1), 3), round(curve(16), 3), round(curve(128), 3)
    (0.01, 0.014, 0.07)

    ```
    """

    knots: Sequence[float]
    values: Sequence[float]
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        knots, values = tuple(map(float, self.knots)), tuple(map(float, self.values))
        if not knots or len(knots) != len(values):
            raise ConfigurationError(
                f"`knots` ({len(knots)} entries) and `values` ({len(values)} entries) must have the same length, at "
                "least 1."
            )
        if not (knots[0] > 0 and _rises(knots, strictly=True) and math.isfinite(knots[-1])):
            raise ConfigurationError(f"`knots` ({list(knots)}) must be finite, positive and strictly increasing.")
        if not (values[0] > 0 and _rises(values, strictly=False) and math.isfinite(values[-1])):
            raise ConfigurationError(
                f"`values` ({list(values)}) must be finite, positive and non-decreasing: more sequences are never "
                "faster."
            )
        object.__setattr__(self, "knots", knots)
        object.__setattr__(self, "values", values)

    @classmethod
    def fit(cls, batch_sizes: ArrayLike, latencies: ArrayLike, num_segments: int = 3) -> LatencyCurve:
        """
        Fit the curve to a profile ([DARTS](https://huggingface.co/papers/2605.30859), Appendix A).

        Repeated measurements are reduced to their median. The fit then minimises the Huber loss of the relative errors
        over all values and breakpoints, under the constraint that no segment falls. Few distinct batch sizes give
        fewer segments: at most one per two of them, none (a constant) for a single one.

        Args:
            batch_sizes (`Sequence[float]` of shape `(P,)`):
                Numbers of running sequences, in any order, repeats allowed.
            latencies (`Sequence[float]` of shape `(P,)`):
                Seconds per token of each sequence, as measured.
            num_segments (`int`, *optional*, defaults to `3`):
                Number of linear segments. The paper finds three to be accurate.

        Returns:
            [`LatencyCurve`]: The fitted curve.

        Raises:
            [`ValueError`]: If there is nothing to fit, the lengths differ, or an entry is not positive and finite.
        """
        knots, values = fit_piecewise_linear(batch_sizes, latencies, num_segments)
        return cls(knots, values)

    @overload
    def __call__(self, batch_size: float) -> float: ...
    @overload
    def __call__(self, batch_size: NDArray[Any]) -> NDArray[np.float64]: ...
    def __call__(self, batch_size: float | NDArray[Any]) -> float | NDArray[np.float64]:
        """
        Per-token latency of each of `batch_size` running sequences.

        Args:
            batch_size (`float` or `np.ndarray`):
                Number of running sequences.

        Returns:
            `float` or `np.ndarray` of the same shape: Seconds per token.
        """
        knots, values = self.knots, self.values
        if isinstance(batch_size, np.ndarray):
            inside: NDArray[np.float64] = np.interp(batch_size, knots, values)
            return inside + self._last_slope * np.maximum(batch_size - knots[-1], 0.0)
        i = bisect_right(knots, batch_size)
        if i == 0:
            return values[0]
        if i == len(knots):
            return values[-1] + self._last_slope * (batch_size - knots[-1])
        share = (batch_size - knots[i - 1]) / (knots[i] - knots[i - 1])
        return values[i - 1] + share * (values[i] - values[i - 1])

    @property
    def _last_slope(self) -> float:
        if len(self.knots) == 1:
            return 0.0
        return (self.values[-1] - self.values[-2]) / (self.knots[-1] - self.knots[-2])

    def to_dict(self) -> dict[str, Any]:
        """The curve as a dictionary that can be serialised as JSON."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "knots": list(self.knots),
            "values": list(self.values),
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyCurve:
        """
        The curve that [`~LatencyCurve.to_dict`] described.

        Args:
            data (`Mapping[str, Any]`):
                Dictionary with the keys `kind`, `version`, `knots`, `values` and, optionally, `metadata`.

        Returns:
            [`LatencyCurve`]: The curve.

        Raises:
            [`ConfigurationError`]: If it does not describe a curve.
        """
        latency_file.check_kind(data, _NOUN, _KIND, _VERSION)
        try:
            return cls(data["knots"], data["values"], dict(data.get("metadata") or {}))
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"A latency curve needs lists of numbers `knots` and `values`: {type(error).__name__} {error}."
            ) from error

    def knee(self, slowdown: float = 0.25) -> int:
        """
        How many sequences an engine decodes at nearly the speed of one.

        Args:
            slowdown (`float`, *optional*, defaults to `0.25`):
                By how much more a token may take than it takes for a single sequence, as a share. Not negative.

        Returns:
            `int`: The largest such batch size; at least 1.
        """
        bound = float(self(1)) * (1 + slowdown)
        size = 1
        while size < _LARGEST_KNEE and float(self(2 * size)) <= bound:
            size *= 2
        low, high = size, 2 * size  # latencies never fall, so the bound is passed once
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if float(self(middle)) <= bound else (low, middle)
        return low

    def is_of(self, model: Any) -> bool:
        """
        Whether it was measured with a model, as far as both tell their names.

        Args:
            model (`str`, *optional*):
                Name or directory of a model. Directories before the name don't count.

        Returns:
            `bool`: `False` if both have names, and these differ.
        """
        own = self.metadata.get("model")
        return not own or not model or _base_name(own) == _base_name(model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curve to a JSON file."""
        latency_file.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyCurve:
        """
        Read a curve from a JSON file.

        Args:
            path (`str` or `os.PathLike`):
                A file that [`~LatencyCurve.save`], [`LatencyProfile.save`] or `trl-darts profile` wrote.

        Returns:
            [`LatencyCurve`]: The curve.

        Raises:
            [`ConfigurationError`]: If the file is missing or does not hold a latency curve.
        """
        return latency_file.read(path, _NOUN, "curve", cls.from_dict)


def _base_name(model: Any) -> str:
    return str(model).rstrip("/").rpartition("/")[2].lower()


def _rises(numbers: Sequence[float], strictly: bool) -> bool:
    return all(a < b if strictly else a <= b for a, b in pairwise(numbers))


def rollout_time(lengths: ArrayLike, latency: Callable[[NDArray[Any]], Any]) -> float:
    """
    Predicted wall-clock time of one rollout batch on one engine ([DARTS](https://huggingface.co/papers/2605.30859),
    Eq. 4).

    All responses start together and each decodes one token per step, so the batch shrinks as they end. Under data
    parallelism the batch is ready when its slowest engine is: take the maximum over the engines.

    Args:
        lengths (`Sequence[int]` of shape `(B,)`):
            Response lengths in tokens, in any order.
        latency ([`LatencyCurve`] or callable):
            Per-token latency in seconds as a function of an array of numbers of running sequences.

    Returns:
        `float`: Seconds until the longest response is complete. `0.0` for no responses.

    Raises:
        [`ValueError`]: If a length is negative.
    """
    ordered = np.sort(np.asarray(lengths, dtype=np.float64), axis=None)
    if not ordered.size:
        return 0.0
    if not ordered[0] >= 0 or not ordered[-1] >= 0:  # NaN sorts last
        raise ValueError(f"`lengths` (shortest {ordered[0]:g}) must not be negative.")
    steps = np.diff(ordered, prepend=0.0)
    ends = np.flatnonzero(steps)  # responses of equal length end together
    return float(steps[ends] @ latency(ordered.size - ends))
