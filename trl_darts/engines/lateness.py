"""
Who is late: a server, or one candidate. A queue is no silence: a server that sends tokens of any candidate, or counts
new ones in its metrics, is alive.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..scheduling import Submit
from .deadlines import Deadlines
from .pool import Member


Key = tuple[int, int]  # (candidate_id, segment): a candidate that moves to another server is another request


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A candidate's request, until its answer is complete. Times are those of `time.perf_counter`."""

    command: Submit
    heard: float  # when it was submitted, or its last tokens came
    decodes: bool = False  # whether tokens have come
    internal_id: str | None = None
    task: asyncio.Task[None] | None = None
    called_off: float | None = None  # when its abort was commanded

    @property
    def key(self) -> Key:
        return self.command.candidate_id, self.command.segment


def silence(member: Member, requests: Sequence[OpenRequest], now: float, deadlines: Deadlines) -> str | None:
    """Why a server that should decode these is lost; `None` while it has shown in time that it decodes anything."""
    heard = max(member.heard, min(request.heard for request in requests))
    return _overdue(now - heard, any(request.decodes for request in requests), deadlines)


def late_ones(
    member: Member, requests: Sequence[OpenRequest], now: float, deadlines: Deadlines
) -> list[tuple[OpenRequest, str]]:
    """
    Those that get no tokens from a server that decodes others, and why. One that waits in the server's queue, or was
    put back there by a preemption, is not late; where the server does not say, one that has not begun may wait.
    """
    late = []
    for request in requests:
        may_be_late = request.heard < member.heard and (request.decodes or member.load is not None)
        reason = _overdue(now - max(request.heard, member.queued), request.decodes, deadlines)
        if may_be_late and reason is not None:
            late.append((request, f"{member.server.base_url}: {reason}, though it decodes others"))
    return late


def _overdue(seconds: float, decodes: bool, deadlines: Deadlines) -> str | None:
    name, limit = "vllm_first_token_timeout_s", deadlines.first_token_s
    if decodes:
        name, limit = "vllm_token_timeout_s", deadlines.token_s
    return f"no tokens within `{name}` ({limit:g} s)" if seconds > limit else None
