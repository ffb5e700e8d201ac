"""What a step of a training in virtual time was like."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..scheduling import FinishReason, GroupSummary, Occupancy, bubble_ratio
from .workload import Workload


ABORT = FinishReason.ABORT.value


@dataclass(frozen=True)
class StepOutcome:
    """
    A step: groups that the rollout settled and deferred, those that are learned from, and the rows trained on.

    `num_stale_tokens` of the rows were sampled by an older policy. `num_buffered_tokens` are those of prompts that go
    on in the next rollout, or wait to be trained on. `longest_wait` counts the steps between the one in which a prompt
    was first sampled for and the one that trains on it, for the row that waited longest.
    """

    settled: list[GroupSummary]
    deferred: list[GroupSummary]
    observed: list[GroupSummary]
    kept: list[tuple[int, FinishReason | None]]
    occupancy: Occupancy
    num_saturated: int
    num_stale_tokens: int = 0
    num_buffered_tokens: int = 0
    longest_wait: int = 0

    @property
    def selection_effect(self) -> float:
        """Mean over the prompts of (mean log-length of the kept candidates − that of all complete ones)."""
        effects = []
        for summary in self.settled:
            logs = np.log(np.maximum(summary.lengths, 1))
            complete = ~np.array(summary.censored)
            if complete.any():
                effects.append(float(logs[summary.selected].mean() - logs[complete].mean()))
        return float(np.mean(effects)) if effects else 0.0


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
    mean_kept: list[float] = field(default_factory=list)
    longest_kept: list[float] = field(default_factory=list)
    off_policy_share: list[float] = field(default_factory=list)  # of the kept tokens: sampled by an older policy
    deferred_groups: list[float] = field(default_factory=list)  # that the rollout ended without
    buffered_tokens: list[float] = field(default_factory=list)  # at its end, of prompts not yet trained on
    longest_wait: list[float] = field(default_factory=list)  # steps from a prompt's first candidate to its training

    def add(self, step: StepOutcome, workload: Workload) -> None:
        """
        Takes note of a step.

        Args:
            step ([`StepOutcome`]):
                What came of it.
            workload ([`Workload`]):
                What it costs beside its rollout.
        """
        summaries, seconds = [*step.settled, *step.deferred], step.occupancy.seconds
        pool = np.array([length for summary in summaries for length in summary.lengths])
        ended = np.array([length for summary in step.observed for length in summary.lengths])
        kept = np.array([length for length, _ in step.kept])
        cut = [reason is not FinishReason.STOP for _, reason in step.kept]
        trained = float(kept.sum()) + len(kept) * workload.prompt_tokens
        self.rollout_seconds.append(seconds)
        self.step_seconds.append(seconds + workload.fixed_seconds + trained * workload.train_seconds_per_token)
        self.bubble_ratio.append(bubble_ratio(step.occupancy))
        self.candidates.append(float(len(pool)))
        self.aborted_candidates.append(float(sum(own.finish_reasons.count(ABORT) for own in step.observed)))
        self.saturated_ratio.append(step.num_saturated / max(1, len(summaries)))
        self.truncated_ratio.append(sum(cut) / len(cut))
        self.pool_tokens.append(float(pool.sum()) - sum(summary.num_carried_tokens for summary in summaries))
        self.kept_tokens.append(float(kept.sum()))
        self.kept_vs_pool_length_ratio.append(float(kept.mean() / ended.mean()) if len(ended) else math.nan)
        self.mean_kept.append(float(kept.mean()))
        self.longest_kept.append(float(kept.max()))
        self.off_policy_share.append(step.num_stale_tokens / float(kept.sum()))
        self.deferred_groups.append(float(len(step.deferred)))
        self.buffered_tokens.append(float(step.num_buffered_tokens))
        self.longest_wait.append(float(step.longest_wait))
