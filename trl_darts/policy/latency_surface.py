"""
Per-token latency as a function of the number of running sequences and of the tokens in their contexts.

Invariants: a surface is positive, continuous, and non-decreasing in each argument, also beyond the measured range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from ..errors import ConfigurationError
from .latency import MIN_LATENCY, Array, LatencyCurve, SavedModel, positive_columns, robust_least_squares


_COLUMNS = ("batch_sizes", "base_latencies", "token_latencies", "reaches")
_SMOOTHNESS = 1e-3  # weight of "neighbours have the same slope": decides only slopes that were not measured


@dataclass(frozen=True)
class LatencySurface(SavedModel):
    """
    Per-token latency in seconds as a function of the number of running sequences B and of the total tokens T in their
    contexts (PAT, "Accelerating Long-Tail Generation in Synchronous RLHF Training via Adaptive Tensor Parallelism",
    Section 4.2).

    At each profiled batch size the latency is linear in the tokens; between batch sizes it is interpolated. Below the
    first batch size it equals that of the first. Beyond the last one it grows with the slope between the last two
    batch sizes without context. Beyond its reach a line continues with the smallest slope among itself and those of
    larger batch sizes, so that a steep line measured over few tokens does not cross the others by extrapolation.
    """

    kind = "latency_surface"

    batch_sizes: Sequence[float]  # (K,), strictly increasing
    base_latencies: Sequence[float]  # seconds per token without context, non-decreasing
    token_latencies: Sequence[float]  # seconds added by each token of context
    # Largest total of context tokens at which each line holds, non-decreasing. Up to its reach, no line that `fit`
    # returns lies above that of a larger batch size.
    reaches: Sequence[float]
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        columns = [np.asarray(getattr(self, name), float) for name in _COLUMNS]
        sizes, base, slopes, reaches = columns
        if not sizes.size or len({column.shape for column in columns}) > 1 or not np.isfinite(columns).all():
            raise ConfigurationError(f"{', '.join(_COLUMNS)} must be lists of finite numbers, one per batch size.")
        if min(sizes[0], base[0], reaches[0]) <= 0 or slopes.min() < 0:
            raise ConfigurationError(f"{', '.join(_COLUMNS)} must be positive; `token_latencies` may be 0.")
        if np.diff(sizes).min(initial=1.0) <= 0 or np.diff([base, reaches]).min(initial=0.0) < 0:
            raise ConfigurationError("`batch_sizes`, `base_latencies` and `reaches` must not decrease.")
        for name, column in zip(_COLUMNS, columns, strict=True):
            object.__setattr__(self, name, tuple(column.tolist()))

    @classmethod
    def fit(cls, batch_sizes: ArrayLike, context_tokens: ArrayLike, latencies: ArrayLike) -> LatencySurface:
        """
        Fit the surface to measurements of batch sizes, total context tokens, and seconds per token. The fit minimises
        the Huber loss of the relative errors over all lines, under the constraint that no line decreases or crosses
        the next one within its reach. A batch size with a single context gets the slope of its neighbour.
        """
        columns = positive_columns(batch_sizes=batch_sizes, context_tokens=context_tokens, latencies=latencies)
        fit = _SurfaceFit(*columns)
        base, slopes = fit.lines()
        return cls(fit.batch_sizes.tolist(), base.tolist(), slopes.tolist(), fit.reaches.tolist())

    @overload
    def __call__(self, batch_size: float, context_tokens: float) -> float: ...
    @overload
    def __call__(self, batch_size: ArrayLike, context_tokens: ArrayLike) -> Array: ...
    def __call__(self, batch_size: Any, context_tokens: Any) -> float | Array:
        """Seconds per token of each of `batch_size` sequences with `context_tokens` tokens of context in total."""
        if np.ndim(batch_size) == np.ndim(context_tokens) == 0:
            return self._at(float(batch_size), float(context_tokens))
        return np.asarray(np.vectorize(self._at, otypes=[float])(batch_size, context_tokens))

    def _at(self, batch_size: float, context_tokens: float) -> float:
        sizes, base = self.batch_sizes, self.base_latencies
        i = bisect_right(sizes, batch_size)
        if i == 0:
            return self._line(0, context_tokens)
        before = self._line(i - 1, context_tokens)
        if i < len(sizes):
            share = (batch_size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
            return before + share * (self._line(i, context_tokens) - before)
        increment = (base[-1] - base[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
        return before + increment * (batch_size - sizes[-1])

    def _line(self, k: int, context_tokens: float) -> float:
        reach, tokens = self.reaches[k], max(context_tokens, 0.0)
        beyond = min(self.token_latencies[k:]) * max(tokens - reach, 0.0)
        return self.base_latencies[k] + self.token_latencies[k] * min(tokens, reach) + beyond

    def at_context(self, context_length: float) -> LatencyCurve:
        """Returns the curve for sequences that all have `context_length` tokens of prompt and completion."""
        if not context_length >= 0:
            raise ConfigurationError(f"`context_length` ({context_length:g}) must not be negative.")
        values = [self._at(size, size * context_length) for size in self.batch_sizes]
        rising = np.maximum.accumulate(values).tolist()  # removes rounding errors
        return LatencyCurve(self.batch_sizes, rising, {**self.metadata, "context_length": context_length})


class _SurfaceFit:
    """
    Fits all lines in one constrained least-squares problem. The unknowns are (base_0, …, end_0, …): each line's values
    without context and at its reach, minus a floor, in units of the line's mean latency. The order of the lines is a
    set of linear inequalities in them.
    """

    def __init__(self, sizes: Array, tokens: Array, times: Array) -> None:
        self.batch_sizes, line = np.unique(sizes, return_inverse=True)
        self.num_lines = len(self.batch_sizes)
        self.floor = MIN_LATENCY * float(times.min())
        self.scale = np.array([times[line == k].mean() for k in range(self.num_lines)])
        # A line reaches at least as far as those of smaller batches, so that they do not cross before.
        self.reaches = np.maximum.accumulate([tokens[line == k].max() for k in range(self.num_lines)])
        share = tokens / self.reaches[line]
        rows = np.arange(len(times))
        self.design = np.zeros((len(times), 2 * self.num_lines))
        self.design[rows, line] = (1 - share) * self.scale[line] / times
        self.design[rows, line + self.num_lines] = share * self.scale[line] / times
        self.target = 1 - self.floor / times

    def lines(self) -> tuple[Array, Array]:
        """Returns each line's seconds per token without context, and the seconds added per token of context."""
        smooth, order = self._smoothness(), self._order()

        def solve(design: Array, target: Array) -> Array:
            target = np.concatenate([target, np.zeros(len(smooth))])
            return _least_squares_in_cone(np.vstack([design, smooth]), target, order)

        weights = np.full(len(self.target), 1 / len(self.target))
        ends = robust_least_squares(self.design, self.target, weights, solve).reshape(2, -1) * self.scale + self.floor
        # The constraints hold up to rounding; enforce them exactly.
        base = np.maximum.accumulate(np.maximum(ends[0], self.floor))
        slopes = np.maximum((ends[1] - ends[0]) / self.reaches, 0.0)
        for k, reach in enumerate(self.reaches[:-1]):
            missing = base[k] + slopes[k] * reach - (base[k + 1] + slopes[k + 1] * reach)
            slopes[k + 1] += max(0.0, missing) / reach
        return base, slopes

    def _smoothness(self) -> Array:
        """Rows of small weight (K, 2K) that draw each slope to that of its neighbour, and the first one to 0."""
        num = self.num_lines
        rise = np.eye(num, 2 * num, k=num) - np.eye(num, 2 * num)  # a slope times the reach, relative to the latency
        unit = self.scale / self.reaches
        rows = rise.copy()
        rows[1:] -= rise[:-1] * (unit[:-1] / unit[1:])[:, None]
        rows[0] *= _SMOOTHNESS
        unit_rows: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit_rows * _SMOOTHNESS

    def _order(self) -> Array:
        """Rows g of g·x ≥ 0: lines are positive, rise in the tokens, and rise in the batch size at both ends."""
        num, scale = self.num_lines, self.scale[:, None]
        base, end = np.eye(num, 2 * num) * scale, np.eye(num, 2 * num, k=num) * scale
        share = (self.reaches[:-1] / self.reaches[1:])[:, None]
        at_reach_of_smaller = (1 - share) * base[1:] + share * end[1:]
        rows = np.vstack([base[:1], end - base, base[1:] - base[:-1], at_reach_of_smaller - end[:-1]])
        unit_rows: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit_rows


def _least_squares_in_cone(design: Array, target: Array, rows: Array) -> Array:
    """
    Minimises ‖design·x - target‖ subject to rows·x ≥ 0, by non-negative least squares for the multipliers (Lawson and
    Hanson, Solving Least Squares Problems, chapter 23). The columns of `design` must be independent.
    """
    from scipy.linalg import solve_triangular
    from scipy.optimize import nnls

    orthogonal, triangular = np.linalg.qr(design)
    free = orthogonal.T @ target  # in the coordinates triangular·x
    normals = solve_triangular(triangular, rows.T, trans="T")
    multipliers, _ = nnls(normals, -free)
    return np.asarray(solve_triangular(triangular, free + normals @ multipliers), np.float64)
