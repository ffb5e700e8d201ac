"""Measures whether drafts pay on this server, and pauses them while they don't."""

import math
from collections import deque
from statistics import median


CONTROL_EVERY = 16  # steps: one of them has no drafts, for comparison
NUM_RECENT = 31  # steps of each size without drafts: their median is robust to pauses
NUM_NEEDED = 24  # compared steps before a pause
MEMORY = 1 - 1 / 64  # per compared step
LONGEST_STEP = 4.0  # times the expected one: a pause of the process tells nothing
FIRST_PAUSE, LONGEST_PAUSE = 512, 8192  # steps; each pause in a row is twice as long


class DraftGain:
    """
    Compares steps that verify drafts with the time that their tokens would have taken without: in as many sequences,
    each token takes a step, whose median time is known from steps without drafts.
    """

    def __init__(self, pauses: bool = True) -> None:
        self.pauses = pauses
        self.pause = 0  # steps left
        self._next_pause = FIRST_PAUSE
        self._num_steps = 0
        self._plain: dict[int, deque[float]] = {}  # seconds by size, rounded to powers of √2
        self._forget()

    def _forget(self) -> None:
        self._num_compared = 0
        self._spent = self._worth = 0.0  # seconds of steps with drafts, and of their tokens without

    def allows_drafts(self) -> bool:
        """Whether the next step may have drafts. Called once per step."""
        self._num_steps += 1
        if self.pause:
            self.pause -= 1
            return False
        return self._num_steps % CONTROL_EVERY != 0

    def add(self, num_sequences: int, num_drafted: int, num_tokens: int, seconds: float) -> None:
        """Records a step without prefill, which drafted and returned so many tokens."""
        times = self._plain.setdefault(round(2 * math.log2(num_sequences)), deque(maxlen=NUM_RECENT))
        if not num_drafted:
            times.append(seconds)
        elif times:
            expected = median(times)
            self._num_compared += 1
            self._spent = MEMORY * self._spent + min(seconds, LONGEST_STEP * expected)
            self._worth = MEMORY * self._worth + expected * num_tokens / num_sequences
            self._judge()

    def _judge(self) -> None:
        if not self.pauses or self._num_compared < NUM_NEEDED:
            return
        if self._worth >= self._spent:
            self._next_pause = FIRST_PAUSE
        elif not self.pause:
            self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._forget()
