"""
Watches the servers of a pool in the engine's event loop, also between rollouts: their health, their slots and their
metrics. A lost server that answers again gets the current weights, and so does one that is added.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from .failures import FAILURES, describe, is_our_own
from .pool import Member, ServerPool, State
from .server_abilities import max_num_seqs, sampling_of
from .server_metrics import server_load
from .vllm_api import VLLMServer
from .waiting import Deadlines, LoopLag


PROBE_INTERVAL_S = 2.0
MAX_PROBE_INTERVAL_S = 20.0  # of one of many processes that share the servers
READY_POLL_S = 0.005

Refresh = Callable[[ServerPool, Member], Awaitable[bool]]
Check = Callable[[VLLMServer], Awaitable[object]]  # raises if a server can't serve the run

logger = logging.getLogger(__name__)


async def has_loaded_weights(pool: ServerPool, member: Member) -> bool:
    """Whether no weight sync has happened, so that a server has the right weights after its start."""
    return pool.version == 0


async def shows_weights(pool: ServerPool, member: Member) -> bool:
    """Whether a server received the weights of the last sync, and was not restarted since."""
    if pool.version == 0:
        return True
    # The server's own version is not sufficient, because an earlier run may have set it.
    return member.version == pool.version and await member.shown_version() == f"v{pool.version}"


class Monitor:
    """
    Watches the servers of a pool. Servers are added and removed here.

    `refresh` updates a server that has reconnected to the weights of the last sync, and returns whether it has them.
    `num_sharing` processes watch the same servers. With more than one, this is a process that only decodes now and
    then: it has its share of the slots, and only probes servers during its rollouts.
    """

    def __init__(
        self,
        pool: ServerPool,
        connect: Callable[[str], VLLMServer],
        deadlines: Deadlines,
        refresh: Refresh = has_loaded_weights,
        num_sharing: int = 1,
    ) -> None:
        self.pool = pool
        self._deadlines = deadlines
        self._refresh = refresh
        self._num_sharing = num_sharing
        self.lag = LoopLag()
        self._connect = connect
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  # by server and name
        self._measuring: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts watching the servers that are not watched yet."""
        if self._measuring is None:
            self._measuring = asyncio.create_task(self.lag.watch())
        if any((url, self._watch.__name__) not in self._tasks for url in self.pool.members):
            self.pool.logs.find(self.pool.members)
        for url in self.pool.members:
            self._once(url, self._watch)

    def _once(self, url: str, action: Callable[[str], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Starts an action on a server, unless it is running. It ends if the server is removed."""
        key = url, action.__name__
        if key not in self._tasks or self._tasks[key].done():
            self._tasks[key] = asyncio.create_task(action(url))
        return self._tasks[key]

    async def ready(self) -> None:
        """Waits until the slots of all servers that are up are known. Otherwise, the first gets all candidates."""
        while any(member.state is State.UP and member.limit is None for member in self.pool.members.values()):
            await asyncio.sleep(READY_POLL_S)

    async def admit(self, url: str, check: Check) -> None:
        """Adds a server that passes `check`. It gets the weights as one that reconnects, and then candidates."""
        server = self._connect(url)
        await check(server)
        if url not in self.pool.members:
            self.pool.add(server)
            self.start()

    def remove(self, url: str) -> None:
        """Removes a server. Its candidates continue on other servers."""
        self.pool.remove(url)
        for key in [key for key in self._tasks if key[0] == url]:
            self._tasks.pop(key).cancel()

    def follow(self, version: int, has_weights: Mapping[str, bool]) -> None:
        """Copies the state from the main process: the version, the servers, and which of them have its weights."""
        for url in has_weights.keys() - self.pool.members.keys():
            self.pool.add(self._connect(url))
        for url in self.pool.members.keys() - has_weights.keys():
            self.remove(url)
        self.pool.follow(version, has_weights)

    async def _watch(self, url: str) -> None:
        await asyncio.gather(self._begin(url), self._keep_probing(url))

    async def _begin(self, url: str) -> None:
        await self._ask_for_slots(url)
        if self.pool.members[url].state is State.RETURNED:  # a new server
            await self._bring_back(url)

    async def _keep_probing(self, url: str) -> None:
        while True:
            await asyncio.sleep(min(PROBE_INTERVAL_S * self._num_sharing, MAX_PROBE_INTERVAL_S))
            if self._num_sharing > 1 and not self.pool.listeners:
                continue
            try:
                await self._probe(url)
            except Exception:  # one invalid response must not end the probing
                logger.exception("Probing the vLLM server at %s failed. It will be repeated.", url)

    async def _probe(self, url: str) -> None:
        member = self.pool.members[url]
        if not await self._is_healthy(url):
            return
        if member.state is State.DOWN:
            if not await self._end_ghosts(url):
                return
            await self._ask_for_slots(url)
            self.pool.logs.find(self.pool.members)
            member.state = State.RETURNED
            self._once(url, self._bring_back)  # probing continues meanwhile
        elif member.state is State.UP:
            if member.asks_for_slots:
                self._once(url, self._ask_for_slots)
            if self.pool.listeners:
                num_held = self.pool.num_held(url)
                self.pool.note_load(url, await server_load(member.server, self._deadlines.health_s), num_held)

    async def _is_healthy(self, url: str) -> bool:
        """
        Checks a server, which is lost unless it is healthy. A timeout is no judgment if our own loop was late, or if
        the server has sent tokens in the second half of it: it was not frozen when the check began.
        """
        member, start, limit = self.pool.members[url], time.perf_counter(), self._deadlines.health_s
        try:
            await member.server.get_text("/health", limit)
        except FAILURES as error:
            decodes = time.perf_counter() - member.last_progress < limit / 2
            has_doubt = decodes or self.lag.was_late_since(start)
            if not ((isinstance(error, TimeoutError) and has_doubt) or is_our_own(error)):
                self.pool.lose(url, describe(error, f"`/health` after {limit:g} s"))
            return False
        return True

    async def check(self, url: str) -> bool:
        """
        Checks a server at once, because a request failed on it: whether it is healthy, and not a new process with
        other weights behind the same address. Returns whether it is up.
        """
        if url not in self.pool.members:
            return False
        check = self._once(url, self._check)
        await asyncio.wait({check})
        if not check.cancelled() and check.exception() is not None:
            logger.error("Checking the vLLM server at %s failed.", url, exc_info=check.exception())
        return url in self.pool.members and self.pool.members[url].state is State.UP

    async def _check(self, url: str) -> None:
        member, updating = self.pool.members[url], self.pool.updating
        if not await self._is_healthy(url) or member.version == 0 or updating.locked():
            return
        try:
            found, own = await member.shown_version(), f"v{member.version}"
        except FAILURES as error:
            self.pool.lose(url, describe(error, "`/weight_info`"))
            return
        if found not in (None, own) and not updating.locked():
            self.pool.lose(url, f"it has the weights {found!r} instead of {own!r}, so it was restarted")

    async def _end_ghosts(self, url: str) -> bool:
        """Aborts the requests that a server may still decode since it seemed to be lost. Returns success."""
        member = self.pool.members[url]
        try:
            await member.server.abort(member.ghosts)
        except FAILURES as error:
            self.pool.lose(url, describe(error, "`/abort_requests`"))
            return False
        member.ghosts = []
        return True

    async def _ask_for_slots(self, url: str) -> None:
        """Queries the number of slots, which may change with a restart, and how the server samples."""
        member = self.pool.members[url]
        try:
            info = await member.server.get("/server_info?config_format=json", self._deadlines.info_s)
        except FAILURES:  # errors are handled when the server is used
            self.pool.guess_slots(url)
            return
        config = (info or {}).get("vllm_config") or {}
        if config:
            with suppress(*FAILURES):  # before the slots, with which candidates may start
                member.sampling = await sampling_of(member.server, config)
        slots = max_num_seqs(config)
        self.pool.note_slots(url, None if slots is None else -(-slots // self._num_sharing))

    async def _bring_back(self, url: str) -> None:
        """Refreshes the weights of a reconnected server and starts using it, or lets it wait for a weight sync."""
        async with self.pool.updating:
            member = self.pool.members[url]
            if member.state is not State.RETURNED:  # a weight sync has handled it
                return
            try:
                fresh = await self._refresh(self.pool, member)
            except Exception as error:
                self.pool.lose(url, describe(error, "the weights"))
                return
            if member.state is not State.RETURNED:  # it was lost meanwhile
                return
            suffix = "" if fresh else " and waits for a weight sync"
            logger.warning("The vLLM server at %s has reconnected%s.", url, suffix)
            member.waits = not fresh
            if fresh:
                self.pool.join(url)
