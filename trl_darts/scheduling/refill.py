"""Candidates that are added while a rollout runs, in the time that its slowest ones take anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from .types import Candidate, Group


# Before so many candidates of the batch are complete, nothing is known of its tail.
MIN_COMPLETE = 8


@dataclass
class BubbleFilling:
    """
    Adds candidates to the groups whose lengths spread most, once so few run that they cost next to nothing (ours).

    All groups start with `num_generations` candidates. When fewer run than the engines decode at nearly the speed of
    one, each open group may be given one more at a time, the widest first, if it is expected to end before the batch
    does. A group that waits for one endless candidate so gets another that ends, and no history is needed for it.

    A candidate that has run for longer than usual is expected to go on for as long as it has run: what is true of a
    tail that falls with the square of the length, and nearly true of those that were reported. Where it is wrong, the
    added candidate is called off with the others at the end of the batch.

    Args:
        num_slots (`int`):
            Candidates that all engines decode at nearly the speed of one, see [`LatencyCurve.knee`].
        max_num_generations (`int`):
            M_up, the most candidates of a group.
    """

    num_slots: int
    max_num_generations: int

    def __post_init__(self) -> None:
        self._last = Look()

    def extra(self, groups: Iterable[Group], num_open: int) -> Sequence[int]:
        """IDs of the groups that get one more candidate each."""
        self._last = self.look(groups, num_open, lambda candidate: len(candidate.tokens))
        return self._last.extra

    def is_news(self, length: int) -> bool:
        """Whether `extra` may find more than the last time, now that a candidate is known to have this length."""
        return self._last.is_news(length)

    def look(
        self,
        groups: Iterable[Group],
        num_open: int,
        length_of: Callable[[Candidate], int],
        longest: float = math.inf,
    ) -> Look:
        """
        What is to be added, and when to look again, for one who knows lengths otherwise. Asks for as few as it needs.

        Args:
            groups (`Iterable[Group]`):
                Of the batch.
            num_open (`int`):
                Candidates that have not ended.
            length_of (`Callable`):
                Tokens of a candidate that has not ended.
            longest (`float`, *optional*):
                None of them has more.
        """
        if num_open >= self.num_slots:
            return Look()
        groups = list(groups)
        open_groups = [g for g in groups if g.num_unfinished and not g.closed]
        short = [g for g in open_groups if len(g.candidates) < self.max_num_generations]
        if not short or sum(group.num_complete for group in groups) < MIN_COMPLETE:
            return Look()
        tail = _Tail(float(np.median([length for group in groups for length in group.complete_lengths])))
        expected = [median(own) if len(own := group.complete_lengths) > 1 else tail.usual for group in short]
        shortest, needed = min(expected), max(expected)
        if shortest > tail.most(longest):
            return Look((), shortest, tail)
        # Added now, a candidate has as many tokens to go as it will have in the end.
        left = 0.0
        for group in open_groups:
            left = max(left, max(tail.residual(length_of(candidate)) for candidate in group.unfinished))
            if left >= needed:  # whatever the others have
                break
        in_time = [group for group, length in zip(short, expected, strict=True) if length <= left]
        wide = sorted((-_spread(group, tail, length_of), group.group_id) for group in in_time)
        return Look([group_id for _, group_id in wide[: self.num_slots - num_open]], shortest, tail)


@dataclass(frozen=True)
class Look:
    """
    What [`BubbleFilling`] has found: groups that get one more candidate each, and the shortest of the lengths that are
    expected of one. Infinity where none can be added before another one ends.
    """

    extra: Sequence[int] = ()
    shortest: float = math.inf
    tail: _Tail | None = None

    def is_news(self, length: int) -> bool:
        """Whether it may find more as soon as a candidate is known to have this length, and none has ended."""
        if self.tail is None:
            return False
        return bool(self.extra) or self.tail.residual(length) >= 0.999 * self.shortest


@dataclass(frozen=True)
class _Tail:
    """What is expected of candidates that still run, where `usual` is the median of the complete lengths."""

    usual: float

    def residual(self, length: int) -> float:
        """Tokens that a candidate is expected to have after `length`."""
        return max(self.usual - length, float(length))

    def most(self, longest: float) -> float:
        """The most that `residual` is for any candidate of up to `longest` tokens."""
        return max(self.usual, longest)


def _spread(group: Group, tail: _Tail, length_of: Callable[[Candidate], int]) -> float:
    """Standard deviation of a group's lengths; those that run count with what they are expected to have."""
    running = [(length := length_of(candidate)) + tail.residual(length) for candidate in group.unfinished]
    lengths = sorted([*group.complete_lengths, *running])  # so that equal groups are equal to the last bit
    mean = math.fsum(lengths) / len(lengths)
    return math.sqrt(math.fsum((length - mean) ** 2 for length in lengths) / len(lengths))
