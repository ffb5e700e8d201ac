"""Candidates that are added while a rollout runs, in the time that its slowest ones take anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev

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

    def extra(self, groups: Iterable[Group], num_open: int) -> Sequence[int]:
        """IDs of the groups that get one more candidate each."""
        room = self.num_slots - num_open
        if room <= 0:
            return ()
        groups = list(groups)
        complete = [length for group in groups for length in group.complete_lengths]
        waiting = [group for group in groups if not group.closed and group.num_unfinished]
        if len(complete) < MIN_COMPLETE or not waiting:
            return ()
        tail = _Tail.of(complete)
        # Added now, a candidate has as many tokens to go as it will have in the end.
        left = max(tail.residual(c.length) for group in waiting for c in group.unfinished)
        usual = median(complete)
        wide = []
        for group in waiting:
            own = group.complete_lengths
            expected = median(own) if len(own) > 1 else usual
            if len(group.candidates) < self.max_num_generations and expected <= left:
                wide.append((-_spread(group, tail), group.group_id))
        return [group_id for _, group_id in sorted(wide)[:room]]


@dataclass(frozen=True)
class _Tail:
    """Of a batch's response lengths."""

    log_mean: float
    log_variance: float

    @classmethod
    def of(cls, lengths: Sequence[int]) -> _Tail:
        logs = [math.log(length) for length in lengths]
        return cls(fmean(logs), max(pstdev(logs) ** 2, 0.01))

    def residual(self, length: int) -> float:
        """Tokens that a candidate is expected to have after `length`."""
        if length < 1:
            return math.exp(self.log_mean + self.log_variance / 2)
        return length * self.log_variance / max(math.log(length) - self.log_mean, self.log_variance)


def _spread(group: Group, tail: _Tail) -> float:
    """Standard deviation of a group's lengths; those that run count with what they are expected to have."""
    running = [c.length + tail.residual(c.length) for c in group.unfinished]
    return pstdev([*group.complete_lengths, *running])
