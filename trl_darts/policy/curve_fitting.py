"""
Robust fit of a continuous, positive, non-decreasing piecewise-linear function.

For given knots the function is linear in its first value and in its increments from knot to knot, which must not be
negative: non-negative least squares, reweighted for the Huber loss of the relative errors. The knots are searched:
exhaustively over a grid of candidates, then by shrinking steps around the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray


Array = NDArray[np.float64]

HUBER_DELTA = 0.03
"""Relative error up to which a measurement counts as noise (squared) and beyond which as an outlier (absolute)."""

MAX_COMBINATIONS = 500
"""The grid of candidate knots is as fine as this many combinations allow: 32 candidates for three segments."""

MAX_REPEATS = 8
"""A median of n repeats weighs as much as n measurements, up to here: beyond, the model errs more than the median."""

_MIN_FIRST_VALUE = 0.1  # of the fastest measurement: keeps the curve positive whatever the noise
_EXACT = 1e-3  # root mean square relative error that no measurement reaches by chance
_REWEIGHTINGS = 8
_REFINEMENTS = 12


def fit_piecewise_linear(
    batch_sizes: ArrayLike, latencies: ArrayLike, num_segments: int
) -> tuple[list[float], list[float]]:
    """
    Knots and values of the curve of [`LatencyCurve.fit`] ([DARTS](https://huggingface.co/papers/2605.30859), Appendix
    A).

    Args:
        batch_sizes (`Sequence[float]` of shape `(P,)`):
            Numbers of running sequences, in any order, repeats allowed.
        latencies (`Sequence[float]` of shape `(P,)`):
            Seconds per token.
        num_segments (`int`):
            Largest number of segments.

    Returns:
        `tuple[list[float], list[float]]`: Knots, the smallest and largest batch size included, and the values there.

    Raises:
        [`ValueError`]: If there is nothing to fit, the lengths differ, or an entry is not positive and finite.
    """
    sizes, times = np.asarray(batch_sizes, float), np.asarray(latencies, float)
    if num_segments < 1:
        raise ValueError(f"`num_segments` ({num_segments}) must be at least 1.")
    if sizes.ndim != 1 or sizes.shape != times.shape or not sizes.size:
        raise ValueError(
            f"`batch_sizes` (shape {sizes.shape}) and `latencies` (shape {times.shape}) must be lists of the same "
            "length, at least 1."
        )
    for name, array in (("batch_sizes", sizes), ("latencies", times)):
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError(f"`{name}` must be positive and finite, and holds {array.min():g} to {array.max():g}.")
    x, groups, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    y = np.array([np.median(times[groups == i]) for i in range(len(x))])
    if len(x) == 1:
        return [float(x[0])], [float(y[0])]
    fit = _Fit(x, y, np.minimum(counts, MAX_REPEATS).astype(float))
    breakpoints = fit.search(min(num_segments, max(1, len(x) // 2)) - 1)
    knots = fit.knots(breakpoints)
    return knots.tolist(), fit.solve(knots)[0].tolist()


class _Fit:
    """A reduced profile: distinct batch sizes, their latencies, and how many measurements each counts for."""

    def __init__(self, x: Array, y: Array, counts: Array) -> None:
        self.x, self.y = x, y
        self.counts = counts / counts.sum()
        self.floor = _MIN_FIRST_VALUE * float(y.min())

    def knots(self, breakpoints: Sequence[float]) -> Array:
        return np.array([self.x[0], *breakpoints, self.x[-1]])

    def is_supported(self, knots: Array, num_points: int) -> bool:
        """Whether each segment, its ends included, holds enough measured batch sizes."""
        if np.any(np.diff(knots) <= 0):
            return False
        held = np.searchsorted(self.x, knots[1:], "right") - np.searchsorted(self.x, knots[:-1], "left")
        return bool(held.min() >= num_points)

    def solve(self, knots: Array) -> tuple[Array, float]:
        """Best values at the knots, and their Huber loss."""
        lower = np.clip((self.x[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)  # share of each increment, (P, S)
        design = np.column_stack([np.ones_like(self.x), lower]) / self.y[:, None]  # relative errors
        target = 1.0 - self.floor / self.y
        weights = self.counts
        loss = math.inf
        for _ in range(_REWEIGHTINGS):
            root = np.sqrt(weights)
            steps = non_negative_least_squares(design * root[:, None], target * root)
            error = np.abs(design @ steps - target)
            huber = np.where(error <= HUBER_DELTA, error * error / 2, HUBER_DELTA * (error - HUBER_DELTA / 2))
            previous, loss = loss, float(self.counts @ huber)
            if loss >= previous * (1 - 1e-4) or error.max() <= HUBER_DELTA:
                break
            weights = self.counts * HUBER_DELTA / np.maximum(error, HUBER_DELTA)
        steps[0] += self.floor
        return np.cumsum(steps), loss

    def search(self, num_breakpoints: int) -> list[float]:
        """
        Breakpoints of the smallest loss. Two batch sizes determine a segment, but through two goes every outlier at an
        end of the profile: where there are plenty, three are demanded unless two give a fit too exact to be an
        accident.
        """
        best, loss = self._search(num_breakpoints, num_points=2)
        if loss > _EXACT**2 / 2 and len(self.x) >= 3 * (num_breakpoints + 1):
            best, _ = self._search(num_breakpoints, num_points=3)
        return best

    def _search(self, num_breakpoints: int, num_points: int) -> tuple[list[float], float]:
        """Exhaustive over a grid, then finer and finer steps on the logarithmic axis."""
        best: list[float] = []
        loss = math.inf
        for breakpoints in combinations(self._candidates(num_breakpoints), num_breakpoints):
            best, loss = self._better(list(breakpoints), num_points, best, loss)
        if not num_breakpoints or not best:
            return best, loss
        ratio = (self.x[-1] / self.x[0]) ** (1 / (2 * num_breakpoints + 2))
        for _ in range(_REFINEMENTS):
            for i in range(num_breakpoints):
                for factor in (ratio, 1 / ratio):
                    moved = [*best[:i], best[i] * factor, *best[i + 1 :]]
                    best, loss = self._better(moved, num_points, best, loss)
            ratio = math.sqrt(ratio)
        return best, loss

    def _better(
        self, breakpoints: list[float], num_points: int, best: list[float], best_loss: float
    ) -> tuple[list[float], float]:
        knots = self.knots(breakpoints)
        if not self.is_supported(knots, num_points):
            return best, best_loss
        loss = self.solve(knots)[1]
        # A draw stays with the earlier one: measured batch sizes come before the points between them.
        return (breakpoints, loss) if loss < best_loss * (1 - 1e-6) - 1e-18 else (best, best_loss)

    def _candidates(self, num_breakpoints: int) -> list[float]:
        """
        Measured batch sizes strictly inside, thinned out on the logarithmic axis if there are too many combinations.
        """
        inner = self.x[1:-1]
        limit = len(inner)
        if not num_breakpoints or not limit:
            return []
        while math.comb(limit, num_breakpoints) > MAX_COMBINATIONS:
            limit -= 1
        if limit == len(inner):
            return [float(size) for size in inner]
        wanted = np.geomspace(inner[0], inner[-1], limit)
        return [float(size) for size in inner[np.unique(np.searchsorted(inner, wanted * (1 - 1e-9)))]]


def non_negative_least_squares(design: Array, target: Array) -> Array:
    """
    Solution x ≥ 0 of the smallest ‖design·x - target‖, by Lawson and Hanson's active-set algorithm. For a handful of
    unknowns.

    Args:
        design (`np.ndarray` of shape `(P, S)`):
            One row per equation.
        target (`np.ndarray` of shape `(P,)`):
            Right-hand sides.

    Returns:
        `np.ndarray` of shape `(S,)`: The solution.
    """
    solution = np.asarray(np.linalg.lstsq(design, target, rcond=None)[0], np.float64)
    if solution.min() >= 0:
        return solution
    num = design.shape[1]
    solution, free = np.zeros(num), np.zeros(num, bool)
    for _ in range(3 * num):
        gradient = design.T @ (target - design @ solution)
        if free.all() or gradient[~free].max() <= 1e-12:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.lstsq(design[:, free], target, rcond=None)[0]
            falling = free & (trial < 0)
            if not falling.any():
                break
            share = np.min(solution[falling] / (solution[falling] - trial[falling]))
            solution = solution + share * (trial - solution)
            free &= solution > 1e-15
        solution = trial
    return solution
