"""
What one more candidate costs: the slope k of Eq. 6, T(M) = k·M + c, in seconds per candidate.

Two estimators: from timings, which are noisy, and from a latency curve, which decides identically after a resume.

Invariant: k stays in the trust region [0.05, 1] × seconds per candidate. Its upper end is c = 0; its lower end keeps
one flat or noisy stretch from making candidates look free, which would send every budget to its bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trl_darts.policy.latency import LatencyCurve


TRUST_REGION = (0.05, 1.0)
"""Bounds of k in multiples of mean(seconds) / mean(candidates)."""

FORGETTING = 0.1
"""Weight of the newest step in the mean time and the mean number of candidates, once more than ten steps were seen."""

PRIOR_SHARE = 0.5
"""Share of a step's time that grows with the candidates, before timings tell."""

PRIOR_INFORMATION = 0.02
"""Weight of that prior, as a sum of squared relative deviations: one step that is 14 % off the mean size."""

MAX_INFORMATION = 0.5
"""
Information on the share is forgotten as new information comes, not as time passes: steps of equal size say nothing.
"""

SLOWEST = 1.5
"""
A step that takes more than this many times the expected seconds counts as one at the limit: a stall, a compilation.
"""

FASTEST = 1 / 3
"""The same for short times, which nothing but a small batch explains."""

NUM_QUANTILES = 256
"""Resolution at which a pool's lengths are remembered."""

QUANTILE_EMA = 0.25
"""Weight of the newest pool's quantiles."""


def calibration_cycle(num_steps: int) -> list[int]:
    """
    Signs of the deviations from the target in the calibration steps.

    They sum to zero. The first step deviates nowhere: engines warm up, and there is no history. The quadruples (-, +,
    +, -) don't mistake a linear drift of the response lengths for a cost of candidates.
    """
    num_pairs = (num_steps - 1) // 2
    signs = [sign for pair in range(num_pairs) for sign in ((-1, 1) if pair % 2 == 0 else (1, -1))]
    return [0] * (num_steps - len(signs)) + signs


class TimedCostSlope:
    """
    k by least squares of a step's seconds on its candidates, online.

    The line is written as g·(1 + b·(x / reference - 1)). The level g follows the response lengths and is forgotten
    exponentially; the share b belongs to the system and is learned from deviations from the mean step size only. The
    first steps are kept and fitted together, so that a slow first one, when engines warm up, can be told from the
    others.

    Args:
        num_initial (`int`):
            Number of first steps that are kept.
    """

    def __init__(self, num_initial: int) -> None:
        self.num_initial = num_initial
        self._initial: list[tuple[float, float]] = []
        self._reset()

    def _reset(self) -> None:
        self._count = 0
        self._reference = self._mean_size = self._mean_time = 0.0
        self._information = self._covariance = 0.0

    def observe(self, num_candidates: int, seconds: float) -> None:
        """Add a step."""
        if self._count < self.num_initial:
            self._initial.append((float(num_candidates), float(seconds)))
            middle = float(np.median([time for _, time in self._initial]))
            self._reset()
            for size, time in self._initial:
                self._add(size, _clip(time, middle * FASTEST, middle * SLOWEST))
        else:
            expected = self._level * (1 + self._share * (num_candidates / self._reference - 1))
            self._add(num_candidates, _clip(seconds, expected * FASTEST, expected * SLOWEST))

    def _add(self, size: float, time: float) -> None:
        self._count += 1
        weight = max(1 / self._count, FORGETTING)
        if self._count == 1:
            self._reference = size
        else:
            size_deviation = (size - self._mean_size) / self._reference
            time_deviation = (time - self._mean_time) / self._level
            self._information += (1 - weight) * size_deviation**2
            self._covariance += (1 - weight) * size_deviation * time_deviation
            if self._information > MAX_INFORMATION:
                self._covariance *= MAX_INFORMATION / self._information
                self._information = MAX_INFORMATION
        self._mean_size += weight * (size - self._mean_size)
        self._mean_time += weight * (time - self._mean_time)

    @property
    def _share(self) -> float:
        share = (self._covariance + PRIOR_INFORMATION * PRIOR_SHARE) / (self._information + PRIOR_INFORMATION)
        return _clip(share, *TRUST_REGION)

    @property
    def _level(self) -> float:
        return self._mean_time / (1 + self._share * (self._mean_size / self._reference - 1))

    @property
    def value(self) -> float | None:
        """Seconds per candidate, `None` before two steps were seen."""
        if self._count < 2:
            return None
        return _trusted(self._level * self._share / self._reference, self._mean_time / self._mean_size)

    def state_dict(self) -> dict[str, Any]:
        """State that can be serialised as JSON."""
        numbers = [self._reference, self._mean_size, self._mean_time, self._information, self._covariance]
        initial = [list(pair) for pair in self._initial]
        return {"count": self._count, "numbers": numbers, "initial": initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._count = int(state["count"])
        self._initial = [(float(size), float(time)) for size, time in state["initial"]]
        numbers = map(float, state["numbers"])
        self._reference, self._mean_size, self._mean_time, self._information, self._covariance = numbers


class PredictedCostSlope:
    """
    k as the slope of Eq. 4 between two sizes of a batch whose lengths follow the recent pools' quantiles.

    Both sizes have the same quantiles, each standing for a share of the batch: what is priced is that more sequences
    run at once, not that the longest of more candidates is longer.

    Args:
        latency_curve ([`LatencyCurve`]):
            Per-token latency of one engine.
        num_engines (`int`):
            Number of engines that share a batch evenly.
    """

    def __init__(self, latency_curve: LatencyCurve, num_engines: int) -> None:
        self.latency_curve = latency_curve
        self.num_engines = num_engines
        self._quantiles: list[float] | None = None

    def observe(self, lengths: ArrayLike) -> None:
        """Add the lengths of a step's pool."""
        new = np.quantile(np.asarray(lengths, float), (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES)
        if self._quantiles is not None:
            old = np.array(self._quantiles)
            new = old + QUANTILE_EMA * (new - old)
        self._quantiles = new.tolist()

    def value(self, low: int, high: int) -> float | None:
        """Seconds per candidate of a batch of between `low` and `high`, `None` before a pool was seen."""
        if self._quantiles is None or not self._quantiles[-1]:
            return None
        fewest, most = self._seconds(low), self._seconds(high)
        return _trusted((most - fewest) / (high - low), fewest / low)

    def _seconds(self, num_candidates: int) -> float:
        steps = np.diff(self._quantiles or [], prepend=0.0)
        running = num_candidates / self.num_engines * (1 - np.arange(NUM_QUANTILES) / NUM_QUANTILES)
        return float(steps @ self.latency_curve(np.maximum(running, 1.0)))

    def state_dict(self) -> dict[str, Any]:
        """State that can be serialised as JSON."""
        return {"quantiles": self._quantiles}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        quantiles: Sequence[float] | None = state["quantiles"]
        self._quantiles = None if quantiles is None else [float(length) for length in quantiles]


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _trusted(slope: float, seconds_per_candidate: float) -> float:
    low, high = TRUST_REGION
    return _clip(slope, low * seconds_per_candidate, high * seconds_per_candidate)
