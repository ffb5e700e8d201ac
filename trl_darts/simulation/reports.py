"""
Which reports of a rollout's sequences can decide something. The others are left out: a sequence of a thousand tokens
would make sixty, and a rollout has thousands of sequences.

A report decides nothing unless a policy reads it. [`DualEnd`] with a number for its patience reads those of a group
with enough complete candidates, and acts on the first one beyond a bound. [`BubbleFilling`] reads all of them, when a
candidate ends while there is room. So the scheduler hears of a sequence just before an end at which its length is
read, as much as it would know by then, and of the first report beyond the bound at its time. A policy that is neither
of the two hears everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..scheduling import BubbleFilling, Candidate, DualEnd, FinishReason, Group, Scheduler


class Reports:
    """
    What the policies of a rollout read.

    Args:
        scheduler ([`Scheduler`]):
            Of the rollout.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.groups = scheduler.ledger.groups
        self.ledger = scheduler.ledger
        stop, self.refill = scheduler.policies.group_stop, scheduler.policies.refill
        self.patient: DualEnd | None = None  # the policy that acts on a report
        self.needed = scheduler.needs_progress
        if stop.needs_progress and isinstance(stop, DualEnd):
            self.patient = stop
        is_known = (not stop.needs_progress or type(stop).surplus is DualEnd.surplus) and (
            self.refill is None or type(self.refill).extra is BubbleFilling.extra
        )
        self.everything = self.needed and not is_known

    def begins_at(self, group: Group) -> float:
        """Tokens from which on reports of the group's sequences are events; infinity for none."""
        if self.everything:
            return 0.0
        stop = self.patient
        if stop is None or group.closed or group.num_complete < stop.num_generations or stop.saturated(group):
            return math.inf
        assert isinstance(stop.long_end_patience, float | int)
        return stop.long_end_patience * group.complete_lengths[stop.num_generations - 1]

    def read_at_end(self, group: Group, reason: FinishReason) -> Iterable[Candidate]:
        """The candidates whose lengths are read when one of the group ends for this reason."""
        if self.everything:
            return ()
        refill = self.refill
        if isinstance(refill, BubbleFilling) and refill.looks(self.groups.values(), self.ledger.num_running - 1):
            return [c for own in self.groups.values() if not own.closed and own.num_unfinished for c in own.unfinished]
        stop = self.patient
        if stop is not None and group.num_complete + (reason is FinishReason.STOP) >= stop.num_generations:
            return group.unfinished
        return ()
