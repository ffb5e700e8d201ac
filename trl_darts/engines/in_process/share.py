"""
A process's share of a rollout that the trainer's own processes decode, and its link to the scheduler.

```
Share ──reports──▶ MainLink (scheduler)                                on the main process
      ◀──aborts──
Share ──reports──▶ RemoteLink ──mailbox──▶ MainLink's thread           on the others
      ◀──aborts──             ◀──mailbox──
```

The scheduler on the main process decides for all. It gets lengths and ends; tokens stay on the process that decodes
them until the rollout has ended. No collective is involved: a process does not wait for those that decode longer
answers, and a model whose forward pass is a collective is not disturbed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import GenerationError
from ...scheduling import (
    Abort,
    CandidateEnded,
    CandidateFailed,
    Command,
    EngineLoad,
    FinishReason,
    GroupPlan,
    RolloutResult,
    Scheduler,
    Submit,
    TokensArrived,
)
from ..mailbox import POLL_S, Mailbox


# Processes that decode one batch together must abort in the same step. The broadcast takes about a millisecond.
BROADCAST_INTERVAL = 8

Row = tuple[list[int], list[float] | None]  # tokens and log-probs


@dataclass(frozen=True, slots=True)
class Slot:
    """Identifies a candidate on the process that decodes it."""

    candidate_id: int
    group_id: int
    index: int


@dataclass(frozen=True, slots=True)
class Report:
    """Progress of a candidate. `finish_reason` is set once it has ended, and `error` if it can't be decoded."""

    candidate_id: int
    length: int
    finish_reason: FinishReason | None = None
    error: str | None = None


class Link(Protocol):
    """Connects a share to the scheduler."""

    def exchange(self, reports: Sequence[Report]) -> Sequence[int]:
        """Sends reports and returns the IDs of candidates to abort. Does not wait for either."""


