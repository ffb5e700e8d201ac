"""Batches of a rollout without an end, for `rollout_ahead="continuous"`."""

import math
from dataclasses import replace
from typing import Any

from ..engines.batch import PromptBatch
from ..engines.engine import RolloutPlan
from ..scheduling import Admission, Continuous, FreshGroups, RolloutResult
from ..scheduling.continuous import entering
from ..telemetry.metrics import RolloutRecord
from ..training.rows import BufferedRows, Tokens
from .batches import BufferedBatches
from .buffer_source import BufferSource


class ContinuousSource(BufferSource):
    """
    Batches of a rollout without an end, for `rollout_ahead="continuous"`. Prompts enter when a batch was taken; the
    servers get new weights while they decode.
    """

    def __init__(self, trainer: Any, batches: BufferedBatches) -> None:
        super().__init__(trainer, batches, None)
        self._scheduler: Any = None  # on the main process
        self._admission: Any = None  # of the last prompts that entered

    def _next_round(self) -> PromptBatch:
        self.trainer._sync_weights()
        self._start_prompts(self.num_left)
        return self.batches.prompts([])

    def launch_next(self) -> None:
        self._start_prompts(self.num_left - 1)

    def _start_prompts(self, num_left: int) -> None:
        if self.batches.next_round(most=num_left * self.batches.policy.num_groups) is not None:
            self.batches.main.run(self._extend)

    def _extend(self) -> None:
        args = self.trainer.args
        self._admission, plans = self.batches.plan(self.trainer.state.global_step)
        on_group = None
        if self._scheduler is None:
            policies = args.policies(batch_stop=Continuous(), rollout=self.number)
            self._scheduler = self.scheduler(policies, args.num_generations)
            on_group = self.streams.follow_groups(self._data_of)
        plans = entering(plans, args.submit_order)
        prompts = self.batches.prompts([plan.group_id for plan in plans])
        keeps = args.kv_after_update == "keep"
        plan = RolloutPlan(self._admission, plans, self._scheduler, keeps_kv=keeps, on_group=on_group)
        self.trainer._engine.extend(plan, prompts)

    def _data_of(self, entry_id: int) -> tuple[dict[str, Any], Tokens]:
        entry = self.batches.buffer.entries[entry_id]
        return entry.row, entry.tokens

    def plan(self, batch: PromptBatch, ahead: bool = False) -> RolloutPlan:
        """Decides which groups are taken, on the main process."""
        args = self.trainer.args
        due = self.trainer.state.global_step + args.steps_per_batch - args.max_staleness - 1
        takes = FreshGroups(self.batches.policy.num_groups, due)
        return RolloutPlan(self._admission, [], self._scheduler, takes)

    def conclude(
        self, plan: RolloutPlan, result: RolloutResult, batch: PromptBatch
    ) -> list[tuple[BufferedRows, RolloutRecord]]:
        prompts = self.batches.taken(result)
        counts = [len(group.candidates) for group in result.groups]
        saturated = counts.count(self.trainer.args.max_num_generations) if self.trainer.args.over_provisions else 0
        expected = [group.plan.expected_length or math.nan for group in result.groups]
        admission = Admission(counts, saturated, plan.admission.rho, expected)
        return super().conclude(replace(plan, admission=admission), result, prompts)

    def clear(self) -> None:
        self.streams.clear()
        super().clear()
        self._scheduler = None

    def cancel(self) -> None:
        super().cancel()
        self.streams.clear()
        self._scheduler = None
