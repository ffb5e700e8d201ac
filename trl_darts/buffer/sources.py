"""
Where TRL's batches and their completions come from: the data loader, or the rollout buffer.

```
loader ──▶ next ───────────────────────▶ TRL tokenizes ──▶ sample: a rollout ──▶ TRL scores
loader ──▶ next: buffer and rollouts ──▶ TRL tokenizes ──▶ the kept rows ──────▶ TRL scores
```

Every source is used on all processes at once, unless a method says otherwise.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Generic, TypeVar

from accelerate.logging import get_logger

from ..engines.batch import PromptBatch
from ..engines.engine import RolloutPlan
from ..scheduling import (
    Admission,
    Continuous,
    FreshGroups,
    GroupPlan,
    RolloutResult,
    SchedulePolicies,
    Scheduler,
    UniformAdmission,
)
from ..scheduling.continuous import entering
from ..streaming import Streams, decode_completions
from ..telemetry.metrics import RolloutRecord, buffer_metrics
from ..training.rows import BufferedRows, KeptRows
from .batch import Batch, Prompts
from .batches import BufferedBatches
from .feed import PromptFeed, Rows
from .rounds import round_policy
from .scores import GroupScores


logger = get_logger(__name__)

R = TypeVar("R", bound=KeptRows)
Decisions = tuple[Admission, list[GroupPlan], SchedulePolicies]


@dataclass(frozen=True)
class Launched:
    """A rollout that runs ahead of its batch. The plan is on the main process, as in [`Engine.launch`]."""

    batch: PromptBatch
    plan: RolloutPlan | None


class TRLSource:
    """The loader's batches with completions that TRL generates, as in an evaluation with an in-process engine."""

    trains = False
    carries_over = False  # whether unfinished prompts keep their tokens

    def next(self, inputs: Rows) -> Batch:
        """Returns the batch that TRL scores next, given this process's rows of the loader's."""
        return Batch(inputs)

    def sample(self, prompts: Prompts) -> KeptRows | None:
        """Returns completions of a batch that has none yet, or `None` where TRL generates them."""
        return None

    def later_turn(self, prompts: Prompts) -> KeptRows | None:
        """Returns completions in a tool loop, on this process alone, or `None` where TRL generates them."""
        return None

    def clear(self) -> None:
        """Forgets an earlier training."""

    def cancel(self) -> None:
        """Aborts the rollout that was launched ahead, if there is one."""

    def launch_next(self) -> None:
        """Starts the next batch's rollout, where rollouts run ahead of training."""

    def input_of(self, inputs: Rows) -> Callable[[int], dict[str, Any]] | None:
        """Returns the data of a row by its number, for rewards that are computed during the rollout."""
        return None


