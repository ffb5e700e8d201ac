"""
Decoding on vLLM servers: asyncio in one background thread, one request per candidate.

The main thread hands over a scheduler and waits. In the thread, each Submit becomes a task with one HTTP request; each
answer goes to the scheduler as an event; each Abort it returns goes to the server, and the pending answer then arrives
with the tokens so far. When the trainer's process dies, its connections close, and the servers drop what they were
decoding.
"""

import asyncio
import concurrent.futures
import resource
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from ..errors import ConfigurationError
from ..scheduling import (
    EngineLoad,
    GroupPlan,
    RolloutResult,
    Scheduler,
)
from ..scheduling.ledger import Ledger
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
    Runs rollouts on one or several vLLM servers.

    Args:
        base_urls (`Sequence[str]`):
            The servers, for example `["http://localhost:8000"]`. Each candidate goes to the least loaded one.
        request_timeout_s (`float`, *optional*, defaults to `3600.0`):
            Deadline of one candidate, in seconds, waiting for its turn on the server included.
    """

    def __init__(self, base_urls: Sequence[str], request_timeout_s: float = 3600.0) -> None:
        if not base_urls:
            raise ConfigurationError("`base_urls` (empty) must name at least one server.")
        self.base_urls = list(base_urls)
        self.request_timeout_s = request_timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trl_darts-engine", daemon=True)
        self._thread.start()
        self._sessions: list[aiohttp.ClientSession] = []  # one, once the loop has made it
        # Also at the interpreter's exit; holds no reference to the engine, so that a trainer can be dropped.
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._thread, self._sessions)

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
        Runs one rollout and waits for it.

        Args:
            scheduler ([`Scheduler`]):
                A new one.
            plans (`Sequence[GroupPlan]`):
                The groups.
            prompts (`Sequence[Sequence[ServerPrompt]]` of shape `(N, 1)` or `(N, M)`):
                The prompt of each group, by `group_id`, or of each of its candidates where they differ.
            body (`Mapping[str, Any]`):
                Fields of the completion requests: `model`, `max_tokens`, sampling options.
            overrides (`Callable`, *optional*):
                Gives more fields for one candidate. Benchmarks replay lengths with it.
            on_progress (`Callable`, *optional*):
                Called ten times a second with the scheduler's ledger.

        Returns:
            [`RolloutResult`]: The groups with their rows.

        Raises:
            [`GenerationError`]: If a server refuses a candidate, breaks or is too slow. The message has its own words.
        """
        return self._wait(
            self._rollout(scheduler, plans, prompts, body, overrides),
            None if on_progress is None else lambda: on_progress(scheduler.ledger),
        )

    def query(self, function: Callable[[VLLMServer], Coroutine[Any, Any, T]]) -> list[T]:
        """Runs `function` on each server at the same time and returns the answers in order."""

        async def ask() -> list[T]:
            session = await self._open_session()
            return list(await asyncio.gather(*(function(VLLMServer(url, session)) for url in self.base_urls)))

        return self._wait(ask())

    def close(self) -> None:
        """Closes the connections and ends the thread. Safe to call twice; an engine that is dropped closes itself."""
        self._finalizer()

    async def _open_session(self) -> aiohttp.ClientSession:
        if not self._sessions:
            self._sessions.append(new_session())
        return self._sessions[0]

    async def _rollout(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        prompts: Sequence[Sequence[ServerPrompt]],
        body: Mapping[str, Any],
        overrides: Overrides | None,
    ) -> RolloutResult:
        session = await self._open_session()
        servers = {url: VLLMServer(url, session) for url in self.base_urls}
        run = RolloutRun(scheduler, servers, prompts, body, overrides, self.request_timeout_s)
        capacity = max(1, max_open_files() // len(servers))
        return await run.execute(plans, [EngineLoad(url, capacity) for url in servers])

    def _wait(self, coroutine: Coroutine[Any, Any, T], on_poll: Callable[[], None] | None = None) -> T:
        """
        Waits in the calling thread; whatever interrupts it (Ctrl-C) ends the coroutine, and with it the requests.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=None if on_poll is None else PROGRESS_INTERVAL_S)
                except concurrent.futures.TimeoutError:
                    if future.done():  # between the timeout and here; or it failed with a timeout of its own
                        return future.result()
                    if on_poll is not None:
                        on_poll()
        except BaseException:
            future.cancel()
            raise


def _shut_down(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, sessions: list[aiohttp.ClientSession]
) -> None:
    async def close() -> None:
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
