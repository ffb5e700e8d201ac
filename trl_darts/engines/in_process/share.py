"""What one process decodes of a rollout: it keeps the tokens, reports lengths, and hears what is to be aborted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...scheduling import FinishReason


Row = tuple[list[int], list[float] | None]  # tokens and log-probs


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


class Link(Protocol):
    """A share's way to the decisions."""

    def exchange(self, reports: Sequence[Report]) -> Sequence[int]:
        """Sends reports; returns the IDs of candidates to abort that are known by now."""


class Share:
    """
    One process's part of a rollout, as the engine that decodes it sees it.

    The engine reports progress and ends, calls `exchange` after each step, and aborts what that returns, until
    `running` is empty. Each aborted candidate must be ended with `FinishReason.ABORT`.
    """

    def __init__(
        self, slots: Sequence[Slot], link: Link, needs_progress: bool, on_exchange: Callable[[], None] | None = None
    ) -> None:
        self.slots = list(slots)
        self.needs_progress = needs_progress
        self.running = {slot.candidate_id for slot in slots}
        self.rows: dict[int, Row] = {}  # by candidate ID, also of aborted ones
        self._link = link
        self._on_exchange = on_exchange
        self._reports: list[Report] = []

    def progress(self, candidate_id: int, length: int) -> None:
        self._reports.append(Report(candidate_id, length))

    def end(
        self, candidate_id: int, tokens: list[int], logprobs: list[float] | None, finish_reason: FinishReason
    ) -> None:
        """Notes the end of a running candidate with all its tokens; log-probs are `None` where there are none."""
        self.running.remove(candidate_id)
        self.rows[candidate_id] = (tokens, logprobs)
        self._reports.append(Report(candidate_id, len(tokens), finish_reason))

    def fail(self, candidate_id: int, error: str) -> None:
        """Notes that a running candidate can't be decoded; `error` is the engine's own message."""
        self.running.remove(candidate_id)
        self._reports.append(Report(candidate_id, 0, error=error))

    def exchange(self) -> list[int]:
        """Sends what was noted, and returns the IDs of running candidates that are to be aborted."""
        reports, self._reports = self._reports, []
        aborts = self._link.exchange(reports)
        if self._on_exchange is not None:
            self._on_exchange()
        return [candidate_id for candidate_id in aborts if candidate_id in self.running]
