"""
Decodes on vLLM servers with asyncio in one background thread, and one stream per candidate.

The main thread passes a scheduler and waits, at once or later. In the background thread, each Submit becomes a task
that reads a stream, alone in its HTTP request or with others, and each chunk an event for the scheduler. Each Abort is
sent to the server, and the pending stream then ends with the tokens so far. If the trainer's process dies, its
connections close, and the servers drop its requests. The pool reconnects lost servers, also while the main thread is
busy.
"""

import asyncio
import resource
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import aiohttp

from ..errors import ConfigurationError
from ..scheduling import GroupPlan, RolloutResult, Scheduler
from ..scheduling.ledger import Ledger
from .continuous_run import ContinuousRun
from .discovery import Discovery
from .engine import OnGroup
from .monitor import Check, Monitor, Refresh, has_loaded_weights
from .pool import RESERVED_FILES, Member, ServerPool, State
from .prefixes import VerifiedPrefixes
from .sampling import RolloutSeed
from .turns import TurnRun
from .vllm_api import ServerPrompt, VLLMServer, new_session
from .vllm_rollout import Overrides, RolloutRun
from .waiting import Deadlines


T = TypeVar("T")

PROGRESS_INTERVAL_S = 0.1
SHUTDOWN_S = 5.0  # longest wait for the loop at shutdown, longer than what runs before the connections close


