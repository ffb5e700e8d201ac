"""Aborts of a rollout's requests, which are repeated until the requests have ended."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import aiohttp

from .open_requests import OpenRequest, OpenRequests
from .pool import ServerPool, State
from .vllm_api import ServerRefusedError


ABORT_RESEND_S = 0.1  # an abort can overtake its request, so it is repeated until the response arrives
ABORT_GRACE_S = 5.0  # without a response to an abort, the connection is closed, and the last tokens are lost
END_S = 2.0  # timeout of one abort at the end of a failed rollout; a busy server takes half a second

EndUnsent = Callable[[OpenRequest], None]


class Aborts:
    """
    Aborts requests of one rollout. `end_unsent` ends one that no server has yet. It is not kept, because a rollout
    that refers to itself is not freed at once.
    """

    def __init__(self, requests: OpenRequests, pool: ServerPool) -> None:
        self._requests = requests
        self._pool = pool
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by server

    def begin(self, request: OpenRequest, end_unsent: EndUnsent) -> None:
        """Aborts a request, whose stream then ends with the tokens so far."""
        request.aborted_at = time.perf_counter()
        url = request.command.engine_id
        task = self._tasks.get(url)
        if task is None or task.done():
            self._tasks[url] = asyncio.create_task(self._repeat(url, end_unsent))

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancels and returns the tasks that repeat aborts."""
        for task in self._tasks.values():
            task.cancel()
        return list(self._tasks.values())

    async def end_all(self, end_unsent: EndUnsent) -> None:
        """
        Aborts all requests before their connections are closed. vLLM misses some of many connections that close at
        once, and would decode those requests to their limit.
        """
        for request in [request for request in self._requests.values() if request.internal_id is None]:
            end_unsent(request)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*map(self._end_on, self._pool.urls(State.UP))), ABORT_GRACE_S)

    async def _repeat(self, url: str, end_unsent: EndUnsent) -> None:
        while pending := [request for request in self._requests.on(url) if request.aborted_at is not None]:
            for request in [request for request in pending if request.internal_id is None]:
                end_unsent(request)
            supported = await self._send(url, pending, ABORT_GRACE_S)
            deadline = time.perf_counter() - ABORT_GRACE_S
            for request in pending:
                late = request.aborted_at is not None and request.aborted_at < deadline
                # Without tokens, only the end of its stream says that it was aborted, and others share the stream.
                ends_silently = supported and request.has_companions and not request.decodes
                if request.task is not None and (late or ends_silently or not supported):
                    request.task.cancel()
            await asyncio.sleep(ABORT_RESEND_S)

    async def _end_on(self, url: str) -> None:
        while requests := self._requests.on(url):
            if not await self._send(url, requests, END_S):
                return
            tasks = [request.task for request in requests if request.task is not None]
            await asyncio.wait(tasks, timeout=ABORT_RESEND_S)

    async def _send(self, url: str, requests: Sequence[OpenRequest], timeout_s: float) -> bool:
        """Aborts those of the requests that were sent. Returns whether the server does this."""
        ids = [request.internal_id for request in requests if request.internal_id is not None]
        try:
            return await self._pool.members[url].server.abort(ids, timeout_s)
        except (ServerRefusedError, aiohttp.ClientError, TimeoutError):
            return False
