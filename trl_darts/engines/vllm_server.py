"""
Decoding on vLLM servers: asyncio in one background thread, one request per candidate.

The main thread hands over a scheduler and waits, at once or later. In the thread, each Submit becomes a task with one
HTTP request; each answer goes to the scheduler as an event; each Abort it returns goes to the server, and the pending
answer then arrives with the tokens so far. When the trainer's process dies, its connections close, and the servers
drop what they were decoding. A server that was lost and answers again is brought back by the pool, also while the main
thread is busy.
"""

import asyncio
import resource
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

from ..errors import ConfigurationError
from ..scheduling import GroupPlan, RolloutResult, Scheduler
from ..scheduling.ledger import Ledger
from .deadlines import Deadlines
from .pool import Member, Refresh, ServerPool, State, has_loaded_weights
from .vllm_api import ServerPrompt, VLLMServer, new_session
from .vllm_rollout import Overrides, RolloutRun


T = TypeVar("T")

PROGRESS_INTERVAL_S = 0.1
# The loop may be busy reading an answer; it is not waited for longer than this.
SHUTDOWN_S = 5.0
# File descriptors that are left to the rest of the trainer.
RESERVED_FILES = 512


class VLLMServerEngine:
    """
    Runs rollouts on one or several vLLM servers. Each prompt goes to the least loaded one that has room.

    `tail_urls` are those of `base_urls` that are of another layout, and take over what is left. With `takes_turns`
    they are on the others' GPUs, and asleep until these sleep. `refresh` is that of [`ServerPool`].
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        deadlines: Deadlines | None = None,
        api_key: str | None = None,
        tail_urls: Collection[str] = (),
        takes_turns: bool = False,
        refresh: Refresh = has_loaded_weights,
    ) -> None:
        if not base_urls:
            raise ConfigurationError("`base_urls` (empty) must name at least one server.")
        self.base_urls = list(base_urls)
        self.deadlines = deadlines or Deadlines()
        self._api_key = api_key
        self._options = tail_urls, takes_turns, refresh
        self._pool: ServerPool | None = None  # made by the loop
        self._turn = asyncio.Lock()  # servers run one rollout at a time, its end included
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trl_darts-engine", daemon=True)
        self._thread.start()
        self._sessions: list[aiohttp.ClientSession] = []  # one, once the loop has made it
        # Also at the interpreter's exit; holds no reference to the engine, so that a trainer can be dropped.
        self._tasks: set[asyncio.Task[Any]] = set()  # that run, or end what they have begun
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._thread, self._sessions, self._tasks)

    def run(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        prompts: Sequence[Sequence[ServerPrompt]],
        body: Mapping[str, Any],
        overrides: Overrides | None = None,
        on_progress: Callable[[Ledger], None] | None = None,
    ) -> RolloutResult:
        """
        Runs one rollout and waits for it: [`start`], then [`wait`].

        `prompts`, of shape `(N, 1)` or `(N, M)`, has the prompt of each group by `group_id`, or of each of its
        candidates where they differ. `body` are fields of the completion requests: `model`, `max_tokens`, sampling
        options; `overrides` gives more of them for one candidate. `on_progress` is called ten times a second with the
        scheduler's ledger. [`GenerationError`], with the server's own words, if one refuses a candidate, breaks or is
        too slow.
        """
        rollout = self.start(scheduler, plans, prompts, body, overrides)
        return self.wait(rollout, None if on_progress is None else lambda: on_progress(scheduler.ledger))

    def start(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        prompts: Sequence[Sequence[ServerPrompt]],
        body: Mapping[str, Any],
        overrides: Overrides | None = None,
    ) -> Future[RolloutResult]:
        """Starts a rollout, and returns at once. To cancel what it returns ends all of its requests."""

        async def rollout() -> RolloutResult:
            pool = await self.pool()
            pool.watch()
            async with self._turn:
                return await RolloutRun(scheduler, pool, prompts, body, overrides, self.deadlines).execute(plans)

        return self.submit(rollout())

    async def idle(self) -> None:
        """Waits until no rollout is under way; one that was cancelled may still be ending its requests."""
        async with self._turn:
            pass

    @property
    def members(self) -> dict[str, Member]:
        """What is known of each server, to be read."""
        pool = self._pool or self.call(self.pool())
        return dict(pool.members)

    def states(self) -> dict[str, State]:
        return {url: member.state for url, member in self.members.items()}

    @property
    def num_losses(self) -> int:
        return sum(member.num_losses for member in self.members.values())

    def lose(self, url: str, reason: str) -> None:
        """Takes a server out until it answers again, for example one that does not take new weights."""
        self._in_loop(lambda pool: pool.lose(url, reason))

    def join(self, url: str) -> None:
        """Uses a server again that has come back, and has been given the current weights."""
        self._in_loop(lambda pool: pool.join(url))

    def follow(self, version: int, up: Collection[str]) -> None:
        """Takes over from the main process which servers have the weights of the last sync, and their version."""
        self._in_loop(lambda pool: pool.follow(version, up))

    @property
    def up(self) -> tuple[int, list[str]]:
        """What another process follows."""
        pool = self.call(self.pool())
        return pool.version, pool.urls(State.UP)

    def drain(self, url: str, draining: bool = True) -> None:
        """Sends a server no new candidates, or some again; those that it decodes go on."""
        self._in_loop(lambda pool: pool.drain(url, draining))

    def add(self, url: str, check: Callable[[VLLMServer], Coroutine[Any, Any, T]]) -> T:
        """
        Adds a server and returns what `check` says of it. It is used once it has the current
        weights, see `join`. Raises [`ConfigurationError`] if it is one of the servers already, or what `check` raises.
        """
        if url in self.base_urls:
            raise ConfigurationError(f"`url` ({url!r}) is one of the servers already. Each address once.")

        async def run() -> T:
            pool = await self.pool()
            server = VLLMServer(url, self._sessions[0], self.deadlines.connect_s)
            answer = await check(server)
            pool.add(url, server)
            return answer

        answer = self.call(run())
        self.base_urls.append(url)
        return answer

    def remove(self, url: str) -> None:
        """
        Forgets a server; what it decodes goes on elsewhere. Raises [`ConfigurationError`] if it is none of them, or
        the last.
        """
        if url not in self.base_urls or len(self.base_urls) == 1:
            raise ConfigurationError(
                f"`url` ({url!r}) must be one of several servers. Those of this training are "
                f"{', '.join(map(repr, self.base_urls))}."
            )
        self._in_loop(lambda pool: pool.remove(url))
        self.base_urls.remove(url)

    def _in_loop(self, act: Callable[[ServerPool], None]) -> None:
        async def run() -> None:
            act(await self.pool())

        self.call(run())

    def query(self, function: Callable[[VLLMServer], Coroutine[Any, Any, T]]) -> list[T]:
        """Runs `function` on each server at the same time and returns the answers in order."""

        async def ask() -> list[T]:
            members = (await self.pool()).members.values()
            return list(await asyncio.gather(*(function(member.server) for member in members)))

        return self.call(ask())

    def close(self) -> None:
        """Closes the connections and ends the thread. Safe to call twice; an engine that is dropped closes itself."""
        self._finalizer()

    async def pool(self) -> ServerPool:
        """The record of its servers; for the loop."""
        if self._pool is None:
            session = new_session(self._api_key)
            self._sessions.append(session)
            servers = {url: VLLMServer(url, session, self.deadlines.connect_s) for url in self.base_urls}
            self._pool = ServerPool(servers, self.deadlines, max_open_files(), *self._options)
        return self._pool

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop, and waits for it."""
        return self.wait(self.submit(coroutine))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the engine's loop; once it is cancelled, it may still end what it has begun."""

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                return await coroutine
            finally:
                self._tasks.discard(task)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def wait(self, future: Future[T], on_poll: Callable[[], None] | None = None) -> T:
        """
        Waits in the calling thread for what was started; whatever interrupts it (Ctrl-C) ends that, and its requests.
        """
        try:
            while True:
                try:
                    return future.result(timeout=None if on_poll is None else PROGRESS_INTERVAL_S)
                except TimeoutError:
                    if future.done():  # between the timeout and here; or it failed with a timeout of its own
                        return future.result()
                    if on_poll is not None:
                        on_poll()
        except BaseException:
            future.cancel()
            raise


def _shut_down(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    sessions: list[aiohttp.ClientSession],
    tasks: set[asyncio.Task[Any]],
) -> None:
    async def close() -> None:
        for task in tasks:
            if not task.cancelling():  # it may be aborting its requests: a second time would interrupt that
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}  # what looks after the servers
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for session in sessions:
            await session.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)
    if threading.current_thread() is not thread:  # garbage can be collected anywhere
        thread.join(timeout=SHUTDOWN_S)
        if not thread.is_alive():
            loop.close()


def max_open_files() -> int:
    """How many connections this process can hold: its limit of open files, raised as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, soft - RESERVED_FILES)
