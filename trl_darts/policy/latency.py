"""
Per-token latency as a function of the number of running sequences, and the rollout time predicted from it.

Invariants: a curve is positive, continuous and non-decreasing for every batch size, also beyond the measured ones.
Adding or lengthening a response therefore never makes a rollout faster.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError


T = TypeVar("T")
Array = NDArray[np.float64]

PROFILE_KIND = "latency_profile"  # a file with a curve, a surface and a prefill curve as entries
FILE_VERSION = 1

HUBER_DELTA = 0.03
"""Relative error at which the loss of a fit changes from squared (noise) to absolute (outliers)."""

MIN_LATENCY = 0.1
"""Lower bound of a fit as a share of the fastest measurement, to keep it positive."""

MAX_REPEATS = 8
"""Largest weight of a median of n repeats. With more repeats, the model's error exceeds the median's."""

MAX_COMBINATIONS = 500
"""Number of breakpoint combinations to try: 32 candidates for three segments give as many."""

_REWEIGHTINGS = 8
_IMPOSSIBLE = 1e9  # loss of breakpoints that leave a segment with too few measurements


class SavedModel:
    """Base of models saved as JSON with a `kind` and a `version`, in a file of their own or in a latency profile."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary that can be serialised as JSON."""
        return {"kind": self.kind, "version": FILE_VERSION, **asdict(cast(Any, self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds the model from [`to_dict`]'s result. Raises [`ConfigurationError`] if `data` is anything else."""
        cls.check(data)
        return cls(**{name: data[name] for name in cls._entries() if data.get(name) is not None})

    @classmethod
    def check(cls, data: Any) -> None:
        """Raises [`ConfigurationError`] if `data` has another kind or version, or lacks an entry."""
        noun = _noun(cls.kind)
        if not isinstance(data, Mapping):
            raise ConfigurationError(f"A {noun} must be a mapping, and this is {type(data).__name__}.")
        for key, expected in (("kind", cls.kind), ("version", FILE_VERSION)):
            if data.get(key) != expected:
                raise ConfigurationError(f"`{key}` ({data.get(key)!r}) of a {noun} must be {expected!r}.")
        optional = ("metadata", "tail")
        if missing := [f"`{name}`" for name in cls._entries() if name not in data and name not in optional]:
            raise ConfigurationError(f"A {noun} must have the entries {', '.join(missing)}.")

    @classmethod
    def _entries(cls) -> list[str]:
        return [entry.name for entry in fields(cast(Any, cls))]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str = "path") -> Self:
        """
        Read the model from a JSON file that `save` or `trl-darts profile` wrote. A [`ConfigurationError`] refers to
        the path as `name`.
        """
        return read_json(path, cls.kind, cls._from_file, name)

    @classmethod
    def _from_file(cls, data: Any) -> Self:
        if cls.kind != PROFILE_KIND and isinstance(data, Mapping) and data.get("kind") == PROFILE_KIND:
            data = data.get(cls.kind.removeprefix("latency_"))
            if data is None:
                why = " It was measured with one context length, and a surface needs two."
                why = why if cls.kind == "latency_surface" else ""
                raise ConfigurationError(f"This profile holds no {_noun(cls.kind)}.{why}")
        return cls.from_dict(data)


def read_json(path: str | os.PathLike[str], kind: str, parse: Callable[[Any], T], name: str = "path") -> T:
    """Reads and parses a JSON file. Failures raise [`ConfigurationError`], which refers to `path` as `name`."""
    try:
        return parse(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:  # a `ConfigurationError` is a `ValueError`
        reason = f"it lacks {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"`{name}` ({os.fspath(path)!r}) must name a JSON file with a {_noun(kind)}, and reading it failed: "
            f"{reason.rstrip('.')}. Write one with `trl-darts profile`."
        ) from error


def _noun(kind: str) -> str:
    return kind.replace("_", " ")


@dataclass(frozen=True)
class LatencyCurve(SavedModel):
    """
    Per-token latency PTL in seconds as a continuous piecewise-linear function of the number of running sequences
    ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.1 and Appendix A).

    Below the first knot the curve is flat. Beyond the last one it continues with the last segment's slope.

    Args:
        knots (`Sequence[float]`):
            Batch sizes at which the slope changes, first and last included. Positive and strictly increasing.
        values (`Sequence[float]`):
            Seconds per token at the knots. Positive and non-decreasing.
        metadata (`dict`, *optional*):
            Description of the measurement: model, hardware, tensor parallel size. Must be serialisable as JSON. It is
            ignored when curves are compared.

    Example:

    ```python
    >>> from trl_darts.policy import LatencyCurve

    >>> curve = LatencyCurve(knots=[8, 64], values=[0.010, 0.038])
    >>> round(curve(1), 3), round(curve(16), 3), round(curve(128), 3)
    (0.01, 0.014, 0.07)

    ```
    """

    kind = "latency_curve"

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
        if not (knots[0] > 0 and all(a < b for a, b in pairwise(knots)) and math.isfinite(knots[-1])):
            raise ConfigurationError(f"`knots` ({list(knots)}) must be finite, positive and strictly increasing.")
        if not (values[0] > 0 and all(a <= b for a, b in pairwise(values)) and math.isfinite(values[-1])):
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
        over all values and breakpoints, under the constraint that no segment decreases. There is at most one segment
        per two distinct batch sizes. A single batch size gives a constant.

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
        if num_segments < 1:
            raise ValueError(f"`num_segments` ({num_segments}) must be at least 1.")
        sizes, times = positive_columns(batch_sizes=batch_sizes, latencies=latencies)
        x, groups, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        y = np.array([np.median(times[groups == i]) for i in range(len(x))])
        if len(x) == 1:
            return cls(x.tolist(), y.tolist())
        knots, values = _CurveFit(x, y, counts, min(num_segments, max(1, len(x) // 2))).best()
        return cls(knots.tolist(), values.tolist())

    @overload
    def __call__(self, batch_size: float) -> float: ...
    @overload
    def __call__(self, batch_size: NDArray[Any]) -> Array: ...
    def __call__(self, batch_size: float | NDArray[Any]) -> float | Array:
        """Seconds per token of each of `batch_size` running sequences; an array for an array."""
        knots, values = self.knots, self.values
        if isinstance(batch_size, np.ndarray):
            inside: Array = np.interp(batch_size, knots, values)
            return inside + self._last_slope * np.maximum(batch_size - knots[-1], 0.0)
        i = bisect_right(knots, batch_size)  # faster for a single number, in the simulator's innermost loop
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

    def is_of(self, model: Any) -> bool:
        """Whether the curve was measured with `model` (a name or a directory). `True` if either name is unknown."""
        measured = self.metadata.get("model")
        return not measured or not model or _base_name(measured) == _base_name(model)


def rollout_time(lengths: ArrayLike, latency: Callable[[NDArray[Any]], Any]) -> float:
    """
    Predict the wall-clock time of one rollout batch on one engine ([DARTS](https://huggingface.co/papers/2605.30859),
    Eq. 4).

    All responses start together and each decodes one token per step, so the batch shrinks as they end. With data
    parallelism, the batch is ready when the slowest engine is done: take the maximum over the engines.

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


class _CurveFit:
    """
    Fits a curve to distinct batch sizes `x`, latencies `y` and numbers of measurements `counts`. Breakpoints are
    positions in the list of batch sizes: 2.5 is the middle between the third and the fourth.
    """

    def __init__(self, x: Array, y: Array, counts: NDArray[np.int64], num_segments: int) -> None:
        self.x, self.y = x, y
        weights = np.minimum(counts, MAX_REPEATS)
        self.weights = weights / weights.sum()
        self.num_breakpoints = num_segments - 1
        # Two batch sizes determine a segment, but then an outlier at an end of the profile is fitted exactly.
        self.min_points = 3 if len(x) >= 3 * num_segments else 2

    def best(self) -> tuple[Array, Array]:
        """Returns the knots and values with the smallest loss."""
        from scipy.optimize import brute, fmin

        breakpoints = np.array([])
        if num := self.num_breakpoints:
            per_axis = (MAX_COMBINATIONS * math.factorial(num)) ** (1 / num)
            last = len(self.x) - 1
            axis = slice(1, last, max(1.0, (last - 1) / per_axis))
            breakpoints = np.atleast_1d(brute(self.loss, (axis,) * num, finish=fmin))
        knots = self.knots(breakpoints)
        return knots, self.values(knots)[0]

    def knots(self, breakpoints: Array) -> Array:
        last = len(self.x) - 1
        return np.asarray(np.interp([0, *breakpoints, last], range(last + 1), self.x), np.float64)

    def loss(self, breakpoints: Array) -> float:
        knots = self.knots(np.atleast_1d(breakpoints))
        if np.any(np.diff(knots) <= 0):
            return _IMPOSSIBLE
        counts = np.searchsorted(self.x, knots[1:], "right") - np.searchsorted(self.x, knots[:-1], "left")
        return self.values(knots)[1] if counts.min() >= self.min_points else _IMPOSSIBLE

    def values(self, knots: Array) -> tuple[Array, float]:
        """
        Returns the best values at the knots, and their Huber loss. The curve is linear in its first value and the
        increments between knots, none of which may be negative.
        """
        from scipy.optimize import nnls
        from scipy.special import huber

        floor = MIN_LATENCY * self.y.min()
        shares = np.clip((self.x[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)  # of each increment, (P, S)
        design = np.column_stack([np.ones_like(self.x), shares]) / self.y[:, None]  # relative errors
        target = 1.0 - floor / self.y
        steps = robust_least_squares(design, target, self.weights, lambda *problem: nnls(*problem)[0])
        loss = float(self.weights @ huber(HUBER_DELTA, design @ steps - target))
        steps[0] += floor
        return np.cumsum(steps), loss


def robust_least_squares(
    design: Array, target: Array, weights: Array, solve: Callable[[Array, Array], Array]
) -> Array:
    """Minimises the Huber loss of `design @ x - target` by iteratively reweighted least squares with `solve`."""
    root = np.sqrt(weights)
    for _ in range(_REWEIGHTINGS):
        solution = solve(design * root[:, None], target * root)
        error = np.abs(design @ solution - target)
        if error.max() <= HUBER_DELTA:
            break
        root = np.sqrt(weights * HUBER_DELTA / np.maximum(error, HUBER_DELTA))
    return solution


def positive_columns(**columns: ArrayLike) -> list[Array]:
    """Returns the measurements as arrays of one length. Raises `ValueError` unless all are positive and finite."""
    arrays = {name: np.asarray(column, float) for name, column in columns.items()}
    shapes = [array.shape for array in arrays.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1 or shapes[0] == (0,):
        given = ", ".join(f"`{name}` (shape {array.shape})" for name, array in arrays.items())
        raise ValueError(f"{given} must be lists of the same length, at least 1.")
    for name, array in arrays.items():
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError(f"`{name}` ({array.min():g} to {array.max():g}) must be positive and finite.")
    return list(arrays.values())


def _base_name(model: Any) -> str:
    return str(model).rstrip("/").rpartition("/")[2].lower()
