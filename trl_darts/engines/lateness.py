"""
Detects servers and candidates that are late. A server is alive if it sends tokens of any candidate, or counts new ones
in its metrics. Waiting in its queue does not count as late.
"""

from collections.abc import Sequence

from .open_requests import OpenRequest
from .pool import Member
from .waiting import Deadlines


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
