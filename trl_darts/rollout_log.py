"""What a training says of its rollouts: metrics in TRL's log stream, and traces in files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from .metrics import RolloutRecord, bias_metrics, harvest_metrics, rollout_metrics
from .prompt_rounds import HarvestedRows


class RolloutLog:
    """
    Notes rollouts of the training.

    Args:
        trainer ([`DARTSGRPOTrainer`]):
            Whose rollouts they are.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def rollout(self, record: RolloutRecord) -> None:
        """A rollout that is over."""
        trainer = self.trainer
        metrics = rollout_metrics(record)
        if trainer.use_vllm and (seconds := trainer.vllm_generation.take_sync_seconds()) is not None:
            metrics["darts/sync/seconds"] = seconds
        self.metrics(metrics)
        if trainer.args.save_rollout_trace and trainer.accelerator.is_main_process:
            self._write_trace(record)

    def harvest(self, harvested: HarvestedRows) -> None:
        """A batch that is not the loader's."""
        self.metrics(harvest_metrics(harvested, self.trainer.args.mask_stale_after))

    def bias(self, record: RolloutRecord, first_rows: Mapping[int, int], rewards_per_func: torch.Tensor) -> None:
        """
        What was kept of a rollout, beside what was not.

        Args:
            record ([`RolloutRecord`]):
                The rollout.
            first_rows (`Mapping[int, int]`):
                See [`bias_metrics`].
            rewards_per_func (`torch.Tensor` of shape `(N·M, F)`):
                Rewards over all processes, NaN for none.
        """
        rewards = (rewards_per_func * self.trainer.reward_weights.to(rewards_per_func.device)).nansum(dim=1)
        rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
        self.metrics(bias_metrics(record, first_rows, rewards.tolist()))

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Logged with TRL's own, averaged over a logging step."""
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)

    def _write_trace(self, record: RolloutRecord) -> None:
        args, step = self.trainer.args, self.trainer.state.global_step
        directory = Path(args.output_dir) / "rollouts"
        directory.mkdir(parents=True, exist_ok=True)
        # Several rollouts can belong to one optimizer step; the micro-step tells them apart, also after a resume.
        micro_step = self.trainer._step % args.gradient_accumulation_steps
        trace = pd.DataFrame(record.trace()).assign(step=step)
        trace.to_parquet(directory / f"rollout_{step:05d}_{micro_step:02d}.parquet")
