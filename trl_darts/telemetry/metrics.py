"""Computes the `darts/*` metrics of a rollout. Each metric is defined in `docs/metrics.md`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..engines.batch import PromptBatch
from ..engines.server_metrics import DraftCounts
from ..scheduling import Admission, FinishReason, GroupSummary, Occupancy, RolloutResult, bubble_ratio
from ..training.rows import BufferedRows
from ..weights import SyncRecord


MAX_LOG_RATIO = 100.0  # exp(2 · 100) is finite


@dataclass(frozen=True)
class TailRecord:
    """Switches to tail servers and their predictions (NaN without a prediction). Seconds are sums over switches."""

    switches: int = 0
    moved_candidates: int = 0
    reread_tokens: int = 0
    seconds: float = 0.0  # from the switch to the end
    predicted_seconds: float = 0.0
    predicted_without: float = 0.0  # predicted seconds without a switch

    @classmethod
    def of(cls, result: RolloutResult) -> "TailRecord":
        switch = result.tail_switch
        if switch is None:
            return cls()
        forecast = switch.forecast
        predicted = (math.nan, math.nan) if forecast is None else (forecast.there, forecast.here)
        return cls(1, switch.num_moved, switch.num_tokens, result.timeline.times[-1] - switch.begun, *predicted)

    def then(self, later: "TailRecord") -> "TailRecord":
        """Returns the sum of both records."""
        return TailRecord(*(old + new for old, new in zip(astuple(self), astuple(later), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics. The gain is the predicted time without a switch minus the measured time."""
        found = {name: float(getattr(self, name)) for name in ("switches", "moved_candidates", "reread_tokens")}
        if self.switches:
            found["seconds"] = self.seconds
        if self.predicted_seconds > 0:
            found["predicted_gain_seconds"] = self.predicted_without - self.predicted_seconds
            found["gain_seconds"] = self.predicted_without - self.seconds
            # Relative to the prediction, which is never 0. The measured time is, if the switch completed the batch.
            found["prediction_error"] = 1 - self.seconds / self.predicted_seconds
        return {f"darts/tail/{name}": value for name, value in found.items()}


@dataclass(frozen=True)
class RolloutRecord:
    """Statistics of a finished rollout, over all processes."""

    admission: Admission
    summaries: list[GroupSummary]  # the completed groups, in the order of the batch
    occupancy: Occupancy
    num_generations: int
    num_mixed: int = 0  # groups whose rows have different prompts
    num_resumed: int = 0  # submissions repeated because a server was lost or full
    num_dropped: int = 0  # groups that could not be completed
    deferred: list[GroupSummary] = field(default_factory=list)  # groups unfinished at the end of the rollout
    carries_over: bool = False  # whether deferred groups continue in a later rollout with their tokens
    tail: TailRecord | None = None  # set if there are tail servers
    long_end_below: int = 0  # groups with fewer candidates wait for the long end

    @classmethod
    def of(
        cls,
        admission: Admission,
        result: RolloutResult,
        batch: PromptBatch,
        carries_over: bool = False,
        long_end_below: int = 0,
        has_tail: bool = False,
    ) -> "RolloutRecord":
        return cls(
            admission,
            [GroupSummary.of(group) for group in result.groups],
            Occupancy.of(result),
            batch.num_generations,
            num_mixed=sum(batch.mixed),
            num_resumed=result.num_resumed,
            num_dropped=len(result.dropped),
            deferred=[GroupSummary.of(group) for group in result.deferred],
            carries_over=carries_over,
            tail=TailRecord.of(result) if has_tail else None,
            long_end_below=long_end_below,
        )

    def then(self, later: "RolloutRecord") -> "RolloutRecord":
        """Returns the combined record of a batch that took several rollouts."""
        old, new = self.admission, later.admission
        expected = None
        if old.expected_lengths is not None and new.expected_lengths is not None:
            expected = [*old.expected_lengths, *new.expected_lengths]
        admission = Admission(
            [*old.num_candidates, *new.num_candidates], old.saturated + new.saturated, new.rho, expected
        )
        return replace(
            later,
            admission=admission,
            summaries=[*self.summaries, *later.summaries],
            occupancy=self.occupancy.then(later.occupancy),
            num_mixed=self.num_mixed + later.num_mixed,
            num_resumed=self.num_resumed + later.num_resumed,
            num_dropped=self.num_dropped + later.num_dropped,
            tail=self.tail and later.tail and self.tail.then(later.tail),
            deferred=[*self.deferred, *later.deferred],
        )

    @property
    def groups(self) -> list[GroupSummary]:
        """Completed and deferred groups."""
        return [*self.summaries, *self.deferred]

    @property
    def carried_over(self) -> list[GroupSummary]:
        """Groups that continue in a later rollout with their tokens."""
        return self.deferred if self.carries_over else []

    @property
    def ended(self) -> list[GroupSummary]:
        """Groups whose lengths are final, which excludes those carried over."""
        return self.summaries if self.carries_over else self.groups

    @property
    def seconds(self) -> float:
        """Seconds from the first submission to the last end, over all processes."""
        return self.occupancy.seconds