class VLLMServerEngine:
    """
    Runs rollouts on one or several vLLM servers. Each prompt goes to the least loaded server with room.

    `tail_urls` are the tail servers among `base_urls`. Set `takes_turns` if they share the main servers' GPUs, so that
    one kind sleeps while the other decodes. `refresh` and `num_sharing` are those of [`Monitor`].
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        deadlines: Deadlines | None = None,
        api_key: str | None = None,
        tail_urls: Collection[str] = (),
        takes_turns: bool = False,
        refresh: Refresh = has_loaded_weights,
        num_sharing: int = 1,
    ) -> None:
        if not base_urls:
            raise ConfigurationError("`base_urls` (empty) must name at least one server.")
        self._urls = list(base_urls)  # at the start
        self.deadlines = deadlines or Deadlines()
        self._api_key = api_key
        self._options = (tail_urls, takes_turns), (refresh, num_sharing)  # of the pool and of its monitor
        self._monitor: Monitor | None = None  # created in the loop
        self._turn = asyncio.Lock()  # one rollout at a time, including its cleanup
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trl_darts-engine", daemon=True)
        self._thread.start()
        self._sessions: list[aiohttp.ClientSession] = []  # has one entry after the loop has created it
        self._tasks: set[asyncio.Task[Any]] = set()  # running, or cleaning up
        self._last_calls: list[Callable[[], Coroutine[Any, Any, None]]] = []
        # Called at the interpreter's exit too. It holds no reference to the engine, so that a trainer can be freed.
        self._finalizer = weakref.finalize(
            self, _shut_down, self._loop, self._thread, self._sessions, self._tasks, self._last_calls
        )

    def run(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        prompts: Mapping[int, Sequence[ServerPrompt]],
        body: Mapping[str, Any],
        overrides: Overrides | None = None,
        on_progress: Callable[[Ledger], None] | None = None,
        seed: RolloutSeed | None = None,
        reuse: VerifiedPrefixes | None = None,
    ) -> RolloutResult:
        """
        Runs one rollout and waits for it: [`start`], then [`wait`].

        `prompts` has one prompt per group, by its ID, or one per row of a group (M). `body` has fields of the
        completion requests: `model`, `max_tokens` and sampling options. `overrides` returns further fields for one
        candidate. `on_progress` is called ten times a second with the scheduler's ledger. `seed` is for the
        candidates' seeds, where servers would sample alike. `reuse` has earlier answers, with which groups begin.
        Raises [`GenerationError`] with the server's message if a server rejects a candidate, fails or is too slow.
        """
        rollout = self.start(scheduler, plans, prompts, body, overrides, seed, reuse)
        return self.wait(rollout, None if on_progress is None else lambda: on_progress(scheduler.ledger))

    def start(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        prompts: Mapping[int, Sequence[ServerPrompt]],
        body: Mapping[str, Any],
        overrides: Overrides | None = None,
        seed: RolloutSeed | None = None,
        reuse: VerifiedPrefixes | None = None,
    ) -> Future[RolloutResult]:
        """Starts a rollout and returns its future at once. Cancelling the future ends all of its requests."""

        async def rollout() -> RolloutResult:
            monitor = await self.monitor()
            monitor.start()
            async with self._turn:
                run = RolloutRun(scheduler, monitor, prompts, body, overrides, self.deadlines, seed, reuse)
                return await run.execute(plans)

        return self.submit(rollout())

    def open(
        self,
        scheduler: Scheduler,
        body: Mapping[str, Any],
        overrides: Overrides | None,
        step: int,
        keeps_kv: bool,
        seed: RolloutSeed | None = None,
        on_group: OnGroup | None = None,
    ) -> tuple[ContinuousRun, Future[RolloutResult]]:
        """
        Starts a rollout without an end, with weights of a `step`. Cancelling the future ends its requests. `on_group`
        is called in the engine's thread with each group whose rows are selected.
        """

        async def begin() -> ContinuousRun:
            monitor = await self.monitor()
            monitor.start()
            deadlines = self.deadlines
            return ContinuousRun(scheduler, monitor, body, overrides, deadlines, step, keeps_kv, seed, on_group)

        run = self.call(begin())
        return run, self.submit(run.execute([]))

    def open_turns(
        self, num_conversations: int, carries_tokens: bool, body: Mapping[str, Any], seed: RolloutSeed
    ) -> tuple[TurnRun, Future[RolloutResult]]:
        """Starts a rollout without an end whose groups are turns of conversations. Cancelling the future ends it."""

        async def begin() -> TurnRun:
            monitor = await self.monitor()
            monitor.start()
            return TurnRun(num_conversations, carries_tokens, monitor, body, self.deadlines, seed)

        run = self.call(begin())
        return run, self.submit(run.execute([]))

    async def idle(self) -> None:
        """Waits until no rollout is running but one without an end. A cancelled one may be ending its requests."""
        async with self._turn:
            pass
        await asyncio.gather(*(task for task in self._tasks if task.cancelling()), return_exceptions=True)

    @property
    def base_urls(self) -> list[str]:
        """Addresses of the servers, which can be added and removed."""
        return list(self._urls if self._monitor is None else self._monitor.pool.members)

    @property
    def members(self) -> dict[str, Member]:
        """State of each server, read-only."""
        monitor = self._monitor or self.call(self.monitor())
        return dict(monitor.pool.members)

    def states(self) -> dict[str, State]:
        return {url: member.state for url, member in self.members.items()}

    @property
    def num_losses(self) -> int:
        return sum(member.num_losses for member in self.members.values())

    def lose(self, url: str, reason: str) -> None:
        """Stops using a server until it answers again, for example after a failed weight update."""
        self._in_loop(lambda monitor: monitor.pool.lose(url, reason))

    def join(self, url: str) -> None:
        """Starts using a reconnected server that has the current weights."""
        self._in_loop(lambda monitor: monitor.pool.join(url))

    def use_adapters(self, name: str) -> None:
        """Makes weights LoRA adapters, see [`ServerPool`]."""
        self._in_loop(lambda monitor: monitor.pool.use_adapters(name))

    def follow(self, version: int, has_weights: Mapping[str, bool]) -> None:
        """Copies the state from the main process: the version, the servers, and which of them have its weights."""
        self._in_loop(lambda monitor: monitor.follow(version, has_weights))

    def discover(self, discovery: Discovery) -> None:
        """Has servers added and removed by a list, until the engine is closed."""
        monitor = self.call(self.monitor())  # it has no reference to the engine, so that it can be freed
        asyncio.run_coroutine_threadsafe(discovery.run(monitor), self._loop)

    @property
    def state(self) -> tuple[int, dict[str, bool]]:
        """Arguments of `follow` on the other processes."""
        pool = self.call(self.pool())
        return pool.version, {url: member.state is State.UP for url, member in pool.members.items()}

    def drain(self, url: str, draining: bool = True) -> None:
        """Stops or resumes sending candidates to a server. Running candidates continue."""
        self._in_loop(lambda monitor: monitor.pool.drain(url, draining))

    def add(self, url: str, check: Check) -> None:
        """
        Adds a server, see [`Monitor.admit`]. Raises [`ConfigurationError`] if it is one of the servers already, or
        the exception of `check`.
        """
        if url in self.base_urls:
            raise ConfigurationError(f"`url` ({url!r}) must not be one of the servers already. Use another address.")

        async def join() -> None:
            await (await self.monitor()).admit(url, check)

        self.call(join())

    def remove(self, url: str) -> None:
        """
        Removes a server. Its candidates continue on other servers. Raises [`ConfigurationError`] if it is not one of
        the servers, or the last one.
        """
        if url not in self.base_urls or len(self.base_urls) == 1:
            raise ConfigurationError(
                f"`url` ({url!r}) must be one of several servers. This run has {', '.join(map(repr, self.base_urls))}."
            )

        async def leave() -> None:
            monitor = await self.monitor()
            async with monitor.pool.updating:  # an update looks its servers up until its end
                monitor.remove(url)

        self.call(leave())

    def _in_loop(self, act: Callable[[Monitor], None]) -> None:
        async def run() -> None:
            act(await self.monitor())

        self.call(run())

    def query(self, function: Callable[[VLLMServer], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Runs `function` on all servers in parallel and returns the results by address."""

        async def ask() -> dict[str, T]:
            members = dict((await self.pool()).members)
            answers = await asyncio.gather(*(function(member.server) for member in members.values()))
            return dict(zip(members, answers, strict=True))

        return self.call(ask())

    def before_close(self, last_call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Has `last_call` run before the connections close. It must be short, and hold no reference to the engine."""
        self._last_calls.append(last_call)

    def close(self) -> None:
        """Closes the connections and ends the thread. Can be called twice. A freed engine closes itself."""
        self._finalizer()

    async def pool(self) -> ServerPool:
        """Returns the pool of servers. Must be called in the loop."""
        return (await self.monitor()).pool

    async def monitor(self) -> Monitor:
        """Returns the monitor of the servers. Must be called in the loop."""
        if self._monitor is None:
            session = new_session(self._api_key)
            self._sessions.append(session)
            connect = partial(VLLMServer, session=session, connect_timeout_s=self.deadlines.connect_s)
            of_pool, of_monitor = self._options
            pool = ServerPool({url: connect(url) for url in self._urls}, max_open_files(), *of_pool)
            self._monitor = Monitor(pool, connect, self.deadlines, *of_monitor)
        return self._monitor

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop, and waits for it."""
        return self.wait(self.submit(coroutine))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the engine's loop. After a cancellation, it may still clean up."""

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
        """Waits for a future in the calling thread. An interruption such as Ctrl-C cancels the future."""
        try:
            while True:
                try:
                    return future.result(timeout=None if on_poll is None else PROGRESS_INTERVAL_S)
                except TimeoutError:
                    if future.done():  # just now, or the coroutine raised a TimeoutError itself
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
    last_calls: Sequence[Callable[[], Coroutine[Any, Any, None]]],
) -> None:
    async def close() -> None:
        for task in tasks:
            if not task.cancelling():  # a second cancellation would interrupt its cleanup
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}  # tasks that monitor the servers
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(call() for call in last_calls), return_exceptions=True)
        for session in sessions:
            await session.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)
    if threading.current_thread() is not thread:  # the finalizer can run in any thread
        thread.join(timeout=SHUTDOWN_S)
        if not thread.is_alive():
            loop.close()


def max_open_files() -> int:
    """Raises the limit of open files as far as allowed, and returns the number of connections it permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, soft - RESERVED_FILES)
