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
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import ConfigurationError
from ..scheduling import (
    Admission,
    BatchStop,
    FinishReason,
    GroupPlan,
    GroupSummary,
    Occupancy,
    PromptInfo,
    RolloutBuffer,
    RolloutResult,
    Round,
    RoundPolicy,
    Scheduler,
    ScheduleSettings,
    bubble_ratio,
)
from .cluster import SimulatedCluster
from .engine import ClusterSpec
from .lengths import IntArray, LengthModel


ABORT = FinishReason.ABORT.value


@dataclass(frozen=True)
class Workload:
    """
    What is trained on, and what a step costs beside its rollout.

    Args:
        lengths ([`LengthModel`]):
            Response lengths of the data set's prompts.
        prompts_per_step (`int`):
            N.
        max_completion_length (`int`):
            Tokens at which responses are cut off.
        prompt_tokens (`int`, *optional*, defaults to `0`):
            Length of each prompt.
        train_seconds_per_token (`float`, *optional*, defaults to `0.0`):
            Forward and backward pass, per token of prompts and kept responses.
        fixed_seconds (`float`, *optional*, defaults to `0.0`):
            Per step: weight sync, rewards, optimizer.
        shaping (`float`, *optional*, defaults to `0.0`):
            How fast the policy follows what is selected, an assumption: in each step, all log-lengths move by
            `shaping` times the mean over the batch's prompts of (mean log-length of the kept candidates − that of all
            complete ones). Rewards play no part in it.

    Raises:
        [`ConfigurationError`]: If a number is out of range.
    """

    lengths: LengthModel
    prompts_per_step: int
    max_completion_length: int
    prompt_tokens: int = 0
    train_seconds_per_token: float = 0.0
    fixed_seconds: float = 0.0
    shaping: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.prompts_per_step <= self.lengths.num_prompts:
            raise ConfigurationError(
                f"`prompts_per_step` ({self.prompts_per_step}) must be at least 1, and at most the number of prompts "
                f"({self.lengths.num_prompts})."
            )
        if self.max_completion_length < 1:
            raise ConfigurationError(f"`max_completion_length` ({self.max_completion_length}) must be at least 1.")
        for name in ("prompt_tokens", "train_seconds_per_token", "fixed_seconds", "shaping"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be finite and not negative.")

    def epochs(self, seed: int) -> Iterator[list[IntArray]]:
        """Batches of prompts, a new order in each epoch; what does not fill a batch at its end is left out."""
        rng = np.random.default_rng([seed, 3])
        size = self.prompts_per_step
        while True:
            order = rng.permutation(self.lengths.num_prompts)
            yield [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


@dataclass
class SimulatedRun:
    """
    What each step of a training was like; all lists have one entry per step.

    Seconds are virtual. Tokens and candidates are counted over the batch; lengths are in tokens.
    """

    rollout_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    bubble_ratio: list[float] = field(default_factory=list)
    candidates: list[float] = field(default_factory=list)
    aborted_candidates: list[float] = field(default_factory=list)
    saturated_ratio: list[float] = field(default_factory=list)
    truncated_ratio: list[float] = field(default_factory=list)  # of the kept rows
    pool_tokens: list[float] = field(default_factory=list)  # decoded in this step
    kept_tokens: list[float] = field(default_factory=list)
    kept_vs_pool_length_ratio: list[float] = field(default_factory=list)
    longest_kept: list[float] = field(default_factory=list)
    off_policy_share: list[float] = field(default_factory=list)  # of the kept tokens: sampled by an older policy
    deferred_groups: list[float] = field(default_factory=list)  # that the rollout ended without


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
        refill = settings.refill(cluster.latency, cluster.num_engines)
        self.policies = replace(settings.policies, refill=refill)
        self.rounds = settings.rounds(workload.prompts_per_step)
        self.log_shift = 0.0  # what training has done to all log-lengths, see `Workload.shaping`
        self._num_drawn = 0
        self._drawn: dict[int, list[int]] = {}  # lengths of the candidates of each prompt in the buffer

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
                self.admission.observe(outcome.observed, outcome.occupancy.seconds)
                if self.workload.shaping:
                    self.log_shift += self.workload.shaping * _selection_effect(outcome.settled)
        return run

    def _outcomes(self) -> Iterator[_Outcome]:
        for epoch in self.workload.epochs(self.seed):
            if self.rounds is None:
                for prompts in epoch:
                    yield self._step(prompts)
            else:
                yield from self._epoch_of_rounds(self.rounds, epoch)

    def _step(self, prompts: IntArray) -> _Outcome:
        infos = self._infos(prompts)
        admission = self.admission.plan(infos)
        lengths = self._draw(prompts, max(admission.num_candidates))
        result = self._rollout(admission, admission.plans(infos), lengths)
        kept = [(row.length, row.finish_reason) for group in result.groups for row in group.rows]
        settled = [GroupSummary.of(group) for group in result.groups]
        return _Outcome(settled, [], settled, kept, Occupancy.of(result), admission.saturated)

    def _epoch_of_rounds(self, rounds: RoundPolicy, epoch: list[IntArray]) -> Iterator[_Outcome]:
        """As many steps as there are batches; a schedule may look ahead within the epoch."""
        buffer, batches = rounds.buffer(), iter(epoch)
        for version in range(len(epoch)):
            while rounds.lacking(buffer):
                prompts = next(batches, None)
                if prompts is None:
                    break
                ids = buffer.enter(self._infos(prompts))
                self._drawn.update(zip(ids, self._draw(prompts, self.settings.max_num_generations), strict=True))
            yield self._round(rounds.next(buffer), buffer, version)

    def _round(self, plan: Round, buffer: RolloutBuffer, version: int) -> _Outcome:
        result, saturated = None, 0
        if plan.entries:
            admission, plans = buffer.begin(plan, self.settings.num_generations, self.admission)
            lengths = [self._drawn[entry.entry_id] for entry in plan.entries]
            result, saturated = self._rollout(admission, plans, lengths, plan.batch_stop), admission.saturated
        harvest = buffer.absorb(plan, result, version)
        rows = [row for group in harvest.groups for row in group.rows]
        stale = sum(count for row in rows for sampled_by, count in row.versions if sampled_by != version)
        settled = [GroupSummary.of(group) for group in (result.groups if result else [])]
        deferred = [GroupSummary.of(group) for group in (result.deferred if result else [])]
        for group in harvest.groups:
            del self._drawn[group.entry.entry_id]
        return _Outcome(
            settled,
            deferred,
            settled if buffer.keeps_tokens else [*settled, *deferred],
            [(row.length, row.partial.finish_reason) for row in rows],
            Occupancy.of(result) if result else Occupancy(0, 0.0, 0.0),
            saturated,
            stale,
        )

    def _rollout(
        self,
        admission: Admission,
        plans: list[GroupPlan],
        lengths: list[list[int]],
        batch_stop: BatchStop | None = None,
    ) -> RolloutResult:
        policies = admission.ordered(self.policies)
        if batch_stop is not None:
            policies = replace(policies, batch_stop=batch_stop)
        scheduler = Scheduler(policies, self.settings.num_generations)
        return self.cluster.run(scheduler, plans, lengths, self.workload.max_completion_length)

    def _infos(self, prompts: IntArray) -> list[PromptInfo]:
        return [PromptInfo(int(prompt), self.workload.prompt_tokens) for prompt in prompts]

    def _draw(self, prompts: IntArray, num_candidates: int) -> list[list[int]]:
        """Lengths of the next batch of the loader: the same for all schedules, batch by batch."""
        if self.settings.fill_bubbles:
            num_candidates = self.settings.max_num_generations
        lengths = self.workload.lengths.draw(prompts, num_candidates, (self.seed, self._num_drawn))
        self._num_drawn += 1
        if self.log_shift:
            lengths = np.maximum(1, (lengths * math.exp(self.log_shift)).astype(np.int64))
        drawn: list[list[int]] = lengths.tolist()
        return drawn

    def _note(self, run: SimulatedRun, outcome: _Outcome) -> None:
        summaries = [*outcome.settled, *outcome.deferred]
        pool = np.array([length for summary in summaries for length in summary.lengths])
        num_aborted = sum(summary.finish_reasons.count(ABORT) for summary in summaries)
        kept = np.array([length for length, _ in outcome.kept])
        cut = [reason is not FinishReason.STOP for _, reason in outcome.kept]
        workload, occupancy = self.workload, outcome.occupancy
        trained = float(kept.sum()) + len(kept) * workload.prompt_tokens
        run.rollout_seconds.append(occupancy.seconds)
        run.step_seconds.append(
            occupancy.seconds + workload.fixed_seconds + trained * workload.train_seconds_per_token
        )
        run.bubble_ratio.append(bubble_ratio(occupancy))
        run.candidates.append(float(len(pool)))
        run.aborted_candidates.append(float(num_aborted))
        run.saturated_ratio.append(outcome.num_saturated / max(1, len(summaries)))
        run.truncated_ratio.append(sum(cut) / len(cut))
        run.pool_tokens.append(float(pool.sum()) - sum(summary.num_carried_tokens for summary in summaries))
        run.kept_tokens.append(float(kept.sum()))
        run.kept_vs_pool_length_ratio.append(float(kept.mean() / pool.mean()) if len(pool) else math.nan)
        run.longest_kept.append(float(kept.max()))
        run.off_policy_share.append(outcome.num_stale_tokens / float(kept.sum()))
        run.deferred_groups.append(float(len(outcome.deferred)))


@dataclass(frozen=True)
class _Outcome:
    """A step: groups that the rollout settled and deferred, those that are learned from, and the rows trained on."""

    settled: list[GroupSummary]
    deferred: list[GroupSummary]
    observed: list[GroupSummary]
    kept: list[tuple[int, FinishReason | None]]
    occupancy: Occupancy
    num_saturated: int
    num_stale_tokens: int = 0


def _selection_effect(summaries: list[GroupSummary]) -> float:
    """Mean over the prompts of (mean log-length of the kept candidates − that of all complete ones)."""
    effects = []
    for summary in summaries:
        logs = np.log(np.maximum(summary.lengths, 1))
        complete = ~np.array(summary.censored)
        if complete.any():
            effects.append(float(logs[summary.selected].mean() - logs[complete].mean()))
    return float(np.mean(effects)) if effects else 0.0


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