def rollout_metrics(
    record: RolloutRecord,
    sync: SyncRecord | None = None,
    drafted: DraftCounts | None = None,
    server_share: float | None = None,
) -> dict[str, float]:
    summaries = record.summaries
    lengths = np.array([length for s in record.ended for length in s.lengths], dtype=float)
    reasons = [reason for s in record.ended for reason in s.finish_reasons]
    kept = np.array([s.lengths[i] for s in summaries for i in s.selected])
    aborted = np.array([reason == FinishReason.ABORT.value for reason in reasons], dtype=bool)
    return {
        **({} if sync is None else _sync(sync)),
        **({} if drafted is None else _drafts(drafted)),
        **({} if server_share is None else {"darts/servers/share": server_share}),
        # Nothing is known of a batch whose groups were all dropped.
        **(_pool(lengths, reasons) if reasons else {}),
        **(_budget(record) if record.admission.num_candidates else {}),
        **_rollout(record, lengths, kept, aborted),
        **(_selection(record, lengths, kept) if summaries else {}),
        **_long_ends(record),
        **({} if record.tail is None else record.tail.metrics()),
    }


def _sync(sync: SyncRecord) -> dict[str, float]:
    metrics = {"darts/sync/seconds": sync.seconds}
    if sync.num_bytes is not None:
        metrics["darts/sync/bytes"] = float(sync.num_bytes)
        metrics["darts/sync/gib_per_second"] = sync.num_bytes / sync.seconds / (1 << 30)
    return metrics


