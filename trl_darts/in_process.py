"""One rollout that the processes of the training decode themselves, each a share of the candidates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from .distributed import (
    DirectLink,
    Director,
    FollowingLink,
    MainLink,
    PromptBatch,
    RemoteLink,
    Share,
    Slot,
)
from .errors import GenerationError
from .metrics import RolloutRecord
from .rows import KeptRows
from .scheduling import Admission, AssignedPlacement, Scheduler, balance


if TYPE_CHECKING:
    from .rollout import RolloutConductor

Decode = Callable[[Share, list[Slot]], None]


@dataclass(frozen=True)
class _Start:
    """How a rollout begins: which candidates each process feeds to its engine."""

    feeds: list[list[Slot]]
    needs_progress: bool


class InProcessRollout:
    """
    A rollout on all processes.

    Args:
        conductor ([`RolloutConductor`]):
            Whose rollout it is.
        batch ([`PromptBatch`]):
            The prompts.
        engine_size (`int`):
            Processes that decode one share together (tensor parallelism): neighbours.
        group (`torch.distributed.ProcessGroup` or `None`):
            The group of those processes.
        number (`int`):
            Of this rollout, the same on every process.
    """

    def __init__(
        self, conductor: "RolloutConductor", batch: PromptBatch, engine_size: int, group: Any, number: int
    ) -> None:
        self.conductor = conductor
        self.agree = conductor.agree
        self.batch = batch
        self.engine_size = engine_size
        self.group = group
        self.number = number
        self.director: Director | None = None  # of the main process, like the next one
        self.admission: Admission | None = None

    def run(self, decode: Decode) -> tuple[KeptRows, RolloutRecord]:
        """Decodes a share here, and returns the rows of this process; see `RolloutConductor.in_process`."""
        me = self.conductor.accelerator.process_index
        start: _Start = self.agree(self._start)
        first = me - me % self.engine_size
        slots = [slot for feed in start.feeds[first : first + self.engine_size] for slot in feed]
        link = self._link()
        following = link if self.group is None else FollowingLink(link if me == first else None, first, self.group)
        with self.conductor.progress() as progress:
            director = self.director
            watch = None if director is None else lambda: progress(director.scheduler.ledger)
            share = Share(slots, following, start.needs_progress, watch)
            try:
                decode(share, start.feeds[me])
                if share.running:
                    raise GenerationError(f"The engine left {len(share.running)} candidates without an end.")
                share.exchange()
            except Exception as error:
                self._give_up(link, error)
                raise
        kept, record = self.agree(lambda: self._end(link))
        return self._collect(kept, share, leader=me == first)[self.batch.mine], record

    def _start(self) -> _Start:
        batch, size = self.batch, self.engine_size
        self.admission, plans = self.conductor.plan(batch)
        counts, num_engines = self.admission.num_candidates, len(batch.sizes) // size
        owners = batch.owners
        homes = [[owners[batch.row_of(g, i)] for i in range(count)] for g, count in enumerate(counts)]
        if batch.multimodal or sum(counts) == len(batch.rows):
            engines, lengths = [[home // size for home in group] for group in homes], None
        else:
            ranked = self.conductor.settings.length_ranked
            lengths = (self.admission.expected_lengths if ranked else None) or [1.0] * len(counts)
            engines = balance(counts, lengths, num_engines)
        placement = AssignedPlacement([[str(engine) for engine in group] for group in engines], lengths)
        policies = self.conductor.policies_now(placement=placement)
        scheduler = Scheduler(policies, batch.num_generations)
        self.director = Director(scheduler, plans, num_engines)
        feeds: list[list[Slot]] = [[] for _ in batch.sizes]
        for engine, slots in enumerate(self.director.slots):
            for slot in slots:
                home = homes[slot.group_id][slot.index]
                feeds[home if batch.multimodal else engine * size].append(slot)
        return _Start(feeds, scheduler.needs_progress)

    def _link(self) -> DirectLink | MainLink | RemoteLink:
        num_processes = self.conductor.accelerator.num_processes
        if num_processes == 1:
            return DirectLink(self.director)
        mailbox = self.agree.mailbox
        if self.director is None:
            return RemoteLink(mailbox, self.number)
        return MainLink(self.director, mailbox, self.number, range(0, num_processes, self.engine_size))

    def _give_up(self, link: DirectLink | MainLink | RemoteLink, error: Exception) -> None:
        """Tells the other processes, so that none waits for this one."""
        if isinstance(link, DirectLink):
            return
        link.fail(error)
        if isinstance(link, MainLink):
            self.agree.break_off(error)

    def _end(self, link: DirectLink | MainLink | RemoteLink) -> tuple[list[int], RolloutRecord]:
        if isinstance(link, MainLink):
            link.wait()
        result = self.director.result()
        kept = [row.candidate_id for group in result.groups for row in group.rows]
        return kept, self.conductor.conclude(self.admission, result, self.batch)

    def _collect(self, kept: Sequence[int], share: Share, leader: bool) -> KeptRows:
        wanted = set(kept)
        mine = {number: row for number, row in share.rows.items() if number in wanted} if leader else {}
        rows = {number: row for part in gather_object([mine]) for number, row in part.items()}
        return KeptRows.of([rows[number] for number in kept])
