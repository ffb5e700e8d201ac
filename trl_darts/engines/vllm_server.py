"""
Decoding on vLLM servers: asyncio in one background thread, one request per candidate.

The main thread hands over a scheduler and waits. In the thread, each Submit becomes a task with one HTTP request; each
answer goes to the scheduler as an event; each Abort it returns goes to the server, and the pending answer then arrives
with the tokens so far. When the trainer's process dies, its connections close, and the servers drop what they were
decoding.
"""

import asyncio
import atexit
import concurrent.futures
import resource
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from ..errors import ConfigurationError
from ..scheduling import (
    Abort,
    CandidateEnded,
    CandidateFailed,
    Command,
    EngineLoad,
    EngineLost,
    Event,
    FinishReason,
    GroupPlan,
    RolloutResult,
    Scheduler,
    Submit,
    TokensArrived,
)
from ..scheduling.ledger import Ledger
from .vllm_api import ServerRefusedError, VLLMServer, new_session


T = TypeVar("T")

# A stream costs the server and this thread 3 to 20 times as much per token as one answer at the end; every 16 tokens,
# the difference is gone, and a bounded wait ends at most 16 tokens late.
STREAM_INTERVAL = 16
# An abort can overtake its request: it is sent again until the answer is there.
ABORT_RESEND_S = 0.1
# A server that does not answer an abort is told by closing the connection. What the candidate had is lost then.
ABORT_GRACE_S = 5.0
PROGRESS_INTERVAL_S = 0.1
# File descriptors that are left to the rest of the trainer.
RESERVED_FILES = 512

Overrides = Callable[[Submit], Mapping[str, Any]]


