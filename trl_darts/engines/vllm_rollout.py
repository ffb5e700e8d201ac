"""
One rollout on vLLM servers, inside the engine's event loop: each Submit is a task with one streamed request, each
chunk an event, and each Abort makes the pending answer end with the tokens so far.

Whatever is wrong with a server takes it out of the pool. Its candidates go on elsewhere from the tokens that have
arrived, or wait until it is back with the current weights. What is wrong with a request is the rollout's failure.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from ..errors import GenerationError, GenerationTimeoutError
from ..scheduling import (
    Abort,
    CandidateEnded,
    CandidateFailed,
    Command,
    EngineJoined,
    EngineLoad,
    EngineLost,
    EngineResized,
    Event,
    FinishReason,
    GroupPlan,
    RolloutExpired,
    RolloutResult,
    Scheduler,
    Submit,
    TakeTurns,
    TokensArrived,
)
from ..waiting import Waiting
from .deadlines import Deadlines
from .pool import ServerPool, State, describe
from .vllm_api import Chunk, CompletionRequest, ServerBrokenError, ServerPrompt, ServerRefusedError


# A stream costs the server and this thread 3 to 20 times as much per token as one answer at the end; every 16 tokens,
# the difference is gone. A bounded wait ends at most 16 tokens late, and a lost server takes at most 16 tokens along.
STREAM_INTERVAL = 16
# An abort can overtake its request: it is sent again until the answer is there.
ABORT_RESEND_S = 0.1
# A server that does not answer an abort is told by closing the connection. What the candidate had is lost then.
ABORT_GRACE_S = 5.0
# The same at the end of a rollout that failed, for one answer: one that is busy takes half a second.
END_S = 2.0
# A candidate whose tokens are late for the third time in a row is late because of itself.
MAX_STALLS = 2
CLOCK_S = 0.1

Overrides = Callable[[Submit], Mapping[str, Any]]
Key = tuple[int, int]  # (candidate_id, segment): a candidate that moves to another server is another request


class RolloutRun:
    """One rollout in flight: executes the scheduler's commands and reports what comes of them."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: ServerPool,
        prompts: Sequence[Sequence[ServerPrompt]],
        body: Mapping[str, Any],
        overrides: Overrides | None,
        deadlines: Deadlines,
    ) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.prompts = prompts
        self.body = body
        self.overrides = overrides
        self.deadlines = deadlines
        self.run_id = uuid.uuid4().hex
        self.requests: dict[Key, asyncio.Task[None]] = {}
        self.aborting: dict[Key, tuple[Abort, float]] = {}  # with the time of the command
        self.internal_ids: dict[Key, str] = {}
        self.engine_of: dict[Key, str] = {}
        self.aborters: dict[str, asyncio.Task[None]] = {}  # by server
        self.tail_turn = False  # whether its servers decode, where the two kinds take turns
        self.turns: asyncio.Task[None] | None = None
        self.tokens = Waiting(deadlines.first_token_s)  # the next ones
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def execute(self, plans: Sequence[GroupPlan]) -> RolloutResult:
        """Runs it to its end."""
        if self.pool.takes_turns:
            await self.pool.take_turns(tail=False)
        members = self.pool.members
        engines = [EngineLoad(url, members[url].capacity, tail=members[url].tail) for url in self.pool.urls(State.UP)]
        self.pool.listener = self
        clock = asyncio.create_task(self._keep_time())
        try:
            self._execute(self.scheduler.start(plans, engines, time.perf_counter()))
            if not self.scheduler.done:
                await self.finished
        except BaseException:
            await self._end_requests()
            raise
        finally:
            self.pool.listener = None
            clock.cancel()
            await self._cancel()
        if self.pool.takes_turns:  # a weight sync finds them as it left them
            await self.pool.take_turns(tail=False)
        return self.scheduler.result()

    # Of the pool

    def on_lost(self, url: str, reason: str) -> None:
        """What a lost server decoded goes on elsewhere, or waits."""
        self._report(EngineLost(url, reason, time.perf_counter()))
        current = asyncio.current_task()
        for key, task in self.requests.items():
            if self.engine_of[key] == url and task is not current:
                self.aborting.pop(key, None)
                task.cancel()
        self._keep_turns()

    def _keep_turns(self) -> None:
        """Only the kind of servers whose turn it is may be awake."""
        if self.pool.takes_turns and (self.turns is None or self.turns.done()):
            self.turns = asyncio.create_task(self._take_turns())

    async def _take_turns(self) -> None:
        """The main servers have their turn again when none of the tail's wakes, or is left."""
        while not self.pool.has_turn(self.tail_turn) or (self.tail_turn and not self._decoding):
            await self.pool.take_turns(self.tail_turn)
            self.tail_turn = self.tail_turn and bool(self._decoding)

    @property
    def _decoding(self) -> list[str]:
        return [url for url, member in self.pool.members.items() if member.decodes]

    def on_joined(self, url: str, capacity: int) -> None:
        """A server takes candidates again."""
        self._report(EngineJoined(url, time.perf_counter(), capacity, self.pool.members[url].tail))
        self._keep_turns()

    def on_resized(self, url: str, capacity: int) -> None:
        """A server is drained, or takes candidates again."""
        self._report(EngineResized(url, capacity, time.perf_counter()))

    async def _keep_time(self) -> None:
        """Says what is waited for, and ends a rollout that takes too long, or that no server is left for."""
        rollout, server = Waiting(self.deadlines.rollout_s), Waiting(self.deadlines.return_s)
        while not self.finished.done():
            await asyncio.sleep(CLOCK_S)
            if up := self._decoding:
                server = Waiting(self.deadlines.return_s)
                self.tokens.say(f"No new tokens; waiting for {', '.join(up)}")
            else:
                self.tokens = Waiting(self.deadlines.first_token_s)
                server.say(f"No vLLM server left; waiting for {', '.join(self.pool.members)}")
            if server.seconds > self.deadlines.return_s:
                reasons = "; ".join(f"{url}: {member.reason}" for url, member in self.pool.members.items())
                self._fail(
                    GenerationError(
                        f"No vLLM server is left, and none came back with the current weights within "
                        f"`vllm_server_timeout` ({self.deadlines.return_s:g} s). {reasons}"
                    )
                )
            elif rollout.seconds > self.deadlines.rollout_s:
                self._fail(
                    GenerationTimeoutError(
                        f"The rollout took longer than `vllm_rollout_timeout_s` ({self.deadlines.rollout_s:g} s): "
                        f"{self.scheduler.ledger.num_open} candidates are still open."
                    )
                )

    def _fail(self, error: Exception) -> None:
        if self.scheduler.drop_failed_groups:  # what is complete by now will do, if anything is
            self._report(RolloutExpired(str(error), time.perf_counter()))
        elif not self.finished.done():
            self.finished.set_exception(error)

    # Commands and events

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, TakeTurns):
                self.tail_turn = True
                self._keep_turns()
                continue
            key = (command.candidate_id, command.segment)
            if isinstance(command, Submit):
                self.engine_of[key] = command.engine_id
                self.requests[key] = asyncio.create_task(self._decode(command))
            else:
                self.aborting[key] = (command, time.perf_counter())
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
        key = (command.candidate_id, command.segment)
        offset = len(command.prior_tokens)
        try:
            async for chunk in self._chunks(command):
                self._add(key, offset, chunk)
                offset += len(chunk.tokens)
        except asyncio.CancelledError:
            if key not in self.aborting:
                raise
            self._report(CandidateEnded(*key, offset, (), None, FinishReason.ABORT, time.perf_counter()))
        except Exception as error:
            self._report_error(command, key, offset, error)
        finally:
            self.aborting.pop(key, None)  # its answer is there, whatever it is: no abort is sent again

    def _report_error(self, command: Submit, key: Key, offset: int, error: Exception) -> None:
        """Whose failure it is: of the server, which is lost, or of the request."""
        if self.finished.done():  # the requests are being aborted: a stream that is aborted in its queue just ends
            return
        now = time.perf_counter()
        if isinstance(error, GenerationTimeoutError):
            if self.scheduler.ledger.candidates[command.candidate_id].num_empty_attempts >= MAX_STALLS:
                self._report(CandidateFailed(*key, str(error), now))
            else:
                self.pool.lose(command.engine_id, str(error))
        elif isinstance(error, aiohttp.ClientError | ServerBrokenError):  # also a connection not made in time
            if key in self.aborting:  # a stream that is aborted in its queue just ends
                self._report(CandidateEnded(*key, offset, (), None, FinishReason.ABORT, now))
            else:
                self.pool.lose(command.engine_id, describe(error, "a connection"))
        elif isinstance(error, ServerRefusedError):
            self._report(CandidateFailed(*key, str(error), now))
        elif isinstance(error, TimeoutError):
            reason = f"no complete answer within `vllm_request_timeout_s` ({self.deadlines.request_s:g} s)"
            self._report(CandidateFailed(*key, reason, now))
        else:  # an answer that makes no sense is the server's failure, not a hang
            reason = f"the answer could not be read ({type(error).__name__}: {error})"
            self._report(CandidateFailed(*key, reason, now))

    def _add(self, key: Key, offset: int, chunk: Chunk) -> None:
        now = time.perf_counter()
        self.tokens = Waiting(self.deadlines.token_s)
        if chunk.finish_reason is None:
            self._report(TokensArrived(*key, offset, chunk.tokens, chunk.logprobs, now))
            return
        # vLLM's own cut, `repetition_detection`, is a cut like that at the limit.
        reason = FinishReason("length" if chunk.finish_reason == "repetition" else chunk.finish_reason)
        self._report(CandidateEnded(*key, offset, chunk.tokens, chunk.logprobs, reason, now))

    async def _chunks(self, command: Submit) -> AsyncIterator[Chunk]:
        request = self._request(command)
        if request is None:  # its server was lost between its last token and its end
            yield Chunk([], None, "length")
            return
        self.internal_ids[command.candidate_id, command.segment] = request.internal_id
        server = self.pool.members[command.engine_id].server
        stream = server.stream(request, STREAM_INTERVAL, self.deadlines.request_s)
        name, seconds = "vllm_first_token_timeout_s", self.deadlines.first_token_s
        deadline = time.perf_counter() + self.deadlines.request_s
        try:
            while True:
                left = deadline - time.perf_counter()
                try:
                    chunk = await asyncio.wait_for(anext(stream), min(seconds, left))
                except StopAsyncIteration:
                    return
                except aiohttp.ClientError:  # one of them, a connection not made in time, is a TimeoutError too
                    raise
                except TimeoutError:
                    if seconds >= left:  # of the whole request
                        raise
                    raise GenerationTimeoutError(
                        f"{command.engine_id}: no tokens within `{name}` ({seconds:g} s)"
                    ) from None
                yield chunk
                name, seconds = "vllm_token_timeout_s", self.deadlines.token_s
        finally:
            await stream.aclose()

    def _request(self, command: Submit) -> CompletionRequest | None:
        body = {**self.body, **(self.overrides(command) if self.overrides else {})}
        body["max_tokens"] -= len(command.prior_tokens)
        if body["max_tokens"] <= 0:
            return None
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - len(command.prior_tokens))
        if body.get("seed") is not None:
            # Without this, the candidates of a prompt would be copies of each other. The offsets are those by which
            # the server itself tells the n samples of a request apart; a resumed one must not replay its random
            # numbers.
            body["seed"] += command.index + 1_000_003 * command.segment
        prompts = self.prompts[command.group_id]
        request_id = f"{self.run_id}-{command.candidate_id}-{command.segment}"
        return CompletionRequest.of(request_id, prompts[command.index % len(prompts)], command.prior_tokens, body)

    async def _abort(self, engine_id: str) -> None:
        while pending := [(c, since) for c, since in self.aborting.values() if c.engine_id == engine_id]:
            try:
                ids = [self.internal_ids.get((c.candidate_id, c.segment)) for c, _ in pending]
                server = self.pool.members[engine_id].server
                supported = await server.abort([name for name in ids if name is not None], ABORT_GRACE_S)
            except (ServerRefusedError, aiohttp.ClientError, TimeoutError):
                supported = False
            deadline = time.perf_counter() - ABORT_GRACE_S
            for command, since in pending:
                if not supported or since < deadline:
                    self.requests[command.candidate_id, command.segment].cancel()
            await asyncio.sleep(ABORT_RESEND_S)

    async def _cancel(self) -> None:
        """Closes what is still open, so that no server goes on decoding for nobody."""
        self.aborting.clear()
        self.finished.cancel()
        turns = [] if self.turns is None else [self.turns]
        tasks = [task for task in [*self.requests.values(), *self.aborters.values(), *turns] if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_requests(self) -> None:
        """
        vLLM loses some of many connections that close at once, and decodes those requests to their limit. So they are
        aborted first.
        """
        self.finished.cancel()  # nothing is reported any more
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*map(self._end_on, self.pool.urls(State.UP))), ABORT_GRACE_S)

    async def _end_on(self, url: str) -> None:
        while tasks := {
            key: task for key, task in self.requests.items() if self.engine_of[key] == url and not task.done()
        }:
            try:
                ids = [self.internal_ids[key] for key in tasks if key in self.internal_ids]
                if not await self.pool.members[url].server.abort(ids, END_S):
                    return
            except (ServerRefusedError, aiohttp.ClientError, TimeoutError):
                return
            await asyncio.wait(tasks.values(), timeout=ABORT_RESEND_S)
