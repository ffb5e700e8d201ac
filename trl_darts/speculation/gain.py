"""Measures whether drafts pay on this server, and pauses them while they don't."""

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median


CONTROL_EVERY = 16  # steps: one of them has no drafts, for comparison
# In steps without drafts. A single step loses no more than this, because it may be a pause of the process.
MOST_LOST_PER_STEP, MOST_LOST = 0.5, 2.0
NUM_RECENT = 31  # steps of each size: their median is robust to pauses
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096  # steps of a range of sizes; each pause in a row is twice as long


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


def _rounded(size: int) -> int:
    return round(2 * math.log2(size))


@dataclass(slots=True)
class Verdict:
    """Whether drafts pay in steps of a range of sizes."""

    saved: float = 0.0  # steps, at most `MOST_LOST` more or fewer than none
    pause: int = 0  # steps left
    next_pause: int = FIRST_PAUSE

    def add(self, saved: float) -> None:
        """Adds what a step saved. Begins a pause if too much was lost."""
        self.saved += max(saved, -MOST_LOST_PER_STEP)
        if self.saved >= MOST_LOST:
            self.saved, self.next_pause = MOST_LOST, FIRST_PAUSE
        elif self.saved <= -MOST_LOST:
            self.saved = 0.0
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)


class DraftGain:
    """
    Compares steps that verify drafts with the time that their tokens would have taken without: in as many sequences,
    each token takes a step, whose median time is known from steps without drafts.

    Ranges of sizes are judged by themselves: on a full engine drafts may not pay, in the tail they do.
    """

    def __init__(self, pauses: bool = True) -> None:
        self.pauses = pauses
        self._num_steps = 0
        self._plain = RecentTimes()  # of steps without drafts
        self._verdicts: dict[int, Verdict] = defaultdict(Verdict)

    def of(self, num_sequences: int) -> Verdict:
        """Returns the verdict on a size: 1, 2 to 7, 8 to 31, 32 to 127, and so on."""
        return self._verdicts[num_sequences.bit_length() // 2]

    def allows_drafts(self, num_sequences: int) -> bool:
        """Whether the next step may have drafts. Called once per step."""
        self._num_steps += 1
        if self.pauses and num_sequences not in self._plain:
            return False
        verdict = self.of(num_sequences)
        if verdict.pause:
            verdict.pause -= 1
            return False
        return self._num_steps % CONTROL_EVERY != 0

    def add(self, num_sequences: int, num_drafted: int, num_tokens: int, seconds: float) -> None:
        """Records a step without prefill, which drafted and returned so many tokens."""
        if not num_drafted:
            self._plain.add(num_sequences, seconds)
        elif self.pauses and num_sequences in self._plain:
            self.of(num_sequences).add(num_tokens / num_sequences - seconds / self._plain.median(num_sequences))
