"""Measures the cost of decoding steps during decoding."""

import math
from collections import deque
from statistics import median

import numpy as np


UNKNOWN_KNEE = 32.0  # until steps of different sizes have been seen
HIGHEST_KNEE = 1024.0
NUM_RECENT = 31  # steps of each size: their median is robust to pauses
NUM_NEEDED = 8
REFIT_EVERY = 64  # steps


class StepTimes:
    """
    Estimates the knee: the number of tokens at which a step takes twice as long as an almost empty one.

    Fits a line through the median times of recent steps by size, rounded to powers of √2.
    """

    def __init__(self) -> None:
        self.knee = UNKNOWN_KNEE
        self._recent: dict[int, deque[float]] = {}
        self._num_steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Records a step without prefill."""
        size = round(2 * math.log2(num_tokens))
        self._recent.setdefault(size, deque(maxlen=NUM_RECENT)).append(seconds)
        self._num_steps += 1
        if self._num_steps % REFIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        known = {size: median(times) for size, times in self._recent.items() if len(times) >= NUM_NEEDED}
        if not known or max(known) - min(known) < 2:
            return
        slope, base = np.polyfit([2 ** (size / 2) for size in known], list(known.values()), 1)
        self.knee = HIGHEST_KNEE if slope <= 0 else float(min(max(base / slope, 1.0), HIGHEST_KNEE))
