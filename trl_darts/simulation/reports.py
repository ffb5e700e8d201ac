"""
What the policies of a rollout hear of candidates that still run. A sequence of a thousand tokens reports sixty times,
and almost none of it decides anything:

- [`DualEnd`] with a number for its patience reads the lengths of a group with enough complete candidates, and acts on
  the first report beyond a bound. So a sequence reports just before its group has enough, as much as would be known by
  then, and when it reaches the bound.

What the scheduler decides is the same. With other policies, it hears of every report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..scheduling import Candidate, DualEnd, FinishReason, Group, Scheduler


class Reports:
    """
    Which reports are needed.

    Args:
        scheduler ([`Scheduler`]):
            Of the rollout, before its start.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        stop = scheduler.policies.group_stop
        self.patient = stop if isinstance(stop, DualEnd) and type(stop).surplus is DualEnd.surplus else None
        needed = stop.needs_progress
        self.everything = needed and self.patient is None
        if not needed or self.everything:
            self.patient = None
        self.needed = self.everything or self.patient is not None

    def begin_at(self, group: Group) -> float:
        """Tokens from which on the scheduler hears of the group's sequences; infinity for never."""
        if self.everything:
            return 0.0
        stop = self.patient
        if stop is None or group.closed or group.num_complete < stop.num_generations or stop.saturated(group):
            return math.inf
        assert stop.length_bound is not None
        return stop.length_bound * group.complete_lengths[stop.num_generations - 1]

    def read_at_end(self, group: Group, reason: FinishReason) -> Sequence[Candidate]:
        """The candidates whose lengths are read when one of the group ends for this reason."""
        stop = self.patient
        if stop is None or group.num_complete + (reason is FinishReason.STOP) < stop.num_generations:
            return ()
        return group.unfinished