class RolloutSource(TRLSource, Generic[R]):
    """A source of training batches whose completions come from [`DARTSGRPOTrainer._rollout`]."""

    trains = True

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def number(self) -> int:
        """Index of the batch, over all epochs."""
        number: int = self.trainer._loop.batch
        return number

    @property
    def streams(self) -> Streams:
        """What is computed during a rollout."""
        streams: Streams = self.trainer._streams
        return streams

    def decide(self, batch: PromptBatch, number: int) -> Decisions:
        """Returns what is sampled in rollout `number`, and by which rules. Called on the main process."""
        raise NotImplementedError

    def collect(self, result: RolloutResult, batch: PromptBatch) -> R:
        """Returns the rows of a rollout. Called on the main process."""
        raise NotImplementedError

    def round_ids(self) -> Sequence[int] | None:
        """Returns the buffer's ID of each prompt of the rollout. Called on the main process."""
        return None

    def plan(self, batch: PromptBatch, ahead: bool = False) -> RolloutPlan:
        """Decides before a rollout, on the main process."""
        args = self.trainer.args
        admission, groups, policies = self.decide(batch, self.number + ahead)
        drops = args.on_generation_error == "drop_group"
        scheduler = Scheduler(policies, batch.num_generations, drops, carries_tokens=not args.not_carried)
        return RolloutPlan(admission, groups, scheduler)

    def shares(self, rows: R, batch: PromptBatch) -> list[R]:
        """Returns the rows of each process. Called on the main process."""
        return rows.shares(batch.sizes)

    def conclude(self, plan: RolloutPlan, result: RolloutResult, batch: PromptBatch) -> list[tuple[R, RolloutRecord]]:
        """
        Returns the rows of each process with the record of the rollout, and learns its lengths. Called on the main
        process.
        """
        for reason in result.dropped.values():
            logger.warning(f"{reason}. The group is dropped, and filler rows without loss weight take its place.")
        rows, record = self.collect(result, batch), self.record_of(plan, result, batch)
        self.streams.finish(result, rows.completion_ids)
        # Groups of different prompts teach nothing, and candidates that are carried over have no final length.
        if self.trains and (uniform := [group for group in record.ended if not batch.mixed[group.group_id]]):
            self.trainer._admission.observe(uniform)
        return [(own, record) for own in self.shares(rows, batch)]

    def record_of(self, plan: RolloutPlan, result: RolloutResult, batch: PromptBatch) -> RolloutRecord:
        args, has_tail = self.trainer.args, self.trainer._tail is not None
        long_end_below = args.max_num_generations if args.keeps_long_end else 0
        return RolloutRecord.of(plan.admission, result, batch, self.carries_over, long_end_below, has_tail)

    def log(self, record: RolloutRecord) -> None:
        """Logs a rollout, or all rollouts of a batch as one."""
        trainer = self.trainer
        micro_step = trainer._step % trainer.args.gradient_accumulation_steps
        trainer._log_all(trainer._rollout_log.add(record, trainer.state.global_step, micro_step))

    def later_turn(self, prompts: Prompts) -> KeptRows | None:
        self.trainer._sync_weights()
        rows: KeptRows | None = self.trainer._engine.later_turn(
            PromptBatch.alone(prompts.ids, prompts.num_generations, prompts.images)
        )
        return rows


class LoaderSource(RolloutSource[KeptRows]):
    """The loader's batches, each sampled in its turn."""

    def sample(self, prompts: Prompts) -> KeptRows:
        self.trainer._sync_weights()
        batch = prompts.gather(self.trainer._main.index)
        rows, record = self.trainer._rollout(self, batch)
        self.log(record)
        return rows

    def decide(self, batch: PromptBatch, number: int) -> Decisions:
        trainer, args = self.trainer, self.trainer.args
        admission = trainer._admission.plan(batch.infos)
        placement = trainer._engine.placement(admission, batch)
        policies = args.policies(admission.expected_lengths, placement=placement, rollout=number, tail=trainer._tail)
        return admission, admission.plans(batch.infos), policies

    def collect(self, result: RolloutResult, batch: PromptBatch) -> KeptRows:
        return KeptRows.of_result(result, batch.num_generations)

    def input_of(self, inputs: Rows) -> Callable[[int], dict[str, Any]] | None:
        return inputs.__getitem__


