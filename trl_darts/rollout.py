"""
One rollout from the trainer's side: admission on the main process, decoding wherever the engine is, the same rows on
every process.

```
rows of all processes ──▶ PromptBatch ──▶ admission (main process) ──▶ scheduler ──▶ kept rows, record
        gather                            M'_i per prompt                on the main process; candidates decode on
                                                                         servers, or on all processes
```
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

from accelerate import Accelerator

from .distributed import Agreement, PromptBatch
from .engines.vllm_rollout import Overrides, ServerPrompt
from .engines.vllm_server import VLLMServerEngine
from .in_process import Decode, InProcessRollout
from .metrics import RolloutRecord
from .progress import RolloutProgress
from .prompt_rounds import HarvestedRows, PromptRounds
from .rows import KeptRows, Tokens
from .scheduling import (
    Admission,
    AdmissionPolicy,
    BatchStop,
    GroupPlan,
    GroupSummary,
    LeastLoaded,
    Occupancy,
    Placement,
    RolloutResult,
    SchedulePolicies,
    Scheduler,
    ScheduleSettings,
    UniformAdmission,
)
from .streaming.streams import Streams


logger = logging.getLogger(__name__)

AnyRows = TypeVar("AnyRows", KeptRows, HarvestedRows)


class Turn(Enum):
    """What a call for completions is for. Only the first turn of training is over-provisioned."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    LATER = "later"  # a tool loop goes on: each process for itself, and not equally often


