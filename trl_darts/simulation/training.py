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
from dataclasses import dataclass, field

import numpy as np

from ..errors import ConfigurationError
from ..scheduling import FinishReason, GroupSummary, Occupancy, PromptInfo, Scheduler, ScheduleSettings, bubble_ratio
from .cluster import SimulatedCluster
from .engine import ClusterSpec
from .lengths import IntArray, LengthModel


STOP, ABORT = FinishReason.STOP.value, FinishReason.ABORT.value


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

    def batches(self, seed: int) -> Iterator[IntArray]:
        """Prompts of each step: a new order in each epoch, and what does not fill a batch at its end is left out."""
        rng = np.random.default_rng([seed, 3])
        size = self.prompts_per_step
        while True:
            order = rng.permutation(self.lengths.num_prompts)
            for start in range(0, len(order) - size + 1, size):
                yield order[start : start + size]


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
    pool_tokens: list[float] = field(default_factory=list)
    kept_tokens: list[float] = field(default_factory=list)
    kept_vs_pool_length_ratio: list[float] = field(default_factory=list)
    longest_kept: list[float] = field(default_factory=list)


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
            for step, prompts in zip(range(num_steps), self.workload.batches(self.seed), strict=False):
                self._step(step, prompts, run)
        return run

    def _step(self, step: int, prompts: IntArray, run: SimulatedRun) -> None:
        workload, settings = self.workload, self.settings
        infos = [PromptInfo(int(prompt), workload.prompt_tokens) for prompt in prompts]
        admission = self.admission.plan(infos)
        lengths = workload.lengths.draw(prompts, max(admission.num_candidates), (self.seed, step))
        if self.log_shift:
            lengths = np.maximum(1, (lengths * math.exp(self.log_shift)).astype(np.int64))
        scheduler = Scheduler(admission.ordered(settings.policies), settings.num_generations)
        plans = admission.plans(infos)
        result = self.cluster.run(scheduler, plans, lengths.tolist(), workload.max_completion_length)
        summaries = [GroupSummary.of(group) for group in result.groups]
        occupancy = Occupancy.of(result)
        self.admission.observe(summaries, occupancy.seconds)
        self._note(run, summaries, occupancy, admission.saturated)
        if workload.shaping:
            self.log_shift += workload.shaping * _selection_effect(summaries)

    def _note(
        self, run: SimulatedRun, summaries: list[GroupSummary], occupancy: Occupancy, num_saturated: int
    ) -> None:
        pool = np.array([length for summary in summaries for length in summary.lengths])
        num_aborted = sum(summary.finish_reasons.count(ABORT) for summary in summaries)
        kept = np.array([summary.lengths[i] for summary in summaries for i in summary.selected])
        cut = [summary.finish_reasons[i] != STOP for summary in summaries for i in summary.selected]
        workload = self.workload
        trained = float(kept.sum()) + len(kept) * workload.prompt_tokens
        run.rollout_seconds.append(occupancy.seconds)
        run.step_seconds.append(
            occupancy.seconds + workload.fixed_seconds + trained * workload.train_seconds_per_token
        )
        run.bubble_ratio.append(bubble_ratio(occupancy))
        run.candidates.append(float(len(pool)))
        run.aborted_candidates.append(float(num_aborted))
        run.saturated_ratio.append(num_saturated / len(summaries))
        run.truncated_ratio.append(sum(cut) / len(cut))
        run.pool_tokens.append(float(pool.sum()))
        run.kept_tokens.append(float(kept.sum()))
        run.kept_vs_pool_length_ratio.append(float(kept.mean() / pool.mean()))
        run.longest_kept.append(float(kept.max()))


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
