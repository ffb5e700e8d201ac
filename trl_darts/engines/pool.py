"""
What is known of each server: the one record, in the engine's event loop. It lives longer than a rollout.

```
        fails, or does not answer in time                answers again
   UP ────────────────────────────────────▶ DOWN ────────────────────────▶ RETURNED
    ▲                                                                         │
    └──────────────────── has the current weights ────────────────────────────┘
```

A server that is not UP is asked for its health alone: one that comes back has old weights, or none of ours. It is
UP again once it is shown to have those of the last weight sync (`version`), which are the rollout's.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import aiohttp

from ..scheduling.concurrency import ConcurrencyLimit, ServerLoad
from .deadlines import Deadlines
from .server_log import explain, find_log
from .vllm_api import ServerRefusedError, VLLMServer, max_num_seqs, server_load


PROBE_INTERVAL_S = 2.0
READY_POLL_S = 0.005
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

    def num_held(self, url: str) -> int:
        """How many candidates a server has now."""
        ...

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
    """A server of the pool, with all that is known of it."""

    server: VLLMServer
    tail: bool  # whether it is one of those that take over what is left
    limit: ConcurrencyLimit | None = None  # once it has been asked how many slots it has; until then it gets nothing
    state: State = State.UP
    reason: str = ""  # why it was lost last
    version: int = 0  # of the weights that it has: the number of the sync that brought them; 0 for those it loaded
    waits: bool = False  # for the next weight sync: it is back, and can't be given the weights of the last one
    draining: bool = False
    asleep: bool | None = False  # unknown where two kinds take turns, until it has been told
    num_losses: int = 0
    log: Path | None = None  # looked for while it is there
    load: ServerLoad | None = None  # when it was asked last; `None` if it does not say
    heard: float = 0.0  # when it last gave a sign that it decodes, by `time.perf_counter`
    queued: float = 0.0  # when requests last waited in its queue, or were put back there by a preemption

    @property
    def capacity(self) -> int:
        """The most candidates at once."""
        return 0 if self.draining or self.asleep is not False or self.limit is None else int(self.limit)

    @property
    def decodes(self) -> bool:
        """Whether it is healthy and awake."""
        return self.state is State.UP and self.asleep is False


Refresh = Callable[[Member, int], Awaitable[bool]]


async def has_loaded_weights(member: Member, version: int) -> bool:
    """Without a weight sync, a server that comes back has the weights that it loads."""
    return version == 0


async def shows_weights(member: Member, version: int) -> bool:
    """Whether a server was given the weights of a version, and was not started again since."""
    if version == 0:
        return True
    # What it shows is no proof by itself: an earlier run may have left it.
    return member.version == version and await member.server.weight_version() == f"v{version}"


class ServerPool:
    """
    The servers of an engine. Must be used in the event loop alone, but for reading.

    `refresh` brings a server that has come back to the weights of the last sync, and returns whether it has them.
    """

    def __init__(
        self,
        servers: Mapping[str, VLLMServer],
        deadlines: Deadlines,
        most: int,
        tail_urls: Collection[str] = (),
        takes_turns: bool = False,
        refresh: Refresh = has_loaded_weights,
    ) -> None:
        self._asleep_at_first = None if takes_turns else False  # also of one that comes back, as another process
        self.members = {
            url: Member(server, url in tail_urls, asleep=self._asleep_at_first) for url, server in servers.items()
        }
        self.takes_turns = takes_turns  # whether those of the tail are on the others' GPUs
        self.deadlines = deadlines
        self.version = 0  # of the last weight sync
        self.updating = asyncio.Lock()  # one weight update at a time: a sync, or that of a server that is back
        self.listener: Listener | None = None
        self._most = most
        self._refresh = refresh
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._returning: dict[str, asyncio.Task[None]] = {}

    def urls(self, state: State) -> list[str]:
        """Addresses of the servers in a state."""
        return [url for url, member in self.members.items() if member.state is state]

    def watch(self) -> None:
        """Begins to look after those servers that it does not yet look after."""
        for url in self.members.keys() - self._watchers.keys():
            self._watchers[url] = asyncio.create_task(self._watch(url))

    async def ready(self) -> None:
        """Waits until each server that is up has said how many slots it has: the first to answer must not get all."""
        while any(member.state is State.UP and member.limit is None for member in self.members.values()):
            await asyncio.sleep(READY_POLL_S)

    def add(self, url: str, server: VLLMServer) -> None:
        """Adds a server that has answered, but has none of our weights yet."""
        self.members[url] = Member(server, False, None, State.RETURNED, "it is new", asleep=self._asleep_at_first)
        self._share_connections()

    def remove(self, url: str) -> None:
        """Forgets a server. What it still decodes goes on elsewhere."""
        if self.listener is not None:
            self.lose(url, "it has left the training")
        del self.members[url]
        self._share_connections()
        for tasks in (self._watchers, self._returning):
            if (task := tasks.pop(url, None)) is not None:
                task.cancel()

    @property
    def _connections(self) -> int:
        """How many each server can have."""
        return max(1, self._most // len(self.members))

    def _share_connections(self) -> None:
        for limit in filter(None, (member.limit for member in self.members.values())):
            limit.most = self._connections

    async def _ask_for_slots(self, url: str) -> None:
        """A server that was started again may have others."""
        member = self.members[url]
        try:
            info = await member.server.get("/server_info?config_format=json", self.deadlines.info_s)
        except FAILURES:  # what is wrong with it shows when it is used
            info = None
        slots = max_num_seqs((info or {}).get("vllm_config") or {})
        if member.limit is None or member.limit.slots != slots:
            member.limit = ConcurrencyLimit(slots, self._connections)
        if member.state is State.UP:
            self._tell(lambda listener: listener.on_resized(url, member.capacity))

    def lose(self, url: str, reason: str) -> None:
        """Takes a server out until it answers again."""
        member = self.members[url]
        reason = explain(reason, member.log)
        if member.state is not State.DOWN:
            logger.warning("The vLLM server at %s is lost: %s", url, reason)
        was_up = member.state is State.UP
        member.state, member.reason = State.DOWN, reason  # before anyone asks who is left
        member.waits = False
        member.asleep = self._asleep_at_first
        if was_up:
            member.num_losses += 1
            self._tell(lambda listener: listener.on_lost(url, reason))

    def join(self, url: str) -> None:
        """Uses a server again that has the current weights."""
        member = self.members[url]
        member.version, member.waits = self.version, False
        if member.state is State.RETURNED:
            member.state = State.UP
            self._tell(lambda listener: listener.on_joined(url, member.capacity))

    def follow(self, version: int, up: Collection[str]) -> None:
        """Takes over from the main process which servers have the weights of the last sync."""
        self.version = version
        for url, member in self.members.items():
            if url in up:
                self.join(url)
            elif member.state is State.UP:
                self.lose(url, "the main process does not use it")

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
        await asyncio.gather(self._begin(url), self._keep_probing(url))

    async def _begin(self, url: str) -> None:
        await asyncio.gather(self._find_log(url), self._ask_for_slots(url))
        if self.members[url].state is State.RETURNED:  # a new one
            await self._bring_back(url)

    async def _keep_probing(self, url: str) -> None:
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
            await self._find_log(url)
            await self._ask_for_slots(url)
            member.state = State.RETURNED
            self._returning[url] = asyncio.create_task(self._bring_back(url))  # it is probed meanwhile
        elif member.state is State.UP and self.listener is not None:
            await self._observe(url)

    async def _bring_back(self, url: str) -> None:
        """Uses a server again that has come back, if it has the current weights, or can be given them now."""
        async with self.updating:
            member = self.members[url]
            if member.state is not State.RETURNED:  # a weight sync was first
                return
            try:
                fresh = await self._refresh(member, self.version)
            except Exception as error:
                self.lose(url, describe(error, "the weights"))
                return
            if member.state is not State.RETURNED:  # it was lost meanwhile
                return
            logger.warning("The vLLM server at %s is back%s.", url, "" if fresh else ", and waits for a weight sync")
            member.waits = not fresh
            if fresh:
                self.join(url)

    async def _observe(self, url: str) -> None:
        """A server that decodes anything is alive. One that is short of memory gets fewer candidates."""
        member, before = self.members[url], self.members[url].load
        member.load = load = await server_load(member.server, self.deadlines.health_s)
        if load is None or self.listener is None or member.limit is None:
            return
        if before is not None and load.num_tokens != before.num_tokens:
            member.heard = time.perf_counter()
        if load.num_waiting:
            member.queued = time.perf_counter()
        capacity = member.capacity
        member.limit.observe(load, self.listener.num_held(url))
        if member.capacity != capacity and member.state is State.UP:
            self.listener.on_resized(url, member.capacity)

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
