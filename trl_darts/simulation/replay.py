"""
Recorded rollouts in virtual time: would the engines that a run had, as the model knows them, have taken as long, and
would the same candidates have been kept?

What a candidate that was called off would have become is not known, and does not matter: it is called off again, as
soon as those that are known to be complete are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from ..scheduling import FinishReason, GroupPlan, RolloutResult, Scheduler, ScheduleSettings
from .cluster import SimulatedCluster
from .engine import ClusterSpec
from .lengths import ENDLESS
from .recorded import recorded_traces


@dataclass(frozen=True)
class RecordedRollout:
    """
    One rollout of a trace.

    Args:
        plans (`list[GroupPlan]`):
            Its prompts.
        lengths (`list[list[int]]` of shape `(N, M'_i)`):
            Tokens of each candidate; `ENDLESS` for those that were called off, or cut off at the limit.
        selected (`list[list[int]]` of shape `(N, M)`):
            Candidates that were kept, by prompt.
        seconds (`float`):
            From the first submission to the last end.
    """

    plans: list[GroupPlan]
    lengths: list[list[int]]
    selected: list[list[int]]
    seconds: float

    def replay(self, settings: ScheduleSettings, cluster: ClusterSpec, max_length: int) -> RolloutResult:
        """
        The rollout in virtual time.

        Args:
            settings ([`ScheduleSettings`]):
                Those of the run.
            cluster ([`ClusterSpec`]):
                The engines.
            max_length (`int`):
                The run's `max_completion_length`.

        Returns:
            [`RolloutResult`]: What came of it. `timeline` has its seconds.

        Raises:
            [`ConfigurationError`]: If the schedule decides more than a trace tells: which prompts go into a rollout.
        """
        if settings.rounds(len(self.plans)) is not None:
            raise ConfigurationError(
                f"`schedule` ({settings.schedule!r}) can't be replayed: a rollout's trace does not tell when its "
                "prompts were added. Replay one of 'grpo' or 'darts', or simulate the run's workload."
            )
        known = [plan.expected_length for plan in self.plans if plan.expected_length is not None]
        policies = settings.policies(known if len(known) == len(self.plans) else None)
        scheduler = Scheduler(policies, settings.num_generations)
        return SimulatedCluster(cluster).run(scheduler, self.plans, self.lengths, max_length)


def recorded_rollouts(run_dir: Path) -> Iterator[RecordedRollout]:
    """
    The rollouts of a run with `save_rollout_trace=True`, in order.

    Args:
        run_dir (`Path`):
            The run's `output_dir`.

    Raises:
        [`ConfigurationError`]: If there are no traces, or they lack columns. It is raised with the first rollout.
    """
    traces = recorded_traces(run_dir)
    stop = FinishReason.STOP.value
    for _, rollout in traces.groupby(["step", "micro"]):
        groups = [group.sort_values("candidate") for _, group in rollout.groupby("group")]
        yield RecordedRollout(
            plans=[
                GroupPlan(
                    index,
                    len(group),
                    num_prompt_tokens=int(group["num_prompt_tokens"].iloc[0]),
                    expected_length=None if math.isnan(length := group["expected_length"].iloc[0]) else float(length),
                )
                for index, group in enumerate(groups)
            ],
            lengths=[
                [
                    int(length) if reason == stop else ENDLESS
                    for length, reason in zip(group["length"], group["finish_reason"], strict=True)
                ]
                for group in groups
            ],
            selected=[group.loc[group["selected"], "candidate"].tolist() for group in groups],
            seconds=float(rollout["end_seconds"].max() - rollout["start_seconds"].min()),
        )
