"""Measures the cost of decoding steps during decoding."""

import math
from collections import defaultdict, deque
from statistics import median

import numpy as np


UNKNOWN_KNEE = 32.0  # until steps of different sizes have been seen
HIGHEST_KNEE = 1024.0
NUM_RECENT = 31  # steps of each size: their median is robust to pauses
NUM_NEEDED = 8
REFIT_EVERY = 64  # steps


class RecentTimes:
    """Times of recent steps by size, rounded to powers of √2."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_RECENT))

    def add(self, size: int, seconds: float) -> None:
        """Records a step."""
        self._recent[_rounded(size)].append(seconds)

    def __contains__(self, size: int) -> bool:
        return _rounded(size) in self._recent

    def median(self, size: int) -> float:
        """Returns the median time of steps of about this size, of which at least one is known."""
        return median(self._recent[_rounded(size)])

    def medians(self) -> dict[int, float]:
        """Returns the median times of the sizes with `NUM_NEEDED` steps, by twice the binary logarithm."""
        return {size: median(times) for size, times in self._recent.items() if len(times) >= NUM_NEEDED}


def _rounded(size: int) -> int:
    return round(2 * math.log2(size))


class StepTimes:
    """
    Estimates the knee: the number of tokens at which a step takes twice as long as an almost empty one.

    Fits a line through the median times of recent steps by size, rounded to powers of √2.
    """

    def __init__(self) -> None:
        self.knee = UNKNOWN_KNEE
        self._recent = RecentTimes()
        self._num_steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Records a step without prefill."""
        self._recent.add(num_tokens, seconds)
        self._num_steps += 1
        if self._num_steps % REFIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        known = self._recent.medians()
        if not known or max(known) - min(known) < 2:
            return
        slope, base = np.polyfit([2 ** (size / 2) for size in known], list(known.values()), 1)
        self.knee = HIGHEST_KNEE if slope <= 0 else float(min(max(base / slope, 1.0), HIGHEST_KNEE))
