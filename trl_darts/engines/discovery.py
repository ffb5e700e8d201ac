"""Keeps the servers of a pool in step with a list, also in the middle of a rollout."""

import asyncio
import logging
import time
from collections.abc import Iterable

from ..errors import TRLDARTSError
from .failures import describe
from .monitor import Check, Monitor
from .pool import State
from .server_list import ServerSource


POLL_S = 1.0
RETRY_S = 10.0  # between two checks of a server that can't join

logger = logging.getLogger(__name__)


class Discovery:
    """
    Adds listed servers to a pool, and removes those that left the list.

    A new server is checked, gets the current weights as one that reconnects does, and only then candidates. An empty
    list changes nothing: whatever wrote it has ended, and the servers' own health checks decide. Servers that were
    never listed are left alone, and so is the last server that is up.
    """

    def __init__(self, source: ServerSource, check: Check, urls: Iterable[str] = ()) -> None:
        self._source = source
        self._check = check
        self._known = set(urls)  # servers of the pool that were listed
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}
        self._warned: dict[str, str] = {}  # last message of each server, and of the list ("")

    async def run(self, monitor: Monitor) -> None:
        """Follows the list until it is cancelled."""
        try:
            while True:
                try:
                    found = await asyncio.to_thread(self._source.read)
                except TRLDARTSError as error:
                    self._warn("", f"{error} The servers stay as they are.")
                else:
                    self._warned.pop("", None)
                    await self._follow(monitor, found.urls)
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._joining.values():
                task.cancel()
            self._source.close()

    async def _follow(self, monitor: Monitor, urls: Iterable[str]) -> None:
        listed, pool = set(urls), monitor.pool
        if not listed:
            return
        self._joining = {url: task for url, task in self._joining.items() if not task.done()}
        self._retry_at = {url: at for url, at in self._retry_at.items() if url in listed}
        self._warned = {url: message for url, message in self._warned.items() if url in listed}
        for url in sorted(listed - pool.members.keys() - self._joining.keys()):
            if time.monotonic() >= self._retry_at.get(url, 0.0):
                self._joining[url] = asyncio.create_task(self._join(monitor, url))
        for url in sorted(self._known - listed):
            async with pool.updating:  # an update looks its servers up until its end
                if url in pool.members and set(pool.urls(State.UP)) - {url}:
                    logger.warning("The vLLM server at %s is no longer listed.", url)
                    monitor.remove(url)
            if url not in pool.members:
                self._known.discard(url)

    async def _join(self, monitor: Monitor, url: str) -> None:
        try:
            await monitor.admit(url, self._check)
        except Exception as error:  # one invalid answer must not end the task without a message
            reason = str(error) if isinstance(error, TRLDARTSError) else describe(error, "a check")
            self._warn(url, f"The vLLM server at {url} is listed and can't join: {reason}")
            self._retry_at[url] = time.monotonic() + RETRY_S
            return
        logger.warning("The vLLM server at %s was found.", url)
        self._warned.pop(url, None)
        self._known.add(url)

    def _warn(self, url: str, message: str) -> None:
        if self._warned.get(url) != message:
            logger.warning(message)
            self._warned[url] = message
