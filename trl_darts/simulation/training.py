"""
A training in virtual time: the trainer's own admission, policies, scheduler and tracker, step by step.

```
Workload ──▶ N prompts ──▶ admission ──▶ plans ──▶ SimulatedCluster ──▶ summaries ──▶ tracker, budget
   ▲                                                                        │
   └────────────── the next step, the next epoch ◀── shaping ◀──────────────┘
```
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigurationError
from ..scheduling import (
    Admission,
    BatchStop,
    GroupPlan,
    GroupSummary,
    Occupancy,
    PromptInfo,
    RolloutResult,
    Scheduler,
    ScheduleSettings,
)
from .cluster import SimulatedCluster
from .draws import BatchLengths, CandidateLengths
from .engine import ClusterSpec
from .lookahead import EpochOfRounds
from .steps import SimulatedRun, StepOutcome
from .workload import Workload


class SimulatedTraining:
    """
    A training in virtual time.

    Args:
        workload ([`Workload`]):
            What is trained on.
        settings ([`ScheduleSettings`]):
            How rollouts are decided.
        cluster ([`ClusterSpec`]):
            What decodes them. Its latency curve is also the one that the budget is computed with.
        seed (`int`, *optional*, defaults to `0`):
            Of the order of the prompts and of their responses.
    """

    def __init__(self, workload: Workload, settings: ScheduleSettings, cluster: ClusterSpec, seed: int = 0) -> None:
        self.workload = workload
        self.settings = settings
        self.seed = seed
        self.cluster = SimulatedCluster(cluster)
        tracker = settings.tracker(workload.max_completion_length)
        self.admission = settings.admission(tracker, cluster.latency, cluster.num_engines)
        self.rounds = settings.rounds(workload.prompts_per_step)
        self.lengths = CandidateLengths(workload, seed)
        self.log_shift = 0.0  # what training has done to all log-lengths, see `Workload.shaping`

    def run(self, num_steps: int) -> SimulatedRun:
        """
        Trains from the beginning.

        Args:
            num_steps (`int`):
                Optimizer steps, of one rollout each.

        Returns:
            [`SimulatedRun`]: What they were like.

        Raises:
            [`ConfigurationError`]: If there is no step.
        """
        if num_steps < 1:
            raise ConfigurationError(f"`num_steps` ({num_steps}) must be at least 1.")
        run = SimulatedRun()
        with _collector_off():
            for _, outcome in zip(range(num_steps), self._outcomes(), strict=False):
                self._note(run, outcome)
                self.admission.observe(outcome.observed)
                if self.workload.shaping:
                    self.log_shift += self.workload.shaping * outcome.selection_effect
        return run

    def _outcomes(self) -> Iterator[StepOutcome]:
        for epoch in self.workload.epochs(self.seed):
            batches = map(self.lengths.next_batch, epoch)
            if self.rounds is None:
                for batch in batches:
                    yield self._step(batch)
                continue
            tokens, redraws = self.workload.prompt_tokens, self.workload.redraws
            rounds = EpochOfRounds(self.rounds, self.settings, self.admission, self._rollout, tokens, redraws)
            yield from rounds.steps(batches, lambda: self.log_shift)

    def _step(self, batch: BatchLengths) -> StepOutcome:
        infos = [PromptInfo(int(prompt), self.workload.prompt_tokens) for prompt in batch.prompts]
        admission = self.admission.plan(infos)
        lengths = batch.all(max(admission.num_candidates), self.log_shift)
        result = self._rollout(admission, admission.plans(infos), lengths)
        kept = [(row.length, row.finish_reason) for group in result.groups for row in group.rows]
        settled = [GroupSummary.of(group) for group in result.groups]
        return StepOutcome(settled, [], settled, kept, Occupancy.of(result), admission.saturated)

    def _rollout(
        self,
        admission: Admission,
        plans: list[GroupPlan],
        lengths: list[list[int]],
        batch_stop: BatchStop | None = None,
    ) -> RolloutResult:
        policies = self.settings.policies(admission.expected_lengths, batch_stop)
        scheduler = Scheduler(policies, self.settings.num_generations)
        return self.cluster.run(scheduler, plans, lengths, self.workload.max_completion_length)

    def _note(self, run: SimulatedRun, outcome: StepOutcome) -> None:
        run.add(outcome, self.workload)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Inside, nothing looks for cycles: a rollout has none, and looking through its candidates takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
