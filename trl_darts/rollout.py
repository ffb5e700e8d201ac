"""
One rollout from the trainer's side: admission on the main process, decoding wherever the engine is, the same rows on
every process.

```
rows of all processes ──▶ PromptBatch ──▶ admission (main process) ──▶ scheduler ──▶ kept rows, record
        gather                            M'_i per prompt                on the main process; candidates decode on
                                                                         servers, or on all processes
```
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from .distributed import (
    Agreement,
    DirectLink,
    Director,
    FollowingLink,
    MainLink,
    PromptBatch,
    RemoteLink,
    Share,
    Slot,
)
from .engines.vllm_rollout import Overrides, ServerPrompt
from .engines.vllm_server import VLLMServerEngine
from .errors import GenerationError
from .metrics import RolloutRecord
from .progress import RolloutProgress
from .scheduling import (
    Admission,
    AdmissionPolicy,
    AssignedPlacement,
    GroupPlan,
    GroupSummary,
    LongestFirst,
    Occupancy,
    RolloutResult,
    SchedulePolicies,
    Scheduler,
    UniformAdmission,
    balance,
    known_lengths,
)


Tokens = list[int]
Decode = Callable[[Share, list[Slot]], None]


class Turn(Enum):
    """What a call for completions is for. Only the first turn of training is over-provisioned."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    LATER = "later"  # a tool loop goes on: each process for itself, and not equally often


@dataclass
class KeptRows:
    """The rows that TRL trains on, group by group; `logprobs` is `None` where the engine gives none."""

    completion_ids: list[Tokens]  # (N·M, ≤ max_completion_length)
    logprobs: list[list[float]] | None

    @classmethod
    def of(cls, rows: Sequence[tuple[Tokens, list[float] | None]]) -> "KeptRows":
        """From tokens and log-probs of each row."""
        given = all(logprobs is not None for _, logprobs in rows)
        return cls([tokens for tokens, _ in rows], [logprobs or [] for _, logprobs in rows] if given else None)

    def __getitem__(self, rows: slice) -> "KeptRows":
        return KeptRows(self.completion_ids[rows], None if self.logprobs is None else self.logprobs[rows])


@dataclass(frozen=True)
class _Start:
    """How a rollout begins: which candidates each process feeds to its engine."""

    feeds: list[list[Slot]]
    needs_progress: bool