class VLLMServerEngine:
    """
    Runs rollouts on one or several vLLM servers.

    Args:
        base_urls (`Sequence[str]`):
            The servers, for example `["http://localhost:8000"]`. Each candidate goes to the least loaded one.
        request_timeout_s (`float`, *optional*, defaults to `3600.0`):
            Deadline of one candidate, in seconds, waiting for its turn on the server included.
        api_key (`str`, *optional*):
            Sent as bearer token.
    """

    def __init__(
        self, base_urls: Sequence[str], request_timeout_s: float = 3600.0, api_key: str | None = None
    ) -> None:
        if not base_urls:
            raise ConfigurationError("`base_urls` (empty) must name at least one server.")
        self.base_urls = list(base_urls)
        self.request_timeout_s = request_timeout_s
        self.api_key = api_key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trl_darts-engine", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession | None = None
        atexit.register(self.close)

    def run(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        prompts: Mapping[int, Sequence[int]],
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
            prompts (`Mapping[int, Sequence[int]]`):
                Token IDs of each group's prompt, by `group_id`.
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
        """Closes the connections and ends the thread. Safe to call twice."""
        atexit.unregister(self.close)
        if self._loop.is_closed():
            return
        if self._session is not None:
            self._wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = new_session(self.api_key)
        return self._session

    async def _rollout(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        prompts: Mapping[int, Sequence[int]],
        body: Mapping[str, Any],
        overrides: Overrides | None,
    ) -> RolloutResult:
        session = await self._open_session()
        servers = {url: VLLMServer(url, session) for url in self.base_urls}
        run = _Run(scheduler, servers, prompts, body, overrides, self.request_timeout_s)
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
                    if future.done():
                        raise
                    if on_poll is not None:
                        on_poll()
        except BaseException:
            future.cancel()
            raise


class _Run:
    """One rollout in flight: executes the scheduler's commands and reports what comes of them."""

    def __init__(
        self,
        scheduler: Scheduler,
        servers: Mapping[str, VLLMServer],
        prompts: Mapping[int, Sequence[int]],
        body: Mapping[str, Any],
        overrides: Overrides | None,
        request_timeout_s: float,
    ) -> None:
        self.scheduler = scheduler
        self.servers = servers
        self.prompts = prompts
        self.body = body
        self.overrides = overrides
        self.request_timeout_s = request_timeout_s
        self.run_id = uuid.uuid4().hex
        self.requests: dict[int, asyncio.Task[None]] = {}  # by candidate_id
        self.aborting: dict[int, tuple[Abort, float]] = {}  # with the time of the command
        self.aborters: dict[str, asyncio.Task[None]] = {}  # by server
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def execute(self, plans: Sequence[GroupPlan], engines: Sequence[EngineLoad]) -> RolloutResult:
        try:
            self._execute(self.scheduler.start(plans, engines, time.perf_counter()))
            if not self.scheduler.done:
                await self.finished
        finally:
            await self._cancel()
        return self.scheduler.result()

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                self.requests[command.candidate_id] = asyncio.create_task(self._decode(command))
            else:
                self.aborting[command.candidate_id] = (command, time.perf_counter())
                aborter = self.aborters.get(command.engine_id)
                if aborter is None or aborter.done():
                    self.aborters[command.engine_id] = asyncio.create_task(self._abort(command.engine_id))

    def _report(self, event: Event) -> None:
        if self.finished.done():
            return
        try:
            self._execute(self.scheduler.handle(event))
        except Exception as error:  # a policy broke: the thread that waits must hear of it
            self.finished.set_exception(error)
        else:
            if self.scheduler.done:
                self.finished.set_result(None)

    async def _decode(self, command: Submit) -> None:
        candidate_id, segment = command.candidate_id, command.segment
        offset = len(command.prior_tokens)
        try:
            async for chunk in self._chunks(command):
                now, before, offset = time.perf_counter(), offset, offset + len(chunk.tokens)
                if chunk.finish_reason is None:
                    self._report(TokensArrived(candidate_id, segment, before, chunk.tokens, chunk.logprobs, now))
                else:
                    self.aborting.pop(candidate_id, None)
                    reason = FinishReason(chunk.finish_reason)
                    self._report(
                        CandidateEnded(candidate_id, segment, before, chunk.tokens, chunk.logprobs, reason, now)
                    )
        except asyncio.CancelledError:
            if self.aborting.pop(candidate_id, None) is None:
                raise
            self._report(
                CandidateEnded(candidate_id, segment, offset, (), None, FinishReason.ABORT, time.perf_counter())
            )
        except ServerRefusedError as error:
            self._report(CandidateFailed(candidate_id, segment, str(error), time.perf_counter()))
        except asyncio.TimeoutError:
            words = f"no complete answer within `vllm_request_timeout_s` ({self.request_timeout_s:g} s)"
            self._report(CandidateFailed(candidate_id, segment, words, time.perf_counter()))
        except aiohttp.ClientError as error:
            words = f"{type(error).__name__}: {error}"
            self._report(EngineLost(command.engine_id, words, time.perf_counter()))
        except Exception as error:  # an answer that makes no sense is the server's failure, not a hang
            words = f"the answer could not be read ({type(error).__name__}: {error})"
            self._report(CandidateFailed(candidate_id, segment, words, time.perf_counter()))

    async def _chunks(self, command: Submit) -> Any:
        server, body = self.servers[command.engine_id], self._request_body(command)
        if self.scheduler.needs_progress:
            async for chunk in server.stream(body, STREAM_INTERVAL, self.request_timeout_s):
                yield chunk
        else:
            yield await server.complete(body, self.request_timeout_s)

    def _request_body(self, command: Submit) -> dict[str, Any]:
        body = {**self.body, **(self.overrides(command) if self.overrides else {})}
        body["request_id"] = self._request_id(command)
        body["prompt"] = [*self.prompts[command.group_id], *command.prior_tokens]
        body["max_tokens"] -= len(command.prior_tokens)
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - len(command.prior_tokens))
        if body.get("seed") is not None:
            # Without this, the candidates of a prompt would be copies of each other. The offsets are those by which
            # the server itself tells the n samples of a request apart; a resumed one must not replay its random
            # numbers.
            body["seed"] += command.index + 1_000_003 * command.segment
        return body

    def _request_id(self, command: Submit | Abort) -> str:
        return f"{self.run_id}-{command.candidate_id}-{command.segment}"

    async def _abort(self, engine_id: str) -> None:
        while pending := [(c, since) for c, since in self.aborting.values() if c.engine_id == engine_id]:
            try:
                supported = await self.servers[engine_id].abort([self._request_id(c) for c, _ in pending])
            except (ServerRefusedError, aiohttp.ClientError, asyncio.TimeoutError):
                supported = False
            deadline = time.perf_counter() - ABORT_GRACE_S
            for command, since in pending:
                if not supported or since < deadline:
                    self.requests[command.candidate_id].cancel()
            await asyncio.sleep(ABORT_RESEND_S)

    async def _cancel(self) -> None:
        """Closes what is still open, so that no server goes on decoding for nobody."""
        self.aborting.clear()
        if not self.finished.done():
            self.finished.cancel()
        tasks = [task for task in [*self.requests.values(), *self.aborters.values()] if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def max_open_files() -> int:
    """How many connections this process can hold: its limit of open files, raised as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, soft - RESERVED_FILES)
