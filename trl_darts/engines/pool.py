"""
The pool of servers, in the engine's event loop. It has the only record of each server, and outlives a rollout.

```
        fails, or does not answer in time                answers again
   UP ────────────────────────────────────▶ DOWN ────────────────────────▶ RETURNED
    ▲                                                                         │
    └──────────────────── has the current weights ────────────────────────────┘
```

A server that is not UP only gets health checks: after a reconnect it may have old weights. It is UP again once it has
the weights of the last weight sync (`version`), with which the rollout runs.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

import aiohttp

from ..scheduling.concurrency import ConcurrencyLimit, ServerLoad
from .server_log import explain, find_logs
from .vllm_api import TURN_TIMEOUT_S, Sampling, ServerRefusedError, VLLMServer, max_num_seqs, sampling_of, server_load
from .waiting import Deadlines, LoopLag


PROBE_INTERVAL_S = 2.0
MAX_PROBE_INTERVAL_S = 20.0  # of one of many processes that share the servers
RESERVED_FILES = 512  # file descriptors reserved for the rest of the trainer
READY_POLL_S = 0.005
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
FAILURES = (aiohttp.ClientError, TimeoutError, ServerRefusedError)


logger = logging.getLogger(__name__)


class State(Enum):
    """State of a server."""

    UP = "up"
    DOWN = "down"
    RETURNED = "returned"


class Listener(Protocol):
    """Gets notified of changes while a rollout runs."""

    keeps_kv: bool  # whether keys and values of running requests survive a weight sync

    def num_held(self, url: str) -> int:
        """Returns the number of candidates on a server."""
        ...

    def on_lost(self, url: str, reason: str) -> None:
        """Called when a server is lost."""
        ...

    def on_joined(self, url: str, capacity: int) -> None:
        """Called when a server has reconnected and has the current weights."""
        ...

    def on_resized(self, url: str, capacity: int) -> None:
        """Called when the capacity of a server changes."""
        ...

    def on_updated(self, url: str, num_outputs: Mapping[str, int]) -> None:
        """
        Called when a server has new weights, before it continues. `num_outputs` has the tokens of its unfinished
        requests by ID.
        """
        ...


@dataclass
class Member:
    """State of a server of the pool."""

    server: VLLMServer
    tail: bool  # whether it is a tail server
    limit: ConcurrencyLimit | None = None  # `None` until its number of slots was queried; it gets no candidates then
    state: State = State.UP
    reason: str = ""  # of its last loss
    version: int = 0  # number of the sync that its weights come from; 0 for the weights loaded at its start
    decodes_version: int = 0  # as `version`, but already during the update of a paused server
    waits: bool = False  # whether it has reconnected, and must wait for the next weight sync
    draining: bool = False
    asleep: bool | None = False  # `None` if unknown, before its first turn
    num_losses: int = 0
    log: Path | None = None  # found while the server is running
    load: ServerLoad | None = None  # latest metrics; `None` if it has none
    last_progress: float = 0.0  # last sign of decoding, by `time.perf_counter`
    last_queued: float = 0.0  # last time that requests waited in its queue, including preempted ones
    sampling: Sampling | None = None  # as `limit`, queried with it
    asks_for_slots: bool = False  # whether the query failed, and will be repeated
    refuses_since: float | None = None  # time since when it has refused all requests because it is busy
    refusal: str = ""  # its message
    ghosts: list[str] = field(default_factory=list)  # requests of its last loss, which it may still decode

    @property
    def capacity(self) -> int:
        """Most candidates at once."""
        return 0 if self.draining or self.asleep is not False or self.limit is None else int(self.limit)

    @property
    def decodes(self) -> bool:
        """Whether the server is up and awake."""
        return self.state is State.UP and self.asleep is False


Refresh = Callable[[Member, int], Awaitable[bool]]
Check = Callable[[VLLMServer], Awaitable[object]]  # raises if a server can't serve the run


async def has_loaded_weights(member: Member, version: int) -> bool:
    """Whether no weight sync has happened, so that a server has the right weights after its start."""
    return version == 0


async def shows_weights(member: Member, version: int) -> bool:
    """Whether a server received the weights of a version, and was not restarted since."""
    if version == 0:
        return True
    # The server's own version is not sufficient, because an earlier run may have set it.
    return member.version == version and await member.server.weight_version() == f"v{version}"


class ServerPool:
    """
    The servers of an engine. Outside the event loop, it may only be read.

    `refresh` updates a server that has reconnected to the weights of the last sync, and returns whether it has them.
    `num_sharing` processes have such a pool of the same servers. With more than one, this is the pool of a process
    that only decodes now and then: it has its share of the slots, and only probes servers during its rollouts.
    """

    def __init__(
        self,
        servers: Mapping[str, VLLMServer],
        deadlines: Deadlines,
        most: int,
        tail_urls: Collection[str] = (),
        takes_turns: bool = False,
        refresh: Refresh = has_loaded_weights,
        num_sharing: int = 1,
    ) -> None:
        self._asleep_at_first = None if takes_turns else False  # also after a reconnect, perhaps as a new process
        self.members = {
            url: Member(server, url in tail_urls, asleep=self._asleep_at_first) for url, server in servers.items()
        }
        self.takes_turns = takes_turns  # whether main and tail servers share GPUs
        self.deadlines = deadlines
        self.version = 0  # of the last weight sync
        self.updating = asyncio.Lock()  # one weight update at a time: a sync, or that of a reconnected server
        self.listeners: list[Listener] = []  # the running rollouts
        self.lag = LoopLag()
        self._most = most
        self._refresh = refresh
        self._num_sharing = num_sharing
        self._warned_of_files = False
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._returning: dict[str, asyncio.Task[None]] = {}
        self._has_warned = False  # of servers that sample alike
        self._checks: dict[str, asyncio.Task[None]] = {}  # health checks that others wait for
        self._asking: dict[str, asyncio.Task[None]] = {}  # queries of slots that are repeated
        self._measuring: asyncio.Task[None] | None = None
        self._finding_logs: asyncio.Task[None] | None = None
        self._find_logs_again = False

    def urls(self, state: State) -> list[str]:
        """Returns the addresses of the servers in a state."""
        return [url for url, member in self.members.items() if member.state is state]

    def watch(self) -> None:
        """Starts monitoring the servers that are not monitored yet."""
        if self._measuring is None:
            self._measuring = asyncio.create_task(self.lag.watch())
        if self.members.keys() - self._watchers.keys():
            self._find_logs()
        for url in self.members.keys() - self._watchers.keys():
            self._watchers[url] = asyncio.create_task(self._watch(url))

    async def ready(self) -> None:
        """Waits until the slots of all servers that are up are known. Otherwise, the first gets all candidates."""
        while any(member.state is State.UP and member.limit is None for member in self.members.values()):
            await asyncio.sleep(READY_POLL_S)

    async def admit(self, server: VLLMServer, check: Check) -> None:
        """Adds a server that passes `check`. It gets the weights as one that reconnects, and then candidates."""
        await check(server)
        if server.base_url not in self.members:
            self.add(server.base_url, server)
            self.watch()

    def add(self, url: str, server: VLLMServer) -> None:
        """Adds a server that was checked, but does not have our weights yet."""
        self.members[url] = Member(server, False, None, State.RETURNED, "it is new", asleep=self._asleep_at_first)
        self._share_connections()

    def remove(self, url: str) -> None:
        """Removes a server. Its candidates continue on other servers."""
        if self.listeners:
            self.lose(url, "it was removed")
        del self.members[url]
        self._share_connections()
        for tasks in (self._watchers, self._returning, self._checks, self._asking):
            if (task := tasks.pop(url, None)) is not None:
                task.cancel()

    @property
    def _connections(self) -> int:
        """Number of connections per server."""
        return max(1, self._most // len(self.members))

    def _share_connections(self) -> None:
        for limit in filter(None, (member.limit for member in self.members.values())):
            limit.most = self._connections
        self._warn_of_files()

    def _warn_of_files(self) -> None:
        """Warns once if the limit of open files leaves slots of a server empty."""
        limits = [member.limit for member in self.members.values() if member.limit is not None]
        wanted = max((limit.wanted for limit in limits if limit.wanted is not None), default=0)
        if wanted > self._connections and not self._warned_of_files:
            self._warned_of_files = True
            needed = wanted * len(self.members) + RESERVED_FILES
            logger.warning(
                "The limit of open files allows %d connections to each of %d vLLM servers, which could decode %d "
                "sequences at once: their other slots stay empty. Raise the hard limit of the trainer's process to at "
                "least %d (`ulimit -Hn %d` before its start, or the option of the container or batch system).",
                *(self._connections, len(self.members), wanted, needed, needed),
            )

    async def _ask_for_slots(self, url: str) -> None:
        """
        Queries the number of slots, which may change with a restart. If that fails, they are as before, or as many as
        those of the other servers, and the query is repeated.
        """
        member, slots = self.members[url], None
        try:
            info = await member.server.get("/server_info?config_format=json", self.deadlines.info_s)
        except FAILURES:  # errors are handled when the server is used
            member.asks_for_slots = True
            if member.limit is None:
                self._set_slots(url, self._usual_slots)
            return
        member.asks_for_slots = False
        config = (info or {}).get("vllm_config") or {}
        if config:
            with suppress(*FAILURES):  # before the slots, with which candidates may start
                member.sampling = await sampling_of(member.server, config)
        self._warn_of_siblings()
        if (slots := max_num_seqs(config)) is not None:
            slots = -(-slots // self._num_sharing)
        self._set_slots(url, slots)
        for other, that in self.members.items():
            if that.asks_for_slots and that.limit is not None and that.limit.slots is None:
                self._set_slots(other, self._usual_slots)

    @property
    def _usual_slots(self) -> int | None:
        """The fewest slots of a server, if they are known."""
        limits = [member.limit for member in self.members.values() if not member.asks_for_slots]
        return min((limit.slots for limit in limits if limit is not None and limit.slots is not None), default=None)

    def _set_slots(self, url: str, slots: int | None) -> None:
        member = self.members[url]
        if member.limit is None or member.limit.slots != slots:
            member.limit = ConcurrencyLimit(slots, self._connections)
            self._warn_of_files()
        if member.state is State.UP:
            self._notify(lambda listener: listener.on_resized(url, member.capacity))

    def needs_seed(self, url: str) -> bool:
        """Whether a server's requests must have seeds, because candidates of a prompt could be equal without."""
        own = self.members[url].sampling
        return own is not None and own.takes_seeds and own.repeats(self._samplings(url))

    def _samplings(self, url: str) -> list[Sampling]:
        """Returns how the other servers sample."""
        return [m.sampling for other, m in self.members.items() if other != url and m.sampling is not None]

    def _warn_of_siblings(self) -> None:
        """Warns once if candidates of a prompt may be equal, and their servers can't take seeds."""
        alike = [
            url
            for url, member in self.members.items()
            if (own := member.sampling) is not None
            and not own.takes_seeds
            and own.repeats(other for other in self._samplings(url) if not other.takes_seeds)
        ]
        if alike and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Candidates of a prompt may be equal: the vLLM engines at %s have the same `--seed`, and as they run "
                "on a CPU without this trl_darts, seeds per request would end them. Run `pip install -U trl-darts` in "
                "the servers' environment, or start one engine per server with `trl-darts serve`, or with different "
                "`--seed`s.",
                ", ".join(alike),
            )

    def lose(self, url: str, reason: str) -> None:
        """Stops using a server until it answers again."""
        member = self.members[url]
        reason = explain(reason, member.log)
        if member.state is not State.DOWN:
            logger.warning("The vLLM server at %s is lost: %s", url, reason)
        was_up = member.state is State.UP
        member.state, member.reason = State.DOWN, reason  # before the listener is notified
        member.waits = False
        member.refuses_since = None
        member.asleep = self._asleep_at_first
        if was_up:
            member.num_losses += 1
            self._notify(lambda listener: listener.on_lost(url, reason))

    def join(self, url: str) -> None:
        """Starts using a server that has the current weights."""
        member = self.members[url]
        member.version, member.decodes_version, member.waits = self.version, self.version, False
        if member.state is State.RETURNED:
            member.state = State.UP
            self._notify(lambda listener: listener.on_joined(url, member.capacity))

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values of running requests survive a weight sync."""
        return any(listener.keeps_kv for listener in self.listeners)

    def _num_held(self, url: str) -> int:
        return sum(listener.num_held(url) for listener in self.listeners)

    async def report_update(self, member: Member) -> None:
        """Tells running rollouts how many tokens were sampled before the update of a server, which is still paused."""
        url = member.server.base_url
        member.decodes_version = self.version
        if member.limit is not None:
            member.limit.rebase()
        num_outputs = await member.server.num_outputs() if self._num_held(url) else {}
        self._notify(lambda listener: listener.on_updated(url, num_outputs))

    def follow(self, version: int, has_weights: Mapping[str, bool]) -> None:
        """Copies the state from the main process: the version, and which servers have its weights."""
        self.version = version
        for url, member in self.members.items():
            if has_weights[url]:
                if member.state is State.DOWN:  # not probed while this process decodes nothing
                    member.state = State.RETURNED
                self.join(url)
            elif member.state is State.UP:
                self.lose(url, "the main process does not use it")

    def drain(self, url: str, draining: bool = True) -> None:
        """Stops or resumes sending candidates to a server. Running candidates continue."""
        member = self.members[url]
        member.draining = draining
        if member.state is State.UP:
            self._notify(lambda listener: listener.on_resized(url, member.capacity))

    def has_turn(self, tail: bool) -> bool:
        """Whether one kind of servers (tail or main) is awake, and the other kind asleep."""
        up = [member for member in self.members.values() if member.state is State.UP]
        return all(member.asleep == (member.tail != tail) for member in up)

    async def take_turns(self, tail: bool) -> None:
        """
        Wakes one kind of servers (tail or main), after putting the other kind, which must be idle, to sleep. A server
        that fails is lost.
        """
        for asleep in (True, False):
            turns = [url for url, member in self.members.items() if (member.tail != tail) == asleep]
            await asyncio.gather(*(self._set_asleep(url, asleep) for url in turns))

    async def _set_asleep(self, url: str, asleep: bool) -> None:
        member = self.members[url]
        if member.state is not State.UP or member.asleep == asleep:
            return
        member.asleep = None  # stays unknown if the call is interrupted
        self._notify(lambda listener: listener.on_resized(url, 0))
        try:
            await (member.server.sleep() if asleep else member.server.wake_up())
        except FAILURES as error:
            self.lose(url, describe(error, f"`{'/sleep' if asleep else '/wake_up'}` after {TURN_TIMEOUT_S:g} s"))
            return
        if member.state is State.UP:
            member.asleep = asleep
            self._notify(lambda listener: listener.on_resized(url, member.capacity))

    def _notify(self, call: Callable[[Listener], None]) -> None:
        for listener in list(self.listeners):
            call(listener)

    async def _watch(self, url: str) -> None:
        await asyncio.gather(self._begin(url), self._keep_probing(url))

    async def _begin(self, url: str) -> None:
        await self._ask_for_slots(url)
        if self.members[url].state is State.RETURNED:  # a new server
            await self._bring_back(url)

    async def _keep_probing(self, url: str) -> None:
        while True:
            await asyncio.sleep(min(PROBE_INTERVAL_S * self._num_sharing, MAX_PROBE_INTERVAL_S))
            if self._num_sharing > 1 and not self.listeners:
                continue
            try:
                await self._probe(url)
            except Exception:  # one invalid response must not end the probing
                logger.exception("Probing the vLLM server at %s failed. It will be repeated.", url)

    async def _probe(self, url: str) -> None:
        member = self.members[url]
        if not await self._is_healthy(url):
            return
        if member.state is State.DOWN:
            if not await self._end_ghosts(member):
                return
            await self._ask_for_slots(url)
            self._find_logs()
            member.state = State.RETURNED
            self._returning[url] = asyncio.create_task(self._bring_back(url))  # probing continues meanwhile
        elif member.state is State.UP:
            if member.asks_for_slots and (url not in self._asking or self._asking[url].done()):
                self._asking[url] = asyncio.create_task(self._ask_for_slots(url))
            if self.listeners:
                await self._observe(url)

    async def _is_healthy(self, url: str) -> bool:
        """
        Checks a server, which is lost unless it is healthy. A timeout is no judgment if our own loop was late, or if
        the server has sent tokens in the second half of it: it was not frozen when the check began.
        """
        member, start = self.members[url], time.perf_counter()
        try:
            await member.server.get_text("/health", self.deadlines.health_s)
        except FAILURES as error:
            decodes = time.perf_counter() - member.last_progress < self.deadlines.health_s / 2
            has_doubt = decodes or self.lag.was_late_since(start)
            if not ((isinstance(error, TimeoutError) and has_doubt) or is_our_own(error)):
                self.lose(url, describe(error, f"`/health` after {self.deadlines.health_s:g} s"))
            return False
        return True

    async def check(self, url: str) -> bool:
        """
        Checks a server at once, because a request failed on it: whether it is healthy, and not a new process with
        other weights behind the same address. Returns whether it is up.
        """
        if url not in self.members:
            return False
        if url not in self._checks:
            self._checks[url] = asyncio.create_task(self._check(url))
            self._checks[url].add_done_callback(lambda _: self._checks.pop(url, None))
        check = self._checks[url]
        await asyncio.wait({check})
        if not check.cancelled() and check.exception() is not None:
            logger.error("Checking the vLLM server at %s failed.", url, exc_info=check.exception())
        return url in self.members and self.members[url].state is State.UP

    async def _check(self, url: str) -> None:
        member = self.members[url]
        if not await self._is_healthy(url) or member.version == 0 or self.updating.locked():
            return
        try:
            found, own = await member.server.weight_version(), f"v{member.version}"
        except FAILURES as error:
            self.lose(url, describe(error, "`/weight_info`"))
            return
        if found not in (None, own) and not self.updating.locked():
            self.lose(url, f"it has the weights {found!r} instead of {own!r}, so it was restarted")

    async def _end_ghosts(self, member: Member) -> bool:
        """Aborts the requests that a server may still decode since it seemed to be lost. Returns success."""
        try:
            await member.server.abort(member.ghosts)
        except FAILURES as error:
            self.lose(member.server.base_url, describe(error, "`/abort_requests`"))
            return False
        member.ghosts = []
        return True

    async def _bring_back(self, url: str) -> None:
        """Refreshes the weights of a reconnected server and starts using it, or lets it wait for a weight sync."""
        async with self.updating:
            member = self.members[url]
            if member.state is not State.RETURNED:  # a weight sync has handled it
                return
            try:
                fresh = await self._refresh(member, self.version)
            except Exception as error:
                self.lose(url, describe(error, "the weights"))
                return
            if member.state is not State.RETURNED:  # it was lost meanwhile
                return
            suffix = "" if fresh else " and waits for a weight sync"
            logger.warning("The vLLM server at %s has reconnected%s.", url, suffix)
            member.waits = not fresh
            if fresh:
                self.join(url)

    async def _observe(self, url: str) -> None:
        """Reads a server's metrics to detect progress and to adapt its limit."""
        member, before = self.members[url], self.members[url].load
        member.load = load = await server_load(member.server, self.deadlines.health_s)
        if load is None or not self.listeners or member.limit is None:
            return
        if before is not None and load.num_tokens != before.num_tokens:
            member.last_progress = time.perf_counter()
        if load.num_waiting:
            member.last_queued = time.perf_counter()
        capacity = member.capacity
        member.limit.observe(load, self._num_held(url))
        if member.capacity != capacity and member.state is State.UP:
            self._notify(lambda listener: listener.on_resized(url, member.capacity))

    def _find_logs(self) -> None:
        """Starts looking for all servers' logs while they run: after a loss, the process may be gone."""
        self._find_logs_again = True
        if self._finding_logs is None or self._finding_logs.done():
            self._finding_logs = asyncio.create_task(self._keep_finding_logs())

    async def _keep_finding_logs(self) -> None:
        while self._find_logs_again:  # servers that return during a scan need one more, not one each
            self._find_logs_again = False
            for url, log in (await asyncio.to_thread(find_logs, list(self.members))).items():
                if url in self.members:
                    self.members[url].log = log


def is_our_own(error: BaseException) -> bool:
    """Whether a connection failed because this process or machine has too many, which says nothing of the server."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in OWN_ERRORS


def describe(error: BaseException | None, waited_for: str) -> str:
    """Returns a message for an error. `waited_for` describes a timeout, which has no message."""
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