def _pool(lengths: np.ndarray, reasons: Sequence[str]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return {
        "darts/pool/length_mean": float(lengths.mean()),
        "darts/pool/length_p50": float(p50),
        "darts/pool/length_p90": float(p90),
        "darts/pool/length_p99": float(p99),
        "darts/pool/length_max": float(lengths.max()),
        "darts/pool/truncated_ratio": sum(r == FinishReason.LENGTH.value for r in reasons) / len(reasons),
        "darts/pool/aborted_ratio": sum(r == FinishReason.ABORT.value for r in reasons) / len(reasons),
    }


def _budget(record: RolloutRecord) -> dict[str, float]:
    admission, num_groups = record.admission, len(record.admission.num_candidates)
    total = sum(admission.num_candidates)
    metrics = {
        "darts/budget/total": float(total),
        "darts/budget/redundancy": total / (num_groups * record.num_generations),
        "darts/budget/saturated_ratio": admission.saturated / num_groups,
        "darts/budget/mixed_ratio": record.num_mixed / num_groups,
    }
    if admission.rho is not None:
        metrics["darts/budget/rho"] = admission.rho
    return metrics


def _rollout(record: RolloutRecord, lengths: np.ndarray, kept: np.ndarray, aborted: np.ndarray) -> dict[str, float]:
    seconds = record.seconds
    generated = float(sum(sum(s.lengths) - s.num_carried_tokens for s in record.groups))
    metrics = {
        "darts/rollout/seconds": seconds,
        "darts/rollout/generated_tokens": generated,
        "darts/rollout/kept_tokens": float(kept.sum()),
        "darts/rollout/discarded_tokens": float(lengths.sum() - kept.sum()),
        "darts/rollout/aborted_candidates": float(aborted.sum()),
        "darts/rollout/aborted_tokens": float(lengths[aborted].sum()),
        "darts/rollout/resumed_candidates": float(record.num_resumed),
        "darts/rollout/dropped_groups": float(record.num_dropped),
        "darts/rollout/deferred_groups": float(len(record.deferred)),
        "darts/rollout/bubble_ratio": bubble_ratio(record.occupancy),
        "darts/rollout/tokens_per_second": generated / seconds if seconds > 0 else 0.0,
    }
    if record.carries_over:
        metrics["darts/rollout/carried_tokens"] = float(sum(sum(s.lengths) for s in record.deferred))
    return metrics


def _selection(record: RolloutRecord, lengths: np.ndarray, kept: np.ndarray) -> dict[str, float]:
    longest = [max(group.lengths[i] for i in group.selected) for group in record.summaries]
    return {
        "darts/selection/kept_vs_pool_length_ratio": float(kept.mean() / lengths.mean()),
        "darts/selection/kept_longest": float(np.mean(longest)),
    }


def _long_ends(record: RolloutRecord) -> dict[str, float]:
    """Returns the share of groups without aborted candidates, which therefore keep the longest of their pool."""
    groups = [group for group in record.summaries if len(group.lengths) < record.long_end_below]
    if not groups:
        return {}
    whole = [FinishReason.ABORT.value not in group.finish_reasons for group in groups]
    return {"darts/selection/long_end_ratio": sum(whole) / len(whole)}


def _drafts(drafted: DraftCounts) -> dict[str, float]:
    # Each step of a sequence samples one token in addition to the accepted ones.
    steps = drafted.generation_tokens - drafted.num_accepted_tokens
    return {
        "darts/drafts/tokens": drafted.num_draft_tokens,
        "darts/drafts/accepted": drafted.num_accepted_tokens,
        "darts/drafts/accepted_per_step": drafted.num_accepted_tokens / max(1.0, drafted.num_drafts),
        "darts/drafts/step_share": drafted.num_drafts / max(1.0, steps),
    }


def buffer_metrics(rows: BufferedRows, mask_stale_after: int | None) -> dict[str, float]:
    """Returns the metrics of a batch from the buffer."""
    runs = np.array([run for row in rows.ages for run in row], dtype=float).reshape(-1, 2)
    ages, counts = runs[:, 0], runs[:, 1]
    metrics = {f"darts/buffer/{state}": float(count) for state, count in rows.states.items()}
    if rows.is_long is not None:
        metrics["darts/buffer/long_round"] = float(rows.is_long)
    if not len(runs):  # all rows are fillers
        return metrics
    stale = ages > (np.inf if mask_stale_after is None else mask_stale_after)
    return metrics | {
        "darts/staleness/off_policy_share": float(counts[ages > 0].sum() / counts.sum()),
        "darts/staleness/age_mean": float(ages @ counts / counts.sum()),
        "darts/staleness/age_p50": _weighted_quantile(ages, counts, 0.5),
        "darts/staleness/age_p90": _weighted_quantile(ages, counts, 0.9),
        "darts/staleness/age_max": float(ages.max()),
        "darts/staleness/masked_share": float(counts[stale].sum() / counts.sum()),
    }


def _weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    return float(values[order][np.searchsorted(weights[order].cumsum(), share * weights.sum())])


def ratio_metrics(output: Mapping[str, Any], accelerator: Accelerator) -> dict[str, float]:
    """
    Returns statistics of the importance sampling ratios in the output of `_generate_and_score_completions`, over all
    processes: per row in TRL's `sequence_*` modes, per token otherwise. Empty without TRL's correction.
    """
    used = output.get("importance_sampling_ratio")
    if used is None:
        return {}
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    logs = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).double().mul(mask).nan_to_num(nan=0.0)
    if used.shape[1] == 1:
        logs, mask = logs.sum(dim=1, keepdim=True), mask.any(dim=1, keepdim=True)
    ratios, used = logs.clamp(max=MAX_LOG_RATIO).exp()[mask.bool()], used[mask.bool()]
    altered = ~torch.isclose(ratios, used.double(), rtol=1e-3)
    sums = torch.stack([torch.ones_like(ratios), ratios, ratios**2, altered.double()]).sum(dim=1)
    count, total, squares, num_altered = accelerator.gather(sums).view(-1, 4).sum(dim=0).tolist()
    if not count or not squares:
        return {}
    return {
        "darts/staleness/effective_sample_share": total**2 / (count * squares),
        "darts/staleness/chi_square": squares / count - 1,
        "darts/staleness/altered_share": num_altered / count,
    }
