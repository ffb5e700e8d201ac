"""One weight update: pauses servers, updates them and resumes them. Runs in the engine's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

from ..engines.monitor import shows_weights
from ..engines.pool import Member, ServerPool, State
from ..errors import WeightSyncError
from . import calls
from .files import WeightDirectory


POLL_S = 0.2


class WeightUpdate:
    """
    One update of some servers, as a context manager.

    - A server is paused before its weights change and resumed afterwards, whether the update succeeded or not.
    - A server that fails leaves the update; the others continue and end with the complete new weights.
    - After the context, the servers in `updated` have the new weights and version, and an empty prefix cache unless
      `keeps_kv`, with which requests must be salted by version.
    - `failures` has the error of each other server, unless the context was left with an exception.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        version: int,
        before_resume: Callable[[Member], Awaitable[None]] | None = None,
        keeps_kv: bool = False,
    ) -> None:
        self.members = dict(members)  # by address
        self.version = version
        self.before_resume = before_resume
        self.keeps_kv = keeps_kv
        self.failures: dict[str, Exception] = {}
        self.updated: list[str] = []
        self._is_open = False  # whether vLLM takes weights over NCCL

    @property
    def alive(self) -> list[str]:
        """Addresses of the servers without a failure."""
        return [url for url in self.members if url not in self.failures]

    async def each(self, action: Callable[[Member], Awaitable[Any]]) -> None:
        """Runs `action` on all servers without a failure, in parallel."""
        await asyncio.gather(*(self._attempt(action, url) for url in self.alive))

    async def _attempt(self, action: Callable[[Member], Awaitable[Any]], url: str) -> None:
        try:
            await _while_there(action, self.members[url])
        except Exception as error:
            self.failures[url] = error

    async def open(self, timeout_s: float) -> None:
        """Starts the update on the servers, before weights are sent over NCCL."""
        self._is_open = True
        await self.each(lambda member: calls.start_update(member.server, timeout_s))

    async def close(self, timeout_s: float) -> None:
        """Finishes the update on the servers, after all weights were sent."""
        await self.each(lambda member: calls.finish_update(member.server, timeout_s))

    async def __aenter__(self) -> WeightUpdate:
        try:
            await self.each(lambda member: calls.pause(member.server, self.keeps_kv))
        except BaseException:  # after Ctrl-C here, `__aexit__` is not called
            await self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.each(self._complete)
                self.updated = self.alive
        finally:  # also after Ctrl-C, so that no server stays paused
            await self._abandon()

    async def _complete(self, member: Member) -> None:
        """Resumes a server as soon as it can decode, and sets its version then: the fewer calls it waits for."""
        if not self.keeps_kv:
            await calls.reset_caches(member.server)
        if self.before_resume is not None:
            await self.before_resume(member)
        await calls.resume(member.server)
        await calls.set_version(member.server, self.version)

    async def _abandon(self) -> None:
        failed = [member.server for url, member in self.members.items() if url not in self.updated]
        await asyncio.gather(*(calls.abandon(server, self.version, self._is_open) for server in failed))


async def _while_there(action: Callable[[Member], Awaitable[Any]], member: Member) -> None:
    """Runs `action` on a server, and raises once the server is lost: the timeout for loading files is half an hour."""
    task = asyncio.ensure_future(action(member))
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_S)
            if member.state is State.DOWN and not task.done():
                raise WeightSyncError(member.reason)
        task.result()
    finally:
        task.cancel()


async def refresh(pool: ServerPool, member: Member, files: WeightDirectory | None) -> bool:
    """
    Updates a server that reconnected from the files of the last sync, unless it still has these weights. Returns
    whether it has them; `False` if there are no files.
    """
    version, path = pool.version, None if files is None else files.path(pool.version)
    if version == 0:
        return True
    if await shows_weights(pool, member):
        await calls.resume(member.server)
        return True
    if path is None:
        return False
    async with WeightUpdate({member.server.base_url: member}, version) as update:
        await update.each(lambda member: calls.load(member.server, path))
    for failure in update.failures.values():
        raise failure
    return True
