"""What a simulated training yields: its steps, and quantities with one entry per step."""

import math
from dataclasses import dataclass, field

import numpy as np

from ...scheduling import FinishReason, GroupSummary, Occupancy, bubble_ratio
from .workload import Workload


@dataclass(frozen=True)
class SimulatedStep:
    """A step: the groups of its rollouts, and the rows trained on."""

    complete: list[GroupSummary]  # completed by the rollouts
    deferred: list[GroupSummary]  # left unfinished by the rollouts
    observed: list[GroupSummary]  # groups from which the tracker learns
    kept: list[tuple[int, FinishReason | None]]  # length and finish reason of each row
    occupancy: Occupancy
    num_saturated: int
    num_informative: int  # groups trained on whose rewards have a spread
    num_stale_tokens: int = 0  # of the rows, sampled by an older policy
    num_buffered_tokens: int = 0  # of prompts that the next rollout resumes, or that wait to be trained on
    longest_wait: int = 0  # most steps between a prompt's first candidate and its training
    mean_lag: float = 0.0  # steps between a token of the rows and its training, on average
    waited_seconds: float | None = None  # of the trainer, if a rollout without an end decodes while it trains


@dataclass
class SimulatedRun:
    """
    Quantities of a training, with one entry per step in each list.

    Seconds are virtual. Tokens and candidates are counted over the batch; lengths are in tokens.
    """

    rollout_seconds: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)  # of a step without its rollout
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
    mean_lag: list[float] = field(default_factory=list)  # steps between a kept token and its training
    deferred_groups: list[float] = field(default_factory=list)  # left unfinished by the rollout
    buffered_tokens: list[float] = field(default_factory=list)  # at its end, of prompts not yet trained on
    longest_wait: list[float] = field(default_factory=list)  # steps from a prompt's first candidate to its training
    informative_groups: list[float] = field(default_factory=list)  # trained on, with a spread of rewards

    def add(self, step: SimulatedStep, workload: Workload, ahead: int | str | None = 0) -> None:
        """Appends a step. With a rollout `ahead`, it was sampled while the previous step trained."""
        summaries, seconds = [*step.complete, *step.deferred], step.occupancy.seconds
        pool = np.array([length for summary in summaries for length in summary.lengths])
        ended = np.array([length for summary in step.observed for length in summary.lengths])
        kept = np.array([length for length, _ in step.kept])
        num_cut = sum(reason is not FinishReason.STOP for _, reason in step.kept)
        num_aborted = sum(own.finish_reasons.count(FinishReason.ABORT.value) for own in step.observed)
        train_seconds = workload.train_seconds(kept.tolist())
        whole = (seconds if step.waited_seconds is None else step.waited_seconds) + train_seconds
        if ahead == 1:  # the training of the last step is not counted
            whole = max(seconds, *self.train_seconds[-1:], 0.0)
        is_ahead = ahead == 1 and bool(self.train_seconds)
        values: dict[str, float] = {
            "rollout_seconds": seconds,
            "train_seconds": train_seconds,
            "step_seconds": whole,
            "bubble_ratio": bubble_ratio(step.occupancy),
            "candidates": len(pool),
            "aborted_candidates": num_aborted,
            "saturated_ratio": step.num_saturated / max(1, len(summaries)),
            "truncated_ratio": num_cut / len(kept),
            "pool_tokens": pool.sum() - sum(summary.num_carried_tokens for summary in summaries),
            "kept_tokens": kept.sum(),
            "kept_vs_pool_length_ratio": kept.mean() / ended.mean() if len(ended) else math.nan,
            "mean_kept": kept.mean(),
            "longest_kept": kept.max(),
            "off_policy_share": 1.0 if is_ahead else step.num_stale_tokens / kept.sum(),
            "mean_lag": step.mean_lag + is_ahead,
            "deferred_groups": len(step.deferred),
            "buffered_tokens": step.num_buffered_tokens,
            "longest_wait": step.longest_wait,
            "informative_groups": step.num_informative,
        }
        for name, value in values.items():
            getattr(self, name).append(float(value))
