"""The open requests of a rollout."""

import asyncio
from dataclasses import dataclass

from ..scheduling import Submit
from .opener import CandidateStream


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


class OpenRequests(dict[Key, OpenRequest]):
    """Those of all servers."""

    def on(self, url: str) -> list[OpenRequest]:
        """Returns those on a server."""
        return [request for request in self.values() if request.command.engine_id == url]
