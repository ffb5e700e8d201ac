"""Candidates that are added while a rollout runs, in the time that its slowest ones take anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, pstdev

import numpy as np

from .types import Group


# Before so many candidates of the batch are complete, nothing is known of its tail.
MIN_COMPLETE = 8


@dataclass(frozen=True)
class BubbleFilling:
    """
    Adds candidates to the groups whose lengths spread most, once so few run that they cost next to nothing (ours).

    All groups start with `num_generations` candidates. When fewer run than the engines decode at nearly the speed of
    one, each open group may be given one more at a time, the widest first, if it is expected to end before the batch
    does. A group that waits for one endless candidate so gets another that ends, and no history is needed for it.

    A candidate that runs is expected to go on for ℓ·σ² / max(ln ℓ − μ, σ²) tokens after ℓ: the mean residual life of a
    log-normal tail, with μ and σ of the batch's complete lengths.

    Args:
        num_slots (`int`):
            Candidates that all engines decode at nearly the speed of one, see [`LatencyCurve.knee`].
        max_num_generations (`int`):
            M_up, the most candidates of a group.
    """

    num_slots: int
    max_num_generations: int

    def looks(self, groups: Iterable[Group], num_open: int) -> bool:
        """Whether anything depends on lengths: there is room, a group that may get a candidate, and a tail to judge."""
        if num_open >= self.num_slots:
            return False
        num_complete, is_short = 0, False
        for group in groups:
            num_complete += group.num_complete
            is_short = is_short or self._may_grow(group)
        return is_short and num_complete >= MIN_COMPLETE

    def extra(self, groups: Iterable[Group], num_open: int) -> Sequence[int]:
        """IDs of the groups that get one more candidate each."""
        groups = list(groups)
        if not self.looks(groups, num_open):
            return ()
        complete = [length for group in groups for length in group.complete_lengths]
        tail, usual = _Tail.of(complete), float(np.median(complete))
        short = [group for group in groups if self._may_grow(group)]
        expected = [median(own) if len(own := group.complete_lengths) > 1 else usual for group in short]
        # Added now, a candidate has as many tokens to go as it will have in the end.
        left, needed = 0.0, max(expected)
        for group in groups:
            if left >= needed:  # whatever the others have
                break
            if group.num_unfinished and not group.closed:
                left = max(left, max(tail.residual(c.length) for c in group.unfinished))
        in_time = [group for group, length in zip(short, expected, strict=True) if length <= left]
        wide = sorted((-_spread(group, tail), group.group_id) for group in in_time)
        return [group_id for _, group_id in wide[: self.num_slots - num_open]]

    def _may_grow(self, group: Group) -> bool:
        """Whether it still waits for a candidate, and is not at its bound."""
        return group.num_unfinished > 0 and len(group.candidates) < self.max_num_generations and not group.closed


@dataclass(frozen=True)
class _Tail:
    """Of a batch's response lengths."""

    log_mean: float
    log_variance: float

    @classmethod
    def of(cls, lengths: Sequence[int]) -> _Tail:
        logs = np.log(lengths)
        return cls(float(logs.mean()), max(float(logs.var()), 0.01))

    def residual(self, length: int) -> float:
        """Tokens that a candidate is expected to have after `length`."""
        if length < 1:
            return math.exp(self.log_mean + self.log_variance / 2)
        return length * self.log_variance / max(math.log(length) - self.log_mean, self.log_variance)


def _spread(group: Group, tail: _Tail) -> float:
    """Standard deviation of a group's lengths; those that run count with what they are expected to have."""
    running = [c.length + tail.residual(c.length) for c in group.unfinished]
    return pstdev([*group.complete_lengths, *running])
