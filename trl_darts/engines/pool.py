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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import aiohttp

from .deadlines import Deadlines
from .server_log import explain, find_log
from .vllm_api import ServerRefusedError, VLLMServer


PROBE_INTERVAL_S = 2.0
TURN_TIMEOUT_S = 120.0  # a large model's weights go to the host's memory, or come from there
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
    tail: bool  # whether it is one of those that take over what is left
    limit: int  # most candidates at once: connections that this process can hold. vLLM itself queues what is too much
    state: State = State.UP
    reason: str = ""  # why it was lost last
    draining: bool = False
    asleep: bool | None = False  # unknown where two kinds take turns, until it has been told
    num_losses: int = 0
    log: Path | None = None  # looked for while it is there

    @property
    def capacity(self) -> int:
        """The most candidates at once."""
        return 0 if self.draining or self.asleep is not False else self.limit

    @property
    def decodes(self) -> bool:
        """Whether it is healthy and awake."""
        return self.state is State.UP and self.asleep is False


class ServerPool:
    """The servers of an engine. Must be used in the event loop alone, but for reading states."""

    def __init__(
        self,
        servers: Mapping[str, VLLMServer],
        deadlines: Deadlines,
        limit: int,
        tail_urls: Collection[str] = (),
        takes_turns: bool = False,
    ) -> None:
        share = max(1, limit // len(servers))
        self._asleep_at_first = None if takes_turns else False  # also of one that comes back, as another process
        self.members = {
            url: Member(server, url in tail_urls, share, asleep=self._asleep_at_first)
            for url, server in servers.items()
        }
        self.takes_turns = takes_turns  # whether those of the tail are on the others' GPUs
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
        self.members[url] = Member(server, False, 1, State.RETURNED, "it is new", asleep=self._asleep_at_first)
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
        was_up = member.state is State.UP
        member.state, member.reason = State.DOWN, reason  # before anyone asks who is left
        member.asleep = self._asleep_at_first
        if was_up:
            member.num_losses += 1
            self._tell(lambda listener: listener.on_lost(url, reason))

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

    def has_turn(self, tail: bool) -> bool:
        """Whether the servers of the tail, or the main ones, are awake, and the others asleep."""
        up = [member for member in self.members.values() if member.state is State.UP]
        return all(member.asleep == (member.tail != tail) for member in up)

    async def take_turns(self, tail: bool) -> None:
        """
        Puts the servers of the other kind to sleep, which must decode nothing, and wakes those of the tail, or the
        main ones. One that fails is lost.
        """
        for asleep in (True, False):
            turns = [url for url, member in self.members.items() if (member.tail != tail) == asleep]
            await asyncio.gather(*(self._set_asleep(url, asleep) for url in turns))

    async def _set_asleep(self, url: str, asleep: bool) -> None:
        member = self.members[url]
        if member.state is not State.UP or member.asleep == asleep:
            return
        member.asleep = None  # also after a call that is interrupted
        self._tell(lambda listener: listener.on_resized(url, 0))
        try:
            await (member.server.sleep if asleep else member.server.wake_up)(TURN_TIMEOUT_S)
        except FAILURES as error:
            self.lose(url, describe(error, f"`{'/sleep' if asleep else '/wake_up'}` after {TURN_TIMEOUT_S:g} s"))
            return
        if member.state is State.UP:
            member.asleep = asleep
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
