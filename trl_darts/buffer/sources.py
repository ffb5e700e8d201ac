"""
Where TRL's batches and their completions come from: the data loader, or the rollout buffer.

```
loader ──▶ next ───────────────────────▶ TRL tokenizes ──▶ sample: a rollout ──▶ TRL scores
loader ──▶ next: buffer and rollouts ──▶ TRL tokenizes ──▶ the kept rows ──────▶ TRL scores
```

Every source is used on all processes at once, unless a method says otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from accelerate.logging import get_logger

from ..engines.batch import PromptBatch
from ..engines.engine import OnProgress, RolloutPlan
from ..scheduling import (
    Admission,
    GroupPlan,
    RolloutResult,
    SchedulePolicies,
    Scheduler,
    UniformAdmission,
)
from ..streaming import Streams
from ..telemetry.metrics import RolloutRecord
from ..training.rows import KeptRows
from .batch import Batch, Prompts
from .feed import Rows


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

    def plan(self, batch: PromptBatch, ahead: bool = False) -> RolloutPlan:
        """Decides before a rollout, on the main process."""
        admission, groups, policies = self.decide(batch, self.number + ahead)
        reuse = self.trainer._reuse if self.trains else None
        return RolloutPlan(admission, groups, self.scheduler(policies, batch.num_generations), reuse=reuse)

    def run(
        self, plan: Any, batch: PromptBatch, on_progress: OnProgress | None, meanwhile: Callable[[], None] | None
    ) -> RolloutResult | None:
        """Runs a rollout, see [`Engine.run`]."""
        result: RolloutResult | None = self.trainer._engine.run(plan, batch, on_progress, meanwhile)
        return result

    def scheduler(self, policies: SchedulePolicies, num_generations: int) -> Scheduler:
        """Returns what decides during a rollout. Called on the main process."""
        args = self.trainer.args
        drops = args.on_generation_error == "drop_group"
        return Scheduler(policies, num_generations, drops, carries_tokens=not args.not_carried)

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
        if self.trains and (uniform := [g for g in record.ended if not batch.mixed[batch.places[g.group_id]]]):
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
        if trainer._reuse is not None:
            trainer._log_all(trainer._reuse.tally.pop_metrics())

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
        groups = admission.plans(batch.infos)
        policies = args.policies(groups, placement=placement, rollout=number, tail=trainer._tail)
        return admission, groups, policies

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
