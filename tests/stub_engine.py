"""Runs rollouts with scripted lengths in virtual time, for tests of the code around a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trl_darts.analysis.simulation import ClusterSpec, SimulatedCluster
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import Command, GroupPlan, RolloutResult, Scheduler


class StubEngine:
    """One engine that takes a second per token. `commands` records its commands in order."""

    def __init__(
        self,
        lengths: Mapping[int, Sequence[int]] | Sequence[Sequence[int]],
        max_completion_length: int = 1_000_000,
        progress_interval: int = 16,
    ) -> None:
        self.lengths = lengths
        self.max_completion_length = max_completion_length
        self.cluster = SimulatedCluster(ClusterSpec(LatencyCurve([1], [1.0]), report_interval=progress_interval))
        self.commands: list[Command] = []

    def run(self, scheduler: Scheduler, plans: Sequence[GroupPlan]) -> RolloutResult:
        def noted(method):
            def call(*args):
                commands = method(*args)
                self.commands.extend(commands)
                return commands

            return call

        scheduler.start, scheduler.handle = noted(scheduler.start), noted(scheduler.handle)
        return self.cluster.run(scheduler, plans, self.lengths, self.max_completion_length)
