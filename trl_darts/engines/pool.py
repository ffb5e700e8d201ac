"""
Which servers are healthy. Lives in the engine's event loop, and longer than a rollout.

```
        fails, or does not answer in time                answers again
   UP ────────────────────────────────────▶ DOWN ────────────────────────▶ RETURNED
    ▲                                                                         │
    └──────────────────── has the current weights ────────────────────────────┘
```

A server that is not UP is asked for its health alone: one that comes back has old weights, or none of ours.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import aiohttp

from .deadlines import Deadlines
from .server_log import explain, find_log
from .vllm_api import ServerRefusedError, VLLMServer


PROBE_INTERVAL_S = 2.0
FAILURES = (aiohttp.ClientError, TimeoutError, ServerRefusedError)


logger = logging.getLogger(__name__)


class State(Enum):
    """Where a server is in its life."""

    UP = "up"
    DOWN = "down"
    RETURNED = "returned"


class Listener(Protocol):
    """Who must hear of changes while a rollout runs."""

    def on_lost(self, url: str, reason: str) -> None:
        """A server is lost."""
        ...

    def on_joined(self, url: str, capacity: int) -> None:
        """A server has come back."""
        ...

    def on_resized(self, url: str, capacity: int) -> None:
        """A server takes no new candidates, or some again."""
        ...


@dataclass
class Member:
    """A server of the pool."""

    server: VLLMServer
    limit: int  # most candidates at once: connections that this process can hold. vLLM itself queues what is too much
    state: State = State.UP
    reason: str = ""  # why it was lost last
    draining: bool = False
    num_losses: int = 0
    log: Path | None = None  # looked for while it is there

    @property
    def capacity(self) -> int:
        """The most candidates at once."""
        return 0 if self.draining else self.limit


class ServerPool:
    """The servers of an engine. Must be used in the event loop alone, but for reading states."""

    def __init__(self, servers: Mapping[str, VLLMServer], deadlines: Deadlines, limit: int) -> None:
        share = max(1, limit // len(servers))
        self.members = {url: Member(server, share) for url, server in servers.items()}
        self.deadlines = deadlines
        self.listener: Listener | None = None
        self._limit = limit
        self._watchers: dict[str, asyncio.Task[None]] = {}

    def urls(self, state: State) -> list[str]:
        """Addresses of the servers in a state."""
        return [url for url, member in self.members.items() if member.state is state]

    def watch(self) -> None:
        """Begins to look after those servers that it does not yet look after."""
        for url in self.members.keys() - self._watchers.keys():
            self._watchers[url] = asyncio.create_task(self._watch(url))

    def add(self, url: str, server: VLLMServer) -> None:
        """Adds a server that has answered, but has none of our weights yet."""
        self.members[url] = Member(server, 1, State.RETURNED, "it is new")
        self._share_limit()

    def remove(self, url: str) -> None:
        """Forgets a server. What it still decodes goes on elsewhere."""
        if self.listener is not None:
            self.lose(url, "it has left the training")
        del self.members[url]
        self._share_limit()
        if (watcher := self._watchers.pop(url, None)) is not None:
            watcher.cancel()

    def _share_limit(self) -> None:
        for member in self.members.values():
            member.limit = max(1, self._limit // len(self.members))

    def lose(self, url: str, reason: str) -> None:
        """Takes a server out until it answers again."""
        member = self.members[url]
        reason = explain(reason, member.log)
        if member.state is not State.DOWN:
            logger.warning("The vLLM server at %s is lost: %s", url, reason)
        if member.state is State.UP:
            member.num_losses += 1
            self._tell(lambda listener: listener.on_lost(url, reason))
        member.state, member.reason = State.DOWN, reason

    def join(self, url: str) -> None:
        """Uses a server again that has the current weights."""
        member = self.members[url]
        if member.state is State.RETURNED:
            member.state = State.UP
            self._tell(lambda listener: listener.on_joined(url, member.capacity))

    def drain(self, url: str, draining: bool = True) -> None:
        """Sends a server nothing new, or something again; what it decodes goes on."""
        member = self.members[url]
        member.draining = draining
        if member.state is State.UP:
            self._tell(lambda listener: listener.on_resized(url, member.capacity))

    def _tell(self, say: Callable[[Listener], None]) -> None:
        if self.listener is not None:
            say(self.listener)

    async def _watch(self, url: str) -> None:
        await self._find_log(url)
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            try:
                await self._probe(url)
            except Exception:  # a server must not stay lost for good because of one strange answer
                logger.exception("Probing the vLLM server at %s failed; it is probed again.", url)

    async def _probe(self, url: str) -> None:
        member = self.members[url]
        try:
            await member.server.get_text("/health", self.deadlines.health_s)
        except FAILURES as error:
            self.lose(url, describe(error, f"`/health` after {self.deadlines.health_s:g} s"))
            return
        if member.state is State.DOWN:
            member.state = State.RETURNED
            await self._find_log(url)

    async def _find_log(self, url: str) -> None:
        self.members[url].log = await asyncio.to_thread(find_log, url)


def describe(error: BaseException | None, waited_for: str) -> str:
    """An error's message; a timeout has none."""
    if isinstance(error, ServerRefusedError):
        return str(error)
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
        return "nothing listens there"
    reset = isinstance(error, OSError) and error.errno == errno.ECONNRESET
    if reset or isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "it closed the connection in the middle of an answer"
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer to {waited_for}"
    return f"{type(error).__name__}: {error}"
