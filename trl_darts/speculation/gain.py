"""Measures whether drafts pay on this server, and pauses them while they don't."""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median


CONTROL_EVERY = 16  # steps: one of them has no drafts, for comparison
NUM_RECENT = 31  # steps of each size without drafts: their median is robust to pauses of the process
NUM_NEEDED = 24  # compared steps before a pause
MEMORY = 1 - 1 / 64  # per compared step
LONGEST_STEP = 4.0  # times the expected one: a pause of the process tells nothing
FIRST_PAUSE, LONGEST_PAUSE = 64, 2048  # steps of a size; each pause in a row is twice as long


@dataclass(slots=True)
class Comparison:
    """Steps of about as many sequences: their times without drafts, and whether drafts paid."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))  # seconds
    num_compared: int = 0
    spent: float = 0.0  # seconds of steps with drafts
    worth: float = 0.0  # seconds that their tokens take without
    pause: int = 0  # steps left
    next_pause: int = FIRST_PAUSE

    def add(self, seconds: float, tokens_per_sequence: float) -> None:
        """Compares a step with drafts."""
        expected = median(self.plain)
        self.num_compared += 1
        self.spent = MEMORY * self.spent + min(seconds, LONGEST_STEP * expected)
        self.worth = MEMORY * self.worth + expected * tokens_per_sequence

    def judge(self) -> None:
        """Begins a pause if drafts don't pay."""
        if self.worth >= self.spent:
            self.next_pause = FIRST_PAUSE
        elif not self.pause:
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)
            self.num_compared, self.spent, self.worth = 0, 0.0, 0.0


class DraftGain:
    """
    Compares steps that verify drafts with the time that their tokens would have taken without: in as many sequences,
    each token takes a step, whose median time is known from steps without drafts.

    Sizes, rounded to powers of √2, are judged by themselves: on a full engine drafts may not pay, in the tail they do.
    """

    def __init__(self, pauses: bool = True) -> None:
        self.pauses = pauses
        self._num_steps = 0
        self._comparisons: dict[int, Comparison] = defaultdict(Comparison)

    def of(self, num_sequences: int) -> Comparison:
        """Returns what is known of steps of about this size."""
        return self._comparisons[round(2 * math.log2(num_sequences))]

    def allows_drafts(self, num_sequences: int) -> bool:
        """Whether the next step may have drafts. Called once per step."""
        self._num_steps += 1
        comparison = self.of(num_sequences)
        if comparison.pause:
            comparison.pause -= 1
            return False
        return self._num_steps % CONTROL_EVERY != 0

    def add(self, num_sequences: int, num_drafted: int, num_tokens: int, seconds: float) -> None:
        """Records a step without prefill, which drafted and returned so many tokens."""
        comparison = self.of(num_sequences)
        if not num_drafted:
            comparison.plain.append(seconds)
        elif comparison.plain:
            comparison.add(seconds, num_tokens / num_sequences)
            if self.pauses and comparison.num_compared >= NUM_NEEDED:
                comparison.judge()