class Share:
    """
    The candidates that one process decodes.

    The engine reports progress and ends, calls `exchange` after each step, and aborts the candidates that it returns,
    until `running` is empty. Each aborted candidate must be ended with `FinishReason.ABORT`.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        link: Link,
        needs_progress: bool,
        on_exchange: Callable[[], None] | None = None,
        rollout: tuple[int, ...] = (),
    ) -> None:
        self.slots = list(slots)
        self.needs_progress = needs_progress
        self.running = {slot.candidate_id for slot in slots}
        self.rows: dict[int, Row] = {}  # by candidate ID, also of aborted ones
        self.rollout = rollout  # see `RolloutSeed`, the same on all processes
        self._link = link
        self._on_exchange = on_exchange
        self._reports: list[Report] = []

    def progress(self, candidate_id: int, length: int) -> None:
        self._reports.append(Report(candidate_id, length))

    def end(
        self, candidate_id: int, tokens: list[int], logprobs: list[float] | None, finish_reason: FinishReason
    ) -> None:
        """Ends a running candidate with all its tokens, and its log-probs if the engine returns any."""
        self.running.remove(candidate_id)
        self.rows[candidate_id] = (tokens, logprobs)
        self._reports.append(Report(candidate_id, len(tokens), finish_reason))

    def fail(self, candidate_id: int, error: str) -> None:
        """Ends a running candidate that can't be decoded, with the engine's message."""
        self.running.remove(candidate_id)
        self._reports.append(Report(candidate_id, 0, error=error))

    def exchange(self) -> list[int]:
        """Sends the reports since the last call, and returns the IDs of running candidates to abort."""
        reports, self._reports = self._reports, []
        aborts = self._link.exchange(reports)
        if self._on_exchange is not None:
            self._on_exchange()
        return [candidate_id for candidate_id in aborts if candidate_id in self.running]


class MainLink:
    """
    The link of the main process, which runs the scheduler. It passes the reports of all processes to the scheduler,
    and sends its aborts to them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        leaders: Sequence[int] = (0,),
        mailbox: Mailbox | None = None,
        rollout: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.slots: list[list[Slot]] = [[] for _ in leaders]  # by engine, in the order of submission
        self._leaders = leaders  # process of each engine that exchanges its reports and aborts
        self._mailbox: Any = mailbox
        self._rollout = rollout
        self._lock = threading.Lock()
        self._own_aborts: list[int] = []  # for this process
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        for command in scheduler.start(plans, [EngineLoad(str(i)) for i in range(len(leaders))], time.perf_counter()):
            if isinstance(command, Submit):
                slot = Slot(command.candidate_id, command.group_id, command.index)
                self.slots[int(command.engine_id)].append(slot)

    def listen(self) -> None:
        """Starts to handle the reports of other processes, if there are any."""
        if self._mailbox is not None:
            self._thread = threading.Thread(target=self._listen, name="trl_darts-main-link", daemon=True)
            self._thread.start()

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """See [`Link`]. Raises the error of another process, or of the scheduler."""
        if reports:
            self._handle_and_send(reports)
        if self._error is not None:
            raise self._error
        with self._lock:
            aborts, self._own_aborts = self._own_aborts, []
        return aborts

    def handle(self, reports: Sequence[Report]) -> list[tuple[int, int]]:
        """Passes reports to the scheduler. Returns engine and candidate ID of each candidate to abort."""
        now = time.perf_counter()
        commands: list[Command] = []
        for report in reports:
            commands += self.scheduler.handle(self._event(report, now))
        if late := next((c for c in commands if isinstance(c, Submit)), None):
            raise GenerationError(
                f"The schedule wants to start candidate {late.candidate_id} during the rollout, but an engine in the "
                "trainer's process starts all candidates at the beginning. Use a vLLM server."
            )
        return [(int(c.engine_id), c.candidate_id) for c in commands if isinstance(c, Abort)]

    def result(self) -> RolloutResult:
        """Waits until all processes have ended their candidates. The result has a zero in place of each token."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.scheduler.result()

    def fail(self, error: BaseException) -> None:
        """Ends the rollout on all processes with an error."""
        if self._mailbox is None:
            return
        for process in self._leaders:
            if process != self._mailbox.process_index:
                self._mailbox.post(process, (self._rollout, _message_of(error)))
        self._finished.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()  # the mailbox has one reader at a time

    def _listen(self) -> None:
        try:
            while not self._finished.is_set():
                for reports in _receive(self._mailbox, self._rollout):
                    self._handle_and_send(reports)
                self._finished.wait(POLL_S)
        except Exception as error:  # the main thread raises it with its next exchange
            self._error = error
            self.fail(error)

    def _handle_and_send(self, reports: Sequence[Report]) -> None:
        with self._lock:
            aborts: dict[int, list[int]] = {}
            for engine, candidate_id in self.handle(reports):
                aborts.setdefault(self._leaders[engine], []).append(candidate_id)
            self._own_aborts += aborts.pop(0, [])
            done = self.scheduler.done
        for process, candidate_ids in aborts.items():
            self._mailbox.post(process, (self._rollout, candidate_ids))
        if done:
            self._finished.set()

    def _event(self, report: Report, now: float) -> TokensArrived | CandidateEnded | CandidateFailed:
        candidate = self.scheduler.ledger.find(report.candidate_id)
        assert candidate is not None  # groups of these rollouts are not forgotten
        if report.error is not None:
            return CandidateFailed(report.candidate_id, candidate.segment, report.error, now)
        known = candidate.length
        tokens = [0] * (report.length - known)
        if report.finish_reason is None:
            return TokensArrived(report.candidate_id, candidate.segment, known, tokens, None, now)
        reason = report.finish_reason
        return CandidateEnded(report.candidate_id, candidate.segment, known, tokens, None, reason, now)


class RemoteLink:
    """The link of another process: sends reports to the main process, and receives aborts."""

    def __init__(self, mailbox: Mailbox, rollout: int) -> None:
        self._mailbox = mailbox
        self._rollout = rollout
        self._last_poll = 0.0

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """See [`Link`]. Checks for aborts every 5 ms at most: a decoding step of a large model takes longer."""
        if reports:
            self._mailbox.post(0, (self._rollout, list(reports)))
        now = time.monotonic()
        if now - self._last_poll < POLL_S:
            return []
        self._last_poll = now
        return [candidate_id for aborts in _receive(self._mailbox, self._rollout) for candidate_id in aborts]

    def fail(self, error: BaseException) -> None:
        """Sends an error to the main process, which ends the rollout."""
        message = f"Generation failed on process {self._mailbox.process_index}: {_message_of(error)}"
        self._mailbox.post(0, (self._rollout, message))


class GroupLink:
    """
    The link of each process in a group that decodes one batch together, step by step (tensor parallelism). Only the
    group's leader has an `inner` link, and broadcasts its aborts, so that all abort in the same step.
    """

    def __init__(self, inner: Link | None, leader: int, group: Any) -> None:
        self._inner = inner
        self._leader = leader
        self._group = group
        self._steps = 0
        self._aborts: list[int] = []
        self._error: Exception | None = None

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """
        Returns the aborts since the last broadcast at every eighth call. The leader's reports are sent, those of the
        others are equal. An error is broadcast too, and raised on all processes in the same step: a process that
        continued alone would block.
        """
        if self._inner is not None and self._error is None:
            try:
                self._aborts += self._inner.exchange(reports)
            except Exception as error:
                self._error = error
        self._steps += 1
        if self._steps % BROADCAST_INTERVAL:
            return []
        box: list[Any] = [self._aborts if self._error is None else _message_of(self._error)]
        torch.distributed.broadcast_object_list(box, src=self._leader, group=self._group)
        self._aborts = []
        if self._error is not None:
            raise self._error
        if isinstance(box[0], str):
            raise GenerationError(box[0])
        return box[0]


def _receive(mailbox: Mailbox, rollout: int) -> list[list[Any]]:
    """Returns a rollout's new messages, or raises an error among them. Ignores those of earlier rollouts."""
    messages = [message for number, message in mailbox.receive() if number == rollout]
    if error := next((message for message in messages if isinstance(message, str)), None):
        raise GenerationError(error)
    return messages


def _message_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
