"""The one decision maker of a rollout that several processes decode: it sees lengths and ends, never a token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import GenerationError
from ..scheduling import (
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


@dataclass(frozen=True, slots=True)
class Slot:
    """A candidate as the process that decodes it knows it."""

    candidate_id: int
    group_id: int
    index: int


@dataclass(frozen=True, slots=True)
class Report:
    """
    What a process tells of a candidate: how many tokens it has and, once it has ended, why. `error` is set if it can't
    be decoded.
    """

    candidate_id: int
    length: int
    finish_reason: FinishReason | None = None
    error: str | None = None


class Director:
    """
    Hands the reports of all processes to the scheduler. Lives on the main process.

    Args:
        scheduler ([`Scheduler`]):
            A new one. It is told how many tokens there are, not which.
        plans (`Sequence[GroupPlan]`):
            The groups.
        num_engines (`int`):
            Engines `"0"`, `"1"`, …: the processes, or groups of processes that decode together.
    """

    def __init__(self, scheduler: Scheduler, plans: Sequence[GroupPlan], num_engines: int) -> None:
        self.scheduler = scheduler
        self.slots: list[list[Slot]] = [[] for _ in range(num_engines)]  # by engine, in the order of submission
        commands = scheduler.start(plans, [EngineLoad(str(i)) for i in range(num_engines)], time.perf_counter())
        for command in commands:
            if isinstance(command, Submit):
                slot = Slot(command.candidate_id, command.group_id, command.index)
                self.slots[int(command.engine_id)].append(slot)

    @property
    def done(self) -> bool:
        """Whether every candidate has ended."""
        return self.scheduler.done

    def handle(self, reports: Sequence[Report]) -> list[tuple[int, int]]:
        """
        Takes note of reports.

        Args:
            reports (`Sequence[Report]`):
                News from any process.

        Returns:
            `list[tuple[int, int]]`: Engine and candidate ID of each candidate that is to be aborted now.
        """
        now = time.perf_counter()
        commands: list[Command] = []
        for report in reports:
            commands += self.scheduler.handle(self._event(report, now))
        if late := next((c for c in commands if not isinstance(c, Abort)), None):
            raise GenerationError(
                f"The schedule wants to start candidate {late.candidate_id} during the rollout. Processes that "
                "generate by themselves take all candidates at its beginning: use a vLLM server."
            )
        return [(int(command.engine_id), command.candidate_id) for command in commands]

    def result(self) -> RolloutResult:
        """
        The outcome, once `done`. Its candidates' tokens are zeros, as many as there are tokens.

        Raises:
            [`GenerationError`]: If a candidate could not be decoded.
        """
        return self.scheduler.result()

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