class EvaluationSource(LoaderSource):
    """Evaluation batches on servers: one candidate per row, none of them aborted."""

    trains = False
    streams = Streams()  # none

    def decide(self, batch: PromptBatch, number: int) -> Decisions:
        admission = UniformAdmission(batch.num_generations).plan(batch.infos)
        return admission, admission.plans(batch.infos), SchedulePolicies()

    def record_of(self, plan: RolloutPlan, result: RolloutResult, batch: PromptBatch) -> RolloutRecord:
        return RolloutRecord.of(plan.admission, result, batch)

    def log(self, record: RolloutRecord) -> None:
        self.trainer._rollout_log.drafted()  # drafts of an evaluation do not count
        if record.num_dropped:
            self.trainer._metrics["eval"]["darts/rollout/dropped_groups"].append(float(record.num_dropped))

    def input_of(self, inputs: Rows) -> None:
        return None


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
        self.trainer._log_all(metrics)
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
        next batch at the end of an epoch, nor after the last training step.
        """
        trainer, args = self.trainer, self.trainer.args
        if not args.rollout_ahead or self.num_left <= 1 or (batch := self.batches.next_round(ahead=True)) is None:
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
        policies = args.policies(admission.expected_lengths, batch_stop=stop, rollout=number, tail=trainer._tail)
        return admission, groups, policies

    def collect(self, result: RolloutResult, batch: PromptBatch) -> BufferedRows:
        return self.batches.collect(self.trainer.state.global_step, result)

    def round_ids(self) -> Sequence[int]:
        return self.batches.round_ids

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
        args, ids = self.trainer.args, self.batches.round_ids
        self._admission, plans = self.batches.plan(self.trainer.state.global_step)
        if self._scheduler is None:
            drops = args.on_generation_error == "drop_group"
            policies = args.policies(batch_stop=Continuous())
            self._scheduler = Scheduler(policies, args.num_generations, drops, carries_tokens=not args.not_carried)
        plans = entering(plans, ids, args.submit_order)
        prompts = self.batches.prompts([plan.group_id for plan in plans])
        keeps = args.kv_after_update == "keep"
        self.trainer._engine.extend(RolloutPlan(self._admission, plans, self._scheduler, keeps_kv=keeps), prompts)

    def plan(self, batch: PromptBatch, ahead: bool = False) -> RolloutPlan:
        """Decides which groups are taken, on the main process."""
        args = self.trainer.args
        due = self.trainer.state.global_step + args.steps_per_batch - args.max_staleness - 1
        takes = FreshGroups(self.batches.policy.num_groups, due)
        return RolloutPlan(self._admission, [], self._scheduler, takes)

    def conclude(
        self, plan: RolloutPlan, result: RolloutResult, batch: PromptBatch
    ) -> list[tuple[BufferedRows, RolloutRecord]]:
        result = self.batches.taken(result)
        counts = [len(group.candidates) for group in result.groups]
        saturated = counts.count(self.trainer.args.max_num_generations) if self.trainer.args.over_provisions else 0
        expected = [group.plan.expected_length or math.nan for group in result.groups]
        admission = Admission(counts, saturated, plan.admission.rho, expected)
        prompts = self.batches.prompts(self.batches.round_ids)
        return super().conclude(replace(plan, admission=admission), result, prompts)

    def round_ids(self) -> Sequence[int]:
        return ()

    def clear(self) -> None:
        super().clear()
        self._scheduler = None

    def cancel(self) -> None:
        super().cancel()
        self._scheduler = None


def make_feed(trainer: Any) -> PromptFeed:
    """Returns the order of the data for a schedule."""
    args, loop, num_processes = trainer.args, trainer._loop, trainer.accelerator.num_processes
    trainer = weakref.proxy(trainer)
    return PromptFeed(
        loop,
        [{}] * (args.generation_batch_size // num_processes) if args.buffers_prompts else None,
        endless=args.drop_uniform_groups or args.scores_early or args.is_continuous,
        limit=lambda: loop.num_batches(trainer.state.max_steps) if args.scores_early else math.inf,
    )


def make_batches(trainer: Any, feed: PromptFeed) -> BufferedBatches | None:
    """Returns the batches of a schedule with a rollout buffer."""
    args = trainer.args
    make_policy: Any = partial(round_policy, args, args.generation_batch_size // args.num_generations)
    if make_policy() is None:
        return None
    admission, main, loop = trainer._admission, trainer._main, trainer._loop
    trainer = weakref.proxy(trainer)  # no cycle, see `make_sources`

    def tokenize(prompts: list[Any]) -> tuple[Any, ...]:  # as the trainer does, which may be a subclass
        output: tuple[Any, ...] = trainer._tokenize_prompts(prompts)
        return output

    return BufferedBatches(make_policy, admission, args.num_generations, feed, main, tokenize, loop)


def make_sources(trainer: Any) -> tuple[TRLSource, TRLSource]:
    """Returns the sources of training and of evaluation. Engines in the trainer's process leave evaluation to TRL."""
    args, batches = trainer.args, trainer._batches
    trainer = weakref.proxy(trainer)  # no cycle: connections and threads end with the trainer
    evaluation = EvaluationSource(trainer) if args.uses_servers else TRLSource()
    if batches is None:
        return LoaderSource(trainer), evaluation
    if args.is_continuous:
        return ContinuousSource(trainer, batches), evaluation
    scores = None
    if batches.policy.scores_first or args.stream_rewards:
        decode = partial(decode_completions, trainer)
        scores = GroupScores(trainer, batches, decode, trainer._streams.owners)
    return BufferSource(trainer, batches, scores), evaluation
