"""
One rollout on vLLM servers, inside the engine's event loop: each Submit is a task with one HTTP request, each answer
an event, and each Abort makes the pending answer arrive with the tokens so far.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp

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
from .vllm_api import Chunk, CompletionRequest, ServerPrompt, ServerRefusedError, VLLMServer


# A stream costs the server and this thread 3 to 20 times as much per token as one answer at the end; every 16 tokens,
# the difference is gone, and a bounded wait ends at most 16 tokens late.
STREAM_INTERVAL = 16
# An abort can overtake its request: it is sent again until the answer is there.
ABORT_RESEND_S = 0.1
# A server that does not answer an abort is told by closing the connection. What the candidate had is lost then.
ABORT_GRACE_S = 5.0

Overrides = Callable[[Submit], Mapping[str, Any]]


class RolloutRun:
    """One rollout in flight: executes the scheduler's commands and reports what comes of them."""

    def __init__(
        self,
        scheduler: Scheduler,
        servers: Mapping[str, VLLMServer],
        prompts: Sequence[Sequence[ServerPrompt]],
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
        # By (candidate_id, segment): a candidate that moves to another server is another request.
        self.requests: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.aborting: dict[tuple[int, int], tuple[Abort, float]] = {}  # with the time of the command
        self.internal_ids: dict[tuple[int, int], str] = {}
        self.engine_of: dict[tuple[int, int], str] = {}
        self.lost: set[str] = set()
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
                key = (command.candidate_id, command.segment)
                self.engine_of[key] = command.engine_id
                self.requests[key] = asyncio.create_task(self._decode(command))
            else:
                self.aborting[command.candidate_id, command.segment] = (command, time.perf_counter())
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
                    self.aborting.pop((candidate_id, segment), None)
                    # vLLM's own cut, `repetition_detection`, is a cut like that at the limit.
                    reason = FinishReason("length" if chunk.finish_reason == "repetition" else chunk.finish_reason)
                    self._report(
                        CandidateEnded(candidate_id, segment, before, chunk.tokens, chunk.logprobs, reason, now)
                    )
        except asyncio.CancelledError:
            if self.aborting.pop((candidate_id, segment), None) is None:
                raise
            self._report(
                CandidateEnded(candidate_id, segment, offset, (), None, FinishReason.ABORT, time.perf_counter())
            )
        except ServerRefusedError as error:
            self._report(CandidateFailed(candidate_id, segment, str(error), time.perf_counter()))
        except aiohttp.ClientError as error:  # also a connection that could not be made in time
            self._lose(command.engine_id, f"{type(error).__name__}: {error}")
        except asyncio.TimeoutError:
            words = f"no complete answer within `vllm_request_timeout_s` ({self.request_timeout_s:g} s)"
            self._report(CandidateFailed(candidate_id, segment, words, time.perf_counter()))
        except Exception as error:  # an answer that makes no sense is the server's failure, not a hang
            words = f"the answer could not be read ({type(error).__name__}: {error})"
            self._report(CandidateFailed(candidate_id, segment, words, time.perf_counter()))

    def _lose(self, engine_id: str, words: str) -> None:
        """Reports a lost server, and closes what is still open there: its candidates go on elsewhere."""
        if engine_id in self.lost:
            return
        self.lost.add(engine_id)
        self._report(EngineLost(engine_id, words, time.perf_counter()))
        current = asyncio.current_task()
        for key, task in self.requests.items():
            if self.engine_of[key] == engine_id and task is not current:
                self.aborting.pop(key, None)
                task.cancel()

    async def _chunks(self, command: Submit) -> AsyncIterator[Chunk]:
        server, request = self.servers[command.engine_id], self._request(command)
        self.internal_ids[command.candidate_id, command.segment] = request.internal_id
        if self.scheduler.needs_progress:
            async for chunk in server.stream(request, STREAM_INTERVAL, self.request_timeout_s):
                yield chunk
        else:
            yield await server.complete(request, self.request_timeout_s)

    def _request(self, command: Submit) -> CompletionRequest:
        body = {**self.body, **(self.overrides(command) if self.overrides else {})}
        body["max_tokens"] -= len(command.prior_tokens)
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
                supported = await self.servers[engine_id].abort([name for name in ids if name is not None])
            except (ServerRefusedError, aiohttp.ClientError, asyncio.TimeoutError):
                supported = False
            deadline = time.perf_counter() - ABORT_GRACE_S
            for command, since in pending:
                if not supported or since < deadline:
                    self.requests[command.candidate_id, command.segment].cancel()
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
