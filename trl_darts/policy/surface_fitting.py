"""
Robust fit of one line in the context tokens per batch size, such that the lines don't cross where they were measured.

The unknowns are each line's values without context and at the end of its reach. The order of the lines is a set of
linear inequalities in them: least squares over a cone, which is a non-negative least squares problem in the
multipliers (Lawson and Hanson, Solving Least Squares Problems, chapter 23), reweighted for the Huber loss of the
relative errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from trl_darts.policy.curve_fitting import HUBER_DELTA, Array, non_negative_least_squares


_MIN_BASE = 0.1  # of the fastest measurement: keeps the surface positive whatever the noise
_SMOOTHNESS = 1e-3  # weight of "neighbours have the same slope", which decides only where nothing was measured
_REWEIGHTINGS = 8


@dataclass(frozen=True)
class Lines:
    """One line per batch size: seconds per token without context, per context token, and the reach. All `(K,)`."""

    batch_sizes: Array
    base: Array
    slopes: Array
    reaches: Array


def fit_lines(batch_sizes: ArrayLike, context_tokens: ArrayLike, latencies: ArrayLike) -> Lines:
    """
    The lines of [`LatencySurface.fit`] (PAT, Section 4.2).

    Args:
        batch_sizes (`Sequence[float]` of shape `(P,)`):
            Numbers of running sequences, in any order, repeats allowed.
        context_tokens (`Sequence[float]` of shape `(P,)`):
            Tokens of all sequences together.
        latencies (`Sequence[float]` of shape `(P,)`):
            Seconds per token of each sequence.

    Returns:
        [`Lines`]: The lines, by rising batch size.

    Raises:
        [`ValueError`]: If there is nothing to fit, the lengths differ, or an entry is not positive and finite.
    """
    sizes, tokens, times = (np.asarray(column, float) for column in (batch_sizes, context_tokens, latencies))
    if sizes.ndim != 1 or not sizes.shape == tokens.shape == times.shape or not sizes.size:
        raise ValueError(
            f"`batch_sizes` (shape {sizes.shape}), `context_tokens` (shape {tokens.shape}) and `latencies` (shape "
            f"{times.shape}) must be lists of the same length, at least 1."
        )
    for name, array in (("batch_sizes", sizes), ("context_tokens", tokens), ("latencies", times)):
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError(f"`{name}` must be positive and finite, and holds {array.min():g} to {array.max():g}.")
    pairs, groups = np.unique(np.column_stack([sizes, tokens]), axis=0, return_inverse=True)
    medians = np.array([np.median(times[groups.ravel() == i]) for i in range(len(pairs))])
    return _Fit(pairs[:, 0], pairs[:, 1], medians).lines()


class _Fit:
    """
    Unknowns are (base_0, …, end_0, …): values at no context and at the line's reach, over a floor, in units of the
    line's own mean latency.
    """

    def __init__(self, sizes: Array, tokens: Array, times: Array) -> None:
        self.batch_sizes, self.line = np.unique(sizes, return_inverse=True)
        self.num_lines = len(self.batch_sizes)
        self.times = times
        self.floor = _MIN_BASE * float(times.min())
        self.scale = np.array([times[self.line == k].mean() for k in range(self.num_lines)])
        farthest = np.array([tokens[self.line == k].max() for k in range(self.num_lines)])
        # Beyond its own measurements a line reaches as far as those of a smaller batch: they must not cross before.
        self.reaches = np.maximum.accumulate(farthest)
        share = tokens / self.reaches[self.line]
        rows = np.arange(len(times))
        self.design = np.zeros((len(times), 2 * self.num_lines))
        self.design[rows, self.line] = (1 - share) * self.scale[self.line] / times
        self.design[rows, self.line + self.num_lines] = share * self.scale[self.line] / times
        self.target = 1 - self.floor / times

    def lines(self) -> Lines:
        smooth, order = self._smoothness(), self._order()
        weights = np.ones_like(self.times)
        for _ in range(_REWEIGHTINGS):
            root = np.sqrt(weights / len(weights))
            design = np.vstack([self.design * root[:, None], smooth])
            target = np.concatenate([self.target * root, np.zeros(len(smooth))])
            solution = _least_squares_in_cone(design, target, order)
            error = np.abs(self.design @ solution - self.target)
            if error.max() <= HUBER_DELTA:
                break
            weights = np.minimum(1.0, HUBER_DELTA / np.maximum(error, 1e-12))
        ends = solution.reshape(2, -1) * self.scale + self.floor
        return self._without_rounding(ends[0], (ends[1] - ends[0]) / self.reaches)

    def _smoothness(self) -> Array:
        """Neighbouring lines have the same slope, and the first one none: rows of little weight, (K, 2K)."""
        num = self.num_lines
        rise = np.zeros((num, 2 * num))  # per token, times the reach, relative to the latency
        rise[np.arange(num), np.arange(num)] = -1.0
        rise[np.arange(num), np.arange(num) + num] = 1.0
        unit = self.scale / self.reaches
        rows = rise.copy()
        for k in range(1, num):
            rows[k] -= rise[k - 1] * unit[k - 1] / unit[k]
        rows[0] *= _SMOOTHNESS
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) * _SMOOTHNESS

    def _order(self) -> Array:
        """Rows g with g·x ≥ 0: positive, rising in the tokens, rising in the batch at no context and at the reach."""
        num, scale = self.num_lines, self.scale
        base, end = np.eye(num, 2 * num) * scale[:, None], np.eye(num, 2 * num, k=num) * scale[:, None]
        share = (self.reaches[:-1] / self.reaches[1:])[:, None]
        at_reach_of_smaller = (1 - share) * base[1:] + share * end[1:]
        rows = np.vstack([base[:1], end - base, base[1:] - base[:-1], at_reach_of_smaller - end[:-1]])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def _without_rounding(self, base: Array, slopes: Array) -> Lines:
        """The order, exactly."""
        base, slopes = np.maximum.accumulate(np.maximum(base, self.floor)), np.maximum(slopes, 0.0)
        for k in range(1, self.num_lines):
            reach = self.reaches[k - 1]
            missing = base[k - 1] + slopes[k - 1] * reach - (base[k] + slopes[k] * reach)
            slopes[k] += max(0.0, missing) / reach
        return Lines(self.batch_sizes, base, slopes, self.reaches)


def _least_squares_in_cone(design: Array, target: Array, rows: Array) -> Array:
    """x with rows·x ≥ 0 of the smallest ‖design·x - target‖. The columns of `design` must be independent."""
    orthogonal, triangular = np.linalg.qr(design)
    free = orthogonal.T @ target  # in the coordinates triangular·x
    normals = np.linalg.solve(triangular.T, rows.T)
    multipliers = non_negative_least_squares(normals, -free)
    return np.asarray(np.linalg.solve(triangular, free + normals @ multipliers), np.float64)