class RolloutConductor:
    """
    Runs a trainer's rollouts.

    Args:
        accelerator (`Accelerator`):
            The trainer's.
        policies ([`SchedulePolicies`]):
            The schedule's decisions.
        admission ([`AdmissionPolicy`]):
            Candidates per prompt. Used and taught on the main process only.
        num_generations (`int`):
            M, rows per prompt in training.
        show_progress (`bool`, *optional*, defaults to `True`):
            Whether to show a line while a rollout runs.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        policies: SchedulePolicies,
        admission: AdmissionPolicy,
        num_generations: int,
        show_progress: bool = True,
    ) -> None:
        self.accelerator = accelerator
        self.policies = policies
        self.admission = admission
        self.num_generations = num_generations
        self.show_progress = show_progress
        self.turn: Turn | None = None  # `None` where a user's own `rollout_func` asks for completions
        self.record: RolloutRecord | None = None  # of the last rollout of training, on every process
        self.overrides: Overrides | None = None  # further request fields per candidate: benchmarks replay lengths
        self.agree = Agreement(accelerator)
        self._num_rollouts = 0

    @contextmanager
    def during(self, turn: Turn) -> Iterator[None]:
        """Inside, rollouts are for this turn."""
        self.turn = turn
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
    ) -> tuple[KeptRows, RolloutRecord]:
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
        admission, plans = self._plan(batch)
        policies = self._policies()
        if admission.expected_lengths is not None:
            policies = replace(policies, placement=LongestFirst(admission.expected_lengths))
        scheduler = Scheduler(policies, batch.num_generations)
        with self._progress() as progress:
            result = engine.run(scheduler, plans, prompts, body, overrides or self.overrides, progress)
        record = self._conclude(admission, result, batch)
        return KeptRows.of([(row.tokens, row.logprobs) for group in result.groups for row in group.rows]), record

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
        me = self.accelerator.process_index
        state: dict[str, Any] = {}  # of the main process
        start: _Start = self.agree(lambda: self._start(batch, engine_size, state))
        first = me - me % engine_size
        slots = [slot for feed in start.feeds[first : first + engine_size] for slot in feed]
        link = self._link(state.get("director"), engine_size)
        following = link if group is None else FollowingLink(link if me == first else None, first, group)
        with self._progress() as progress:
            watch = (lambda: progress(state["director"].scheduler.ledger)) if state else None
            share = Share(slots, following, start.needs_progress, watch)
            try:
                decode(share, start.feeds[me])
                if share.running:
                    raise GenerationError(f"The engine left {len(share.running)} candidates without an end.")
                share.exchange()
            except Exception as error:
                self._give_up(link, error)
                raise
        kept, record = self.agree(lambda: self._end(link, batch, state))
        self.record = record
        return self._collect(kept, share, leader=me == first)[batch.mine]

    def share(self, compute: Callable[[], tuple[KeptRows, RolloutRecord]]) -> KeptRows:
        """
        Computes on the main process; every process gets the rows, remembers the record, or raises the error.

        Args:
            compute (`Callable`):
                The rollout.

        Returns:
            [`KeptRows`]: The rows of the whole batch.
        """
        rows, record = self.agree(compute)
        self.record = record if self.turn is Turn.TRAINING else None
        return rows

    # A rollout on all processes

    def _start(self, batch: PromptBatch, engine_size: int, state: dict[str, Any]) -> _Start:
        admission, plans = self._plan(batch)
        counts, num_engines = admission.num_candidates, len(batch.sizes) // engine_size
        owners = batch.owners
        homes = [[owners[batch.row_of(g, i)] for i in range(count)] for g, count in enumerate(counts)]
        if batch.multimodal or sum(counts) == len(batch.rows):
            engines, lengths = [[home // engine_size for home in group] for group in homes], None
        else:
            lengths = admission.expected_lengths or [1.0] * len(counts)
            engines = balance(counts, lengths, num_engines)
        placement = AssignedPlacement([[str(engine) for engine in group] for group in engines], lengths)
        scheduler = Scheduler(replace(self._policies(), placement=placement), batch.num_generations)
        director = Director(scheduler, plans, num_engines)
        state.update(director=director, admission=admission)
        feeds: list[list[Slot]] = [[] for _ in batch.sizes]
        for engine, slots in enumerate(director.slots):
            for slot in slots:
                home = homes[slot.group_id][slot.index]
                feeds[home if batch.multimodal else engine * engine_size].append(slot)
        return _Start(feeds, scheduler.needs_progress)

    def _link(self, director: Director | None, engine_size: int) -> DirectLink | MainLink | RemoteLink:
        num_processes = self.accelerator.num_processes
        if num_processes == 1:
            return DirectLink(director)
        mailbox = self.agree.mailbox
        if director is None:
            return RemoteLink(mailbox, self._num_rollouts)
        return MainLink(director, mailbox, self._num_rollouts, range(0, num_processes, engine_size))

    def _give_up(self, link: DirectLink | MainLink | RemoteLink, error: Exception) -> None:
        """Tells the other processes, so that none waits for this one."""
        if isinstance(link, DirectLink):
            return
        link.fail(error)
        if isinstance(link, MainLink):
            self.agree.break_off(error)

    def _end(
        self, link: DirectLink | MainLink | RemoteLink, batch: PromptBatch, state: dict[str, Any]
    ) -> tuple[list[int], RolloutRecord]:
        if isinstance(link, MainLink):
            link.wait()
        result = state["director"].result()
        kept = [row.candidate_id for group in result.groups for row in group.rows]
        return kept, self._conclude(state["admission"], result, batch)

    def _collect(self, kept: Sequence[int], share: Share, leader: bool) -> KeptRows:
        wanted = set(kept)
        mine = {number: row for number, row in share.rows.items() if number in wanted} if leader else {}
        rows = {number: row for part in gather_object([mine]) for number, row in part.items()}
        return KeptRows.of([rows[number] for number in kept])

    # Common to all

    def _plan(self, batch: PromptBatch) -> tuple[Admission, list[GroupPlan]]:
        infos = batch.infos
        training = self.turn is Turn.TRAINING
        admission = (self.admission if training else UniformAdmission(batch.num_generations)).plan(infos)
        lengths = admission.expected_lengths
        expected = [None] * len(infos) if lengths is None else known_lengths(lengths)
        plans = [
            GroupPlan(index, count, info.key, info.num_tokens, expected_length=length)
            for index, (info, count, length) in enumerate(zip(infos, admission.num_candidates, expected, strict=True))
        ]
        return admission, plans

    def _policies(self) -> SchedulePolicies:
        return self.policies if self.turn is Turn.TRAINING else SchedulePolicies()

    def _conclude(self, admission: Admission, result: RolloutResult, batch: PromptBatch) -> RolloutRecord:
        """The record of a rollout, and what is learned from it: nothing from groups of different prompts."""
        summaries = [GroupSummary.of(group) for group in result.groups]
        mixed = batch.mixed
        record = RolloutRecord(
            admission, summaries, Occupancy.of(result), batch.num_generations, sum(mixed), result.num_resumed
        )
        uniform = [summary for summary in summaries if not mixed[summary.group_id]]
        if self.turn is Turn.TRAINING and uniform:
            self.admission.observe(uniform, record.seconds)
        return record

    def _progress(self) -> RolloutProgress:
        return RolloutProgress(self.show_progress and self.accelerator.is_main_process)
