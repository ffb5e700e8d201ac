"""What a decoding step costs on this machine, learned while it decodes."""

import math
from collections import deque
from statistics import median

import numpy as np


UNKNOWN_KNEE = 32.0  # until steps of different sizes have been seen
HIGHEST_KNEE = 1024.0
NUM_RECENT = 31  # steps of each size; a median of so many does not mind a pause
NUM_NEEDED = 8
REFIT_EVERY = 64  # steps


class StepTimes:
    """
    Finds the knee: the number of tokens at which a step takes twice as long as an almost empty one.

    A line is fitted through the medians of recent steps, by size; sizes are powers of √2.
    """

    def __init__(self) -> None:
        self.knee = UNKNOWN_KNEE
        self._recent: dict[int, deque[float]] = {}
        self._num_steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """One step that did nothing but decode."""
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
