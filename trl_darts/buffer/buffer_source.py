"""Batches of the rollout buffer, for schedules that choose their prompts or sample ahead."""

import time
from collections.abc import Callable
from functools import reduce
from typing import Any

from ..engines.batch import PromptBatch
from ..scheduling import RolloutResult
from ..telemetry.metrics import RolloutRecord, buffer_metrics
from ..training.rows import BufferedRows
from .batch import Batch
from .batches import BufferedBatches
from .feed import Rows
from .sources import Decisions, Launched, RolloutSource


class BufferSource(RolloutSource[BufferedRows]):
    """Batches of the rollout buffer, for schedules that choose their prompts or sample ahead."""

    def __init__(self, trainer: Any, batches: BufferedBatches, scores: Any) -> None:
        super().__init__(trainer)
        self.batches = batches
        self.scores = scores  # a `GroupScores` where groups are scored before their batch is full
        self.carries_over = batches.buffer.keeps_tokens
        self._launched: Launched | None = None

    def next(self, inputs: Rows) -> Batch:
        """Runs the rollouts that the next batch needs, and takes it from the buffer."""
        args = self.trainer.args
        launched, self._launched = self._launched, None
        batch = self._next_round() if launched is None else launched.batch
        begin = time.perf_counter()
        rows = self._next_rows(batch, launched)
        metrics = buffer_metrics(rows, args.mask_stale_after)
        if args.rollout_ahead:
            metrics["darts/rollout/wait_seconds"] = time.perf_counter() - begin
        if self.batches.policy.scores_first:
            metrics |= self.scores.pop_metrics()
            missing = len(rows.fillers) // args.num_generations
            metrics["darts/uniform/missing" if args.drop_uniform_groups else "darts/deferral/missing"] = missing
        self.trainer._log_all(metrics | self.batches.pop_skip_metrics())
        return self.batches.finish(rows, args.mask_stale_after, self.scores and self.scores.serve)

    def _next_rows(self, batch: PromptBatch | None, launched: Launched | None) -> BufferedRows:
        if batch is not None and not self.batches.policy.scores_first:
            rows, record = self.trainer._rollout(self, batch, launched)
            self.log(record)
            return rows
        self._sample_and_score(batch, launched)
        step = self.trainer.state.global_step
        return self.batches.main.scatter(lambda: self.batches.shares(self.batches.collect(step)))

    def shares(self, rows: BufferedRows, batch: PromptBatch) -> list[BufferedRows]:
        return self.batches.shares(rows)

    def launch_next(self) -> None:
        """
        Starts the next batch's rollout with the current weights; it runs while this batch is trained on. There is no
        next batch after the last training step.
        """
        trainer, args = self.trainer, self.trainer.args
        if not args.rollout_ahead or self.num_left <= 1 or (batch := self.batches.next_round()) is None:
            return
        trainer._sync_weights()
        plan = self.batches.main.run(lambda: self.plan(batch, ahead=True))
        trainer._engine.launch(plan, batch)
        self._launched = Launched(batch, plan)

    @property
    def num_left(self) -> int:
        """Number of batches from the current one to the end of the training."""
        left: int = self.trainer._loop.num_batches(self.trainer.state.max_steps) - self.number
        return left

    def clear(self) -> None:
        self.batches.clear()
        if self.scores is not None:
            self.scores.clear()

    def cancel(self) -> None:
        self._launched = None
        self.trainer._engine.cancel()

    def decide(self, batch: PromptBatch, number: int) -> Decisions:
        trainer, args = self.trainer, self.trainer.args
        admission, groups = self.batches.plan(trainer.state.global_step)
        stop = self.batches.batch_stop
        policies = args.policies(groups, batch_stop=stop, rollout=number, tail=trainer._tail)
        return admission, groups, policies

    def collect(self, result: RolloutResult, batch: PromptBatch) -> BufferedRows:
        return self.batches.collect(self.trainer.state.global_step, result)

    def input_of(self, inputs: Rows) -> Callable[[int], dict[str, Any]]:
        return self.batches.input_of

    def _next_round(self) -> PromptBatch | None:
        batch = self.batches.next_round()
        if batch is not None:
            self.trainer._sync_weights()
        return batch

    def _sample_and_score(self, batch: PromptBatch | None, launched: Launched | None) -> None:
        """Runs rollouts until the batch has its groups with a spread of rewards, or no more may be sampled for it."""
        records: list[RolloutRecord] = []
        while batch is not None:
            records.append(self.trainer._rollout(self, batch, launched)[1])
            self.scores.judge(is_last=self.num_left <= 1)
            batch, launched = self._next_round(), None
        if records:
            self.log(reduce(RolloutRecord.then, records))
