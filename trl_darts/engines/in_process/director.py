"""
The main process's side of a rollout that the training's own processes decode: one scheduler for all of them.

```
Share ──reports──▶ Director                                          on the main process
Share ──reports──▶ RemoteLink ──mailbox──▶ Director's thread          on the others
      ◀──aborts──                ◀──
```

It sees lengths and ends, never a token. No collective is involved: a process that decodes long answers keeps none of
the others waiting, and a model whose forward pass is a collective is not disturbed.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from ...errors import GenerationError
from ...scheduling import (
    Abort,
    CandidateEnded,
    CandidateFailed,
    Command,
    EngineLoad,
    GroupPlan,
    RolloutResult,
    Scheduler,
    Submit,
    TokensArrived,
)
from ..mailbox import POLL_S, Mailbox
from .share import Report, Slot


class Director:
    """Hands the reports of all processes to the scheduler, and its aborts to the processes."""

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
        self._leaders = leaders
        self._mailbox: Any = mailbox
        self._rollout = rollout
        self._lock = threading.Lock()
        self._own: list[int] = []  # aborts for this process
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        for command in scheduler.start(plans, [EngineLoad(str(i)) for i in range(len(leaders))], time.perf_counter()):
            if isinstance(command, Submit):
                slot = Slot(command.candidate_id, command.group_id, command.index)
                self.slots[int(command.engine_id)].append(slot)

    def listen(self) -> None:
        """Begins to handle what other processes report, where there are any."""
        if self._mailbox is not None:
            self._thread = threading.Thread(target=self._serve, name="trl_darts-director", daemon=True)
            self._thread.start()

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """Aborts for this process, also those that other processes' reports led to."""
        if reports:
            self._handle(reports)
        if self._error is not None:
            raise self._error
        with self._lock:
            aborts, self._own = self._own, []
        return aborts

    def handle(self, reports: Sequence[Report]) -> list[tuple[int, int]]:
        """Tells the scheduler; returns engine and candidate ID of each candidate that is to be aborted now."""
        now = time.perf_counter()
        commands: list[Command] = []
        for report in reports:
            commands += self.scheduler.handle(self._event(report, now))
        if late := next((c for c in commands if isinstance(c, Submit)), None):
            raise GenerationError(
                f"The schedule wants to start candidate {late.candidate_id} during the rollout. Processes that "
                "generate by themselves take all candidates at its beginning: use a vLLM server."
            )
        return [(int(c.engine_id), c.candidate_id) for c in commands if isinstance(c, Abort)]

    def result(self) -> RolloutResult:
        """
        Waits until every process has ended its candidates. The result's tokens are zeros, as many as there are tokens.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.scheduler.result()

    def fail(self, error: BaseException) -> None:
        """Ends the rollout on all processes."""
        if self._mailbox is None:
            return
        for process in self._leaders:
            if process != self._mailbox.process_index:
                self._mailbox.post(process, (self._rollout, message_of(error)))
        self._finished.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()  # the mailbox has one reader at a time

    def _handle(self, reports: Sequence[Report]) -> None:
        with self._lock:
            aborts: dict[int, list[int]] = {}
            for engine, candidate_id in self.handle(reports):
                aborts.setdefault(self._leaders[engine], []).append(candidate_id)
            self._own += aborts.pop(0, [])
            done = self.scheduler.done
        for process, candidate_ids in aborts.items():
            self._mailbox.post(process, (self._rollout, candidate_ids))
        if done:
            self._finished.set()

    def _serve(self) -> None:
        try:
            while not self._finished.is_set():
                for reports in read_messages(self._mailbox, self._rollout):
                    self._handle(reports)
                self._finished.wait(POLL_S)
        except Exception as error:  # the main thread raises it with its next exchange
            self._error = error
            self.fail(error)

    def _event(self, report: Report, now: float) -> TokensArrived | CandidateEnded | CandidateFailed:
        candidate = self.scheduler.ledger.candidates[report.candidate_id]
        if report.error is not None:
            return CandidateFailed(report.candidate_id, candidate.segment, report.error, now)
        known = candidate.length
        tokens = [0] * (report.length - known)
        if report.finish_reason is None:
            return TokensArrived(report.candidate_id, candidate.segment, known, tokens, None, now)
        reason = report.finish_reason
        return CandidateEnded(report.candidate_id, candidate.segment, known, tokens, None, reason, now)


def read_messages(mailbox: Mailbox, rollout: int) -> list[list[Any]]:
    """A rollout's new messages; an error among them is raised. Late messages of an earlier rollout are ignored."""
    messages = [message for number, message in mailbox.receive() if number == rollout]
    if error := next((message for message in messages if isinstance(message, str)), None):
        raise GenerationError(error)
    return messages


def message_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