class RolloutConductor:
    """
    Runs a trainer's rollouts.

    Args:
        accelerator (`Accelerator`):
            The trainer's.
        settings ([`ScheduleSettings`]):
            Of the schedule; a rollout's policies are made of them.
        admission ([`AdmissionPolicy`]):
            Candidates per prompt. Used and taught on the main process only.
        num_generations (`int`):
            M, rows per prompt in training.
        show_progress (`bool`, *optional*, defaults to `True`):
            Whether to show a line while a rollout runs.
        drop_failed_groups (`bool`, *optional*, defaults to `False`):
            Whether a rollout on servers goes on without a group that can't be completed. Another one is repeated in
            its place; see [`KeptRows`]. The later turns of a tool loop fail all the same.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        settings: ScheduleSettings,
        admission: AdmissionPolicy,
        num_generations: int,
        show_progress: bool = True,
        drop_failed_groups: bool = False,
    ) -> None:
        self.accelerator = accelerator
        self.settings = settings
        self.admission = admission
        self.num_generations = num_generations
        self.show_progress = show_progress
        self.drop_failed_groups = drop_failed_groups
        self.turn: Turn | None = None  # `None` where a user's own `rollout_func` asks for completions
        self.record: RolloutRecord | None = None  # of the last rollout of training, on every process
        self.streams = Streams()  # set by the trainer where something is done while candidates decode
        self.rounds: PromptRounds | None = None  # set by the trainer where the schedule chooses the prompts
        self.repeats: dict[int, int] = {}  # of the last rollout, on every process
        self.overrides: Overrides | None = None  # further request fields per candidate: benchmarks replay lengths
        self.agree = Agreement(accelerator)
        self._num_rollouts = 0

    @contextmanager
    def during(self, turn: Turn) -> Iterator[None]:
        """Inside, rollouts are for this turn."""
        self.turn = turn
        if turn is not Turn.LATER:
            self.repeats = {}
        try:
            yield
        finally:
            self.turn = None

    def gather(
        self,
        prompt_rows: Sequence[Tokens],
        images: Sequence[Sequence[Any] | None] | None,
        multimodal_fields: Mapping[str, Any],
        num_generations: int,
    ) -> PromptBatch:
        """The batch over all processes. Called on every process at once; see [`PromptBatch`]."""
        return PromptBatch.gather(
            prompt_rows, images, bool(multimodal_fields), num_generations, self.accelerator.process_index
        )

    def on_servers(
        self,
        engine: VLLMServerEngine,
        prompts: Sequence[Sequence[ServerPrompt]],
        batch: PromptBatch,
        body: Mapping[str, Any],
        overrides: Overrides | None = None,
    ) -> tuple[KeptRows | HarvestedRows, RolloutRecord]:
        """
        Runs a rollout on vLLM servers. Called on the process that the engine belongs to.

        Args:
            engine ([`VLLMServerEngine`]):
                The servers.
            prompts (`Sequence[Sequence[ServerPrompt]]` of shape `(N, 1)` or `(N, M)`):
                The prompt of each group, or of each of its rows where they differ.
            batch ([`PromptBatch`]):
                What the prompts belong to.
            body (`Mapping[str, Any]`):
                Fields of the completion requests.
            overrides (`Callable`, *optional*):
                Gives more fields for one candidate.

        Returns:
            `tuple[KeptRows, RolloutRecord]`: What is trained on, and what is known of the rest.
        """
        rounds = self.rounds if self.turn is Turn.TRAINING else None
        admission, plans = self.plan(batch) if rounds is None else rounds.begin()
        batch_stop = None if rounds is None else rounds.round.batch_stop
        policies = self.policies_now(admission.expected_lengths, batch_stop)
        drops = self.drop_failed_groups and self.turn is not Turn.LATER
        scheduler = Scheduler(policies, batch.num_generations, drops)
        streams = self.streams if self.turn is Turn.TRAINING else Streams()
        with self.progress() as progress:
            watch = streams.watch(scheduler, [group[0].tokens for group in prompts], progress)
            result = engine.run(scheduler, plans, prompts, body, overrides or self.overrides, watch)
        for words in result.dropped.values():
            logger.warning(
                "%s. The group is dropped, and another one is repeated in its place, without weight.", words
            )
        rows = KeptRows.of_result(result, batch.num_generations) if rounds is None else rounds.end(result)
        streams.finish(result, None if rounds is None else rows.kept.completion_ids)
        return rows, self.conclude(admission, result, batch)

    def in_process(self, batch: PromptBatch, decode: Decode, engine_size: int = 1, group: Any = None) -> KeptRows:
        """
        Runs a rollout on all processes, each decoding a share of the candidates. Called on every process at once.

        Candidates are spread so that all processes are expected to end together. They stay with the rows that they
        are for where there are no more of them than rows, as TRL has it, or where something else than tokens goes
        with them.

        Args:
            batch ([`PromptBatch`]):
                The prompts.
            decode (`Callable[[Share, list[Slot]], None]`):
                Decodes a share until nothing of it runs. Its second argument are the candidates whose prompts this
                process is to bring.
            engine_size (`int`, *optional*, defaults to `1`):
                Processes that decode one share together (tensor parallelism): neighbours.
            group (`torch.distributed.ProcessGroup`, *optional*):
                The group of those processes.

        Returns:
            [`KeptRows`]: Rows of this process.

        Raises:
            [`GenerationError`]: If a process can't decode its share. Raised on every process.
        """
        self._num_rollouts += 1
        rollout = InProcessRollout(self, batch, engine_size, group, self._num_rollouts)
        rows, self.record = rollout.run(decode)
        return rows

    def share(self, compute: Callable[[], tuple[AnyRows, RolloutRecord]]) -> AnyRows:
        """
        Computes on the main process; every process gets the rows, remembers the record, or raises the error.

        Args:
            compute (`Callable`):
                The rollout.

        Returns:
            [`KeptRows`] or [`HarvestedRows`]: The rows of the whole batch.
        """
        streams = self.streams if self.turn is Turn.TRAINING else Streams()
        rows, self.record = self.agree(compute, streams.follow if streams else None)
        if streams and not self.accelerator.is_main_process:
            streams.follow()
        self.repeats = rows.repeats
        return rows

    # Common to all ways of decoding

    def plan(self, batch: PromptBatch) -> tuple[Admission, list[GroupPlan]]:
        """How many candidates each prompt gets."""
        infos = batch.infos
        training = self.turn is Turn.TRAINING
        admission = (self.admission if training else UniformAdmission(batch.num_generations)).plan(infos)
        return admission, admission.plans(infos)

    def policies_now(
        self,
        expected_lengths: Sequence[float] | None = None,
        batch_stop: BatchStop | None = None,
        placement: Placement | None = None,
    ) -> SchedulePolicies:
        """The decisions for this turn."""
        if self.turn is Turn.TRAINING:
            return self.settings.policies(expected_lengths, batch_stop, placement)
        return SchedulePolicies(placement=placement or LeastLoaded())

    def conclude(self, admission: Admission, result: RolloutResult, batch: PromptBatch) -> RolloutRecord:
        """The record of a rollout, and what is learned from it: nothing from groups of different prompts."""
        summaries = [GroupSummary.of(group) for group in result.groups]
        deferred = [GroupSummary.of(group) for group in result.deferred]
        mixed, carries_over = batch.mixed, self.rounds is not None and self.rounds.buffer.keeps_tokens
        record = RolloutRecord(
            admission,
            summaries,
            Occupancy.of(result),
            batch.num_generations,
            num_mixed=sum(mixed),
            num_resumed=result.num_resumed,
            num_dropped=len(result.dropped),
            deferred=deferred,
            carries_over=carries_over,
        )
        # What goes on is learned from once it has come to its end.
        uniform = [summary for summary in record.ended if not mixed[summary.group_id]]
        if self.turn is Turn.TRAINING and uniform:
            self.admission.observe(uniform)
        return record

    def progress(self) -> RolloutProgress:
        """A line that shows how far the rollout is, on the main process."""
        return RolloutProgress(self.show_progress and self.accelerator.is_main_process)
