"""
Detects servers and candidates that are late. A server is alive if it sends tokens of any candidate, or counts new ones
in its metrics. Waiting in its queue does not count as late.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..scheduling import Submit
from .opener import CandidateStream
from .pool import Member
from .waiting import Deadlines


Key = tuple[int, int]  # (candidate_id, segment): a candidate that moves to another server is another request


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A candidate's open request. Times are those of `time.perf_counter`."""

    command: Submit
    last_progress: float  # time of its submission, or of its last tokens
    num_tokens: int  # of the candidate, with those of earlier requests
    version: int = 0  # of the weights at its submission; with adapters, of all its tokens
    decodes: bool = False  # whether it has received tokens
    stream: CandidateStream | None = None  # `None` until its task has begun
    failing: bool = False  # whether it has failed, and is about to be tried elsewhere
    task: asyncio.Task[None] | None = None
    aborted_at: float | None = None  # time of its abort command

    @property
    def key(self) -> Key:
        return self.command.candidate_id, self.command.segment

    @property
    def internal_id(self) -> str | None:
        """The server's ID of it, `None` until it is its turn to be sent."""
        return None if self.stream is None else self.stream.internal_id

    @property
    def sent(self) -> bool:
        """Whether it has reached the server."""
        return self.stream is not None and self.stream.sent

    @property
    def has_companions(self) -> bool:
        """Whether it shared an HTTP request with others."""
        return self.stream is not None and self.stream.has_companions


def silence(member: Member, requests: Sequence[OpenRequest], now: float, deadlines: Deadlines) -> str | None:
    """Returns the reason why a server with these requests is lost, or `None` if it has shown progress in time."""
    last_progress = max(member.last_progress, min(request.last_progress for request in requests))
    return _overdue(now - last_progress, any(request.decodes for request in requests), deadlines)


def stalled_requests(
    member: Member, requests: Sequence[OpenRequest], now: float, deadlines: Deadlines
) -> list[tuple[OpenRequest, str]]:
    """
    Returns the requests that get no tokens from a server that decodes others, with the reason. Requests in the
    server's queue are not late, including preempted ones. If the server has no metrics, a request without tokens may
    be queued.
    """
    late = []
    for request in requests:
        waited = now - max(request.last_progress, member.last_queued)
        # When a server stops, its last tokens and metrics arrive at different times. A request that is behind by only
        # this difference is not the only late one.
        is_alone = member.last_progress - request.last_progress > waited / 2
        reason = _overdue(waited, request.decodes, deadlines)
        if is_alone and (request.decodes or member.load is not None) and reason is not None:
            late.append((request, f"{member.server.base_url}: {reason}, though it decodes others"))
    return late


def silent_requests(requests: Sequence[OpenRequest], now: float, deadlines: Deadlines) -> list[OpenRequest]:
    """Returns the requests that have had no token for too long, wherever they wait."""
    return [request for request in requests if now - request.last_progress > deadlines.request_s]


def _overdue(seconds: float, decodes: bool, deadlines: Deadlines) -> str | None:
    name, limit = "vllm_first_token_timeout_s", deadlines.first_token_s
    if decodes:
        name, limit = "vllm_token_timeout_s", deadlines.token_s
    return f"no tokens within `{name}` ({limit:g} s)" if seconds > limit else None
