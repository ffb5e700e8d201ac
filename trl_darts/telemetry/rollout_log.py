"""`RolloutLog` turns rollouts into metrics, traces and warnings."""

from pathlib import Path
from typing import Any

from ..checks import LONG_END_ROLLOUTS, warn_of_cut_long_ends
from ..training.reward_checks import RewardWatch
from .console import RolloutTotals
from .metrics import RolloutRecord, rollout_metrics
from .traces import write_trace


class RolloutLog:
    """Logs the training rollouts of a run. `servers` is TRL's vLLM generation, if there is one."""

    def __init__(self, args: Any, is_main: bool, servers: Any) -> None:
        self.totals = RolloutTotals(sends_adapters=getattr(servers, "sends_adapters", False))
        self._args = args
        self._is_main = is_main
        self._servers = servers
        self._long_ends: list[float] = []

    def begin(self) -> None:
        """Forgets an earlier `train()` call."""
        self._long_ends = []
        self.totals.rewards = RewardWatch()

    def add(self, record: RolloutRecord, step: int, micro_step: int) -> dict[str, float]:
        """Returns the metrics of a rollout. Several belong to one optimizer step; `micro_step` tells them apart."""
        sync = None if self._servers is None else self._servers.pop_sync()
        share = None if self._servers is None else self._servers.pop_share()
        metrics = rollout_metrics(record, sync, self.drafted(), share)
        self.totals.add(metrics)
        ratio = metrics.get("darts/selection/long_end_ratio")
        if ratio is not None and len(self._long_ends) < LONG_END_ROLLOUTS:
            self._long_ends.append(ratio)
            warn_of_cut_long_ends(self._args, self._long_ends)
        if self._args.save_rollout_trace and self._is_main:
            write_trace(Path(self._args.output_dir), step, micro_step, record.groups, record.carried_over)
        return metrics

    def drafted(self) -> Any:
        """Returns what servers drafted since the last call."""
        return None if self._servers is None else self._servers.drafted()
