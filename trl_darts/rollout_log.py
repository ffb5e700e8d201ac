"""What a training says of its rollouts: metrics in TRL's log stream, and traces in files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .metrics import RolloutRecord, bias_metrics, harvest_metrics, rollout_metrics
from .prompt_rounds import HarvestedRows
from .telemetry.traces import write_trace
from .worth import WorthCheck


class RolloutLog:
    """
    Notes rollouts of the training.

    Args:
        trainer ([`DARTSGRPOTrainer`]):
            Whose rollouts they are.
        worth_check ([`WorthCheck`]):
            Warns where over-provisioning can't pay.
    """

    def __init__(self, trainer: Any, worth_check: WorthCheck) -> None:
        self.trainer = trainer
        self.worth_check = worth_check

    def rollout(self, record: RolloutRecord) -> None:
        """A rollout that is over."""
        trainer = self.trainer
        metrics = rollout_metrics(record)
        if trainer.accelerator.is_main_process:
            self.worth_check.observe(record)
        if trainer.use_vllm and (seconds := trainer.vllm_generation.take_sync_seconds()) is not None:
            metrics["darts/sync/seconds"] = seconds
        self.metrics(metrics)
        if trainer.args.save_rollout_trace and trainer.accelerator.is_main_process:
            # Several rollouts can belong to one optimizer step; the micro-step tells them apart, also after a resume.
            micro_step = trainer._step % trainer.args.gradient_accumulation_steps
            write_trace(Path(trainer.args.output_dir), trainer.state.global_step, micro_step, record)

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
