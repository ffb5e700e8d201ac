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
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ..scheduling.concurrency import ConcurrencyLimit, ServerLoad
from .failures import FAILURES, describe
from .opener import Opener
from .server_abilities import Sampling
from .server_log import ServerLogs, explain
from .vllm_api import TURN_TIMEOUT_S, VLLMServer


RESERVED_FILES = 512  # file descriptors reserved for the rest of the trainer


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

    def on_updated(self, url: str, num_outputs: Mapping[str, int] | None) -> None:
        """
        Called when a server has new weights, before it continues. `num_outputs` has the tokens of its unfinished
        requests by ID, `None` if these keep their weights.
        """
        ...

    def versions_on(self, url: str) -> set[int]:
        """Returns the versions of the weights that a server's requests decode with."""
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
    load: ServerLoad | None = None  # latest metrics; `None` if it has none
    last_progress: float = 0.0  # last sign of decoding, by `time.perf_counter`
    last_queued: float = 0.0  # last time that requests waited in its queue, including preempted ones
    sampling: Sampling | None = None  # as `limit`, queried with it
    asks_for_slots: bool = False  # whether the query failed, and will be repeated
    refuses_since: float | None = None  # time since when it has refused all requests because it is busy
    refusal: str = ""  # its message
    ghosts: list[str] = field(default_factory=list)  # requests of its last loss, which it may still decode
    adapter: str | None = None  # as the pool's

    def __post_init__(self) -> None:
        self.opener = Opener(self.server, self._note_accepted)

    def _note_accepted(self) -> None:
        self.refuses_since = None

    @property
    def capacity(self) -> int:
        """Most candidates at once."""
        return 0 if self.draining or self.asleep is not False or self.limit is None else int(self.limit)

    @property
    def decodes(self) -> bool:
        """Whether the server is up and awake."""
        return self.state is State.UP and self.asleep is False

    def model_name(self, version: int) -> str | None:
        """Returns the model that requests name for a version, `None` for the one that the server was started with."""
        return f"{self.adapter}-v{version}" if self.adapter is not None and version else None

    async def shown_version(self) -> str | None:
        """Returns the version of the weights that the server itself shows, `None` if it does not support versions."""
        if (name := self.model_name(self.version)) is None:
            return await self.server.weight_version()
        return f"v{self.version}" if name in await self.server.adapters() else "default"


class ServerPool:
    """The servers of an engine. Outside the event loop, it may only be read. A [`Monitor`] watches them."""

    def __init__(
        self,
        servers: Mapping[str, VLLMServer],
        most: int,
        tail_urls: Collection[str] = (),
        takes_turns: bool = False,
    ) -> None:
        self._asleep_at_first = None if takes_turns else False  # also after a reconnect, perhaps as a new process
        self.members = {
            url: Member(server, url in tail_urls, asleep=self._asleep_at_first) for url, server in servers.items()
        }
        self.takes_turns = takes_turns  # whether main and tail servers share GPUs
        self.version = 0  # of the last weight sync
        self.adapter: str | None = None  # name of the run, if its weights are LoRA adapters, one for each version
        self.updating = asyncio.Lock()  # one weight update at a time: a sync, or that of a reconnected server
        self.listeners: list[Listener] = []  # the running rollouts
        self.logs = ServerLogs()
        self._requests = 0.0, 0.0  # ours and all, summed over metrics of the servers while rollouts ran
        self._most = most
        self._warned_of_files = False
        self._has_warned = False  # of servers that sample alike

    def urls(self, state: State) -> list[str]:
        """Returns the addresses of the servers in a state."""
        return [url for url, member in self.members.items() if member.state is state]

    def add(self, server: VLLMServer) -> None:
        """Adds a server that was checked, but does not have our weights yet."""
        first = Member(server, False, None, State.RETURNED, "it is new", asleep=self._asleep_at_first)
        first.adapter = self.adapter
        self.members[server.base_url] = first
        self._share_connections()

    def remove(self, url: str) -> None:
        """Removes a server. Its candidates continue on other servers."""
        if self.listeners:
            self.lose(url, "it was removed")
        del self.members[url]
        self._share_connections()

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

    def guess_slots(self, url: str) -> None:
        """Sets the slots of a server that did not say: as before, or as many as those of the other servers."""
        member = self.members[url]
        member.asks_for_slots = True
        if member.limit is None:
            self._set_slots(url, self._usual_slots)

    def note_slots(self, url: str, slots: int | None) -> None:
        """Sets the slots of a server that did say, or has no limit, and of those which did not."""
        self.members[url].asks_for_slots = False
        self._warn_of_siblings()
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

    def may_share(self, url: str) -> bool:
        """Whether candidates can share a request to a server. One of unknown sampling needs a seed in each."""
        own = self.members[url].sampling
        return own is not None and own.seed is not None

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
        reason = explain(reason, self.logs.paths.get(url))
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

    def num_held(self, url: str) -> int:
        """Returns the number of our candidates on a server."""
        return sum(listener.num_held(url) for listener in self.listeners)

    async def report_update(self, member: Member) -> None:
        """Tells running rollouts how many tokens were sampled before the update of a server, which is still paused."""
        url = member.server.base_url
        member.decodes_version = self.version
        if member.limit is not None:
            member.limit.rebase()
        num_outputs = await member.server.num_outputs() if self.num_held(url) else {}
        self._notify(lambda listener: listener.on_updated(url, num_outputs))

    def use_adapters(self, name: str) -> None:
        """Makes weights LoRA adapters, which are named after the run and their version."""
        self.adapter = name
        for member in self.members.values():
            member.adapter = name

    async def report_adapter(self, member: Member) -> None:
        """Has new requests of a server decode with the adapter of the current version, which it has loaded."""
        member.decodes_version = self.version
        self._notify(lambda listener: listener.on_updated(member.server.base_url, None))

    def versions_on(self, url: str) -> set[int]:
        """Returns the versions that requests on a server name, or could name while rollouts run."""
        current = {self.members[url].decodes_version} if self.listeners else set()
        return current.union(*(listener.versions_on(url) for listener in self.listeners))

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

    def note_load(self, url: str, load: ServerLoad | None, num_before: int = 0) -> None:
        """
        Detects progress in a server's new metrics, and adapts its limit to them. `num_before` is the number of our
        candidates when they were requested, some of which may have ended since.
        """
        member, before = self.members[url], self.members[url].load
        member.load = load
        if load is None or not self.listeners or member.limit is None:
            return
        if before is not None and load.num_tokens != before.num_tokens:
            member.last_progress = time.perf_counter()
        if load.num_waiting:
            member.last_queued = time.perf_counter()
        capacity, num_held = member.capacity, self.num_held(url)
        (own, total), on_server = self._requests, load.num_running + load.num_waiting
        own += min(max(num_held, num_before), on_server)  # others may still be on their way
        self._requests = own, total + on_server
        member.limit.observe(load, num_held)
        if member.capacity != capacity and member.state is State.UP:
            self._notify(lambda listener: listener.on_resized(url, member.capacity))

    def pop_share(self) -> float | None:
        """Returns the share of our candidates in the servers' requests since the last call, `None` if unknown."""
        (own, total), self._requests = self._requests, (0.0, 0.0)
        return own / total if total else None
