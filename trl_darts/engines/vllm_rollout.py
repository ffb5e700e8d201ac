"""
One rollout on vLLM servers, inside the engine's event loop. Each Submit is a task that reads a stream, each chunk is
an event, and each Abort ends the pending stream with the tokens so far.

A server that fails is lost. Its candidates continue on other servers from the tokens that have arrived, or wait until
a server with the current weights is back. A request that the server rejects fails the rollout.

An error with which a server answers is first the request's: the server is checked at once, and is lost if it is not
healthy, or fails on other prompts too. Otherwise, the candidate is tried on another server, up to nine times in a row.
If several candidates shared the request, each is first tried by itself. A server that is busy has not failed, and is
asked again.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp

from ..errors import GenerationError, GenerationTimeoutError
from ..scheduling import (
    CandidateEnded,
    CandidateErred,
    CandidateFailed,
    CandidateStalled,
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
from ..scheduling.scheduler import MAX_STALLS
from .aborts import Aborts
from .failed_prompts import FailedPrompts
from .failures import describe, is_our_own
from .lateness import silence, silent_requests, stalled_requests
from .monitor import Monitor
from .open_requests import OpenRequest, OpenRequests
from .opener import CandidateStream
from .pool import Member, State
from .prefixes import MAX_AT_ONCE, Target, VerifiedPrefixes
from .sampling import RolloutSeed
from .vllm_api import (
    CompletionChunk,
    CompletionRequest,
    ServerBrokenError,
    ServerBusyError,
    ServerPrompt,
    ServerRefusedError,
    prompt_mark,
)
from .waiting import Deadlines, Waiting


CLOCK_S = 0.1
CHECKS = 8  # number of checks within the shorter token deadline
CATCH_UP_S = 3.0  # after our own loop was late, no server is judged: what has arrived must be read first
# Pauses before a candidate is tried again: after a failure, doubled with each one in a row, and if a server is busy.
RETRY_S, MAX_RETRY_S, BUSY_S = 0.05, 1.0, 1.0

logger = logging.getLogger(__name__)

Overrides = Callable[[Submit], Mapping[str, Any]]


class RolloutRun:
    """A running rollout: executes the scheduler's commands and reports events."""

    keeps_kv = False  # see `Listener`

    def __init__(
        self,
        scheduler: Scheduler,
        monitor: Monitor,
        prompts: Mapping[int, Sequence[ServerPrompt]],
        body: Mapping[str, Any],
        overrides: Overrides | None,
        deadlines: Deadlines,
        seed: RolloutSeed | None = None,
        reuse: VerifiedPrefixes | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.monitor = monitor
        self.pool = monitor.pool
        self.prompts = dict(prompts)  # by group
        self.body = body
        self.overrides = overrides
        self.deadlines = deadlines
        self.seed = seed
        self.reuse = reuse
        self.run_id = uuid.uuid4().hex
        self.requests = OpenRequests()
        self.aborts = Aborts(self.requests, self.pool)
        self.failed_prompts = FailedPrompts()
        self.loners: set[int] = set()  # candidates whose request failed when they shared it
        self.next_check = 0.0  # time of the next check for late requests
        self.tail_turn = False  # whether it is the tail servers' turn, if main and tail servers share GPUs
        self.turns: asyncio.Task[None] | None = None
        self.tokens = Waiting(deadlines.first_token_s)  # for the next tokens
        self.rollout: Waiting | None = Waiting(deadlines.rollout_s)  # `None` while nobody waits for it
        self.error: BaseException | None = None  # that ended it
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def execute(self, plans: Sequence[GroupPlan]) -> RolloutResult:
        """Runs the rollout and returns its result."""
        clock = asyncio.create_task(self._keep_time())
        try:
            if self.pool.takes_turns:
                await self.pool.take_turns(tail=False)
            await self._begin(plans)
            if not self.is_over:
                await self.finished
        except BaseException as error:
            self.error = error
            self.finished.cancel()  # stops reporting events
            await self.aborts.end_all(self._end_unsent)
            raise
        finally:
            if self.has_begun:
                self.pool.listeners.remove(self)
            clock.cancel()
            await self._cancel()
        if self.pool.takes_turns:  # a weight sync expects the main servers to be awake
            await self.pool.take_turns(tail=False)
        result = self.scheduler.result()
        if self.reuse is not None:
            self.reuse.keep(result)
        return result

    @property
    def is_over(self) -> bool:
        return self.scheduler.done

    @property
    def has_begun(self) -> bool:
        return self in self.pool.listeners

    async def _begin(self, plans: Sequence[GroupPlan]) -> None:
        ready = asyncio.create_task(self.monitor.ready())
        await asyncio.wait([ready, self.finished], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.finished.done():
            self.finished.result()
        members = self.pool.members
        if self.reuse is not None:
            plans = await self.reuse.resume(plans, self.prompts, self._targets(), self.deadlines.first_token_s)
        engines = [self._load(url, members[url]) for url in self.pool.urls(State.UP)]
        self.pool.listeners.append(self)
        self._execute(self.scheduler.start(plans, engines, time.perf_counter()))

    def _targets(self) -> list[Target]:
        """Returns the servers that can verify earlier answers."""
        return [
            Target(m, m.model_name(m.decodes_version) or self.body["model"], asyncio.Semaphore(MAX_AT_ONCE))
            for m in self.pool.members.values()
            if m.decodes
        ]

    def _load(self, url: str, member: Member) -> EngineLoad:
        return EngineLoad(url, member.capacity, tail=member.tail)

    # Called by the pool

    def num_held(self, url: str) -> int:
        """Returns the number of candidates on a server."""
        return len(self.requests.on(url))

    def on_lost(self, url: str, reason: str) -> None:
        """Reports a lost server and closes its requests."""
        lost = self.requests.on(url)
        self.failed_prompts.forget_server(url)
        untried = {request.command.candidate_id for request in lost if not request.sent}
        self.pool.members[url].ghosts += [r.internal_id for r in lost if r.internal_id is not None]
        self._report(EngineLost(url, reason, time.perf_counter(), untried))
        for request in lost:
            self._close(request)
        self._keep_turns()

    def _keep_turns(self) -> None:
        """Starts a task that puts the other kind of servers to sleep, if the two kinds take turns."""
        if self.pool.takes_turns and (self.turns is None or self.turns.done()):
            self.turns = asyncio.create_task(self._take_turns())

    async def _take_turns(self) -> None:
        """Wakes the servers whose turn it is. If no tail server wakes up, the turn returns to the main servers."""
        while not self.pool.has_turn(self.tail_turn) or (self.tail_turn and not self._decoding):
            await self.pool.take_turns(self.tail_turn)
            self.tail_turn = self.tail_turn and bool(self._decoding)

    @property
    def _decoding(self) -> list[str]:
        return [url for url, member in self.pool.members.items() if member.decodes]

    def on_joined(self, url: str, capacity: int) -> None:
        """Reports a server that has reconnected."""
        self._report(EngineJoined(url, time.perf_counter(), capacity, self.pool.members[url].tail))
        self._keep_turns()

    def on_resized(self, url: str, capacity: int) -> None:
        """Reports a change of a server's capacity."""
        self._report(EngineResized(url, capacity, time.perf_counter()))

    def on_updated(self, url: str, num_outputs: Mapping[str, int] | None) -> None:
        """Does nothing: weight syncs wait for a rollout."""

    def versions_on(self, url: str) -> set[int]:
        """Returns the versions of the weights that a server's requests decode with."""
        return {request.version for request in self.requests.on(url)}

    async def _keep_time(self) -> None:
        """Logs waits, and enforces the deadlines of tokens, of lost servers and of the rollout."""
        server = Waiting(self.deadlines.return_s)
        while not self.finished.done():
            await asyncio.sleep(CLOCK_S)
            if up := self._decoding:
                server = Waiting(self.deadlines.return_s)
                self.tokens.log(f"No new tokens; waiting for {', '.join(map(self._describe, up))}")
                self._check_progress(up)
            else:
                self.tokens = Waiting(self.deadlines.first_token_s)
                server.log(f"No vLLM server is up; waiting for {', '.join(self.pool.members)}")
            if self.rollout is None:
                server = Waiting(self.deadlines.return_s)
            elif server.seconds > self.deadlines.return_s and not self._was_late:
                reasons = "; ".join(f"{url}: {member.reason}" for url, member in self.pool.members.items())
                self._fail(
                    GenerationError(
                        f"All vLLM servers are lost, and none reconnected with the current weights within "
                        f"`vllm_server_timeout` ({self.deadlines.return_s:g} s). {reasons}"
                    )
                )
            elif self.rollout.seconds > self.deadlines.rollout_s:
                self._fail(
                    GenerationTimeoutError(
                        f"The rollout took longer than `vllm_rollout_timeout_s` ({self.deadlines.rollout_s:g} s): "
                        f"{self.scheduler.ledger.num_open} candidates are still open."
                    )
                )

    @property
    def _was_late(self) -> bool:
        return self.monitor.lag.was_late_since(time.perf_counter() - CATCH_UP_S)

    def _describe(self, url: str) -> str:
        member = self.pool.members[url]
        return url if member.refuses_since is None else f"{url}, which is busy ({member.refusal})"

    def _check_progress(self, urls: Sequence[str]) -> None:
        now, deadlines = time.perf_counter(), self.deadlines
        if now < self.next_check or self._was_late:
            return
        self.next_check = now + min(deadlines.first_token_s, deadlines.token_s, deadlines.request_s) / CHECKS
        for url in urls:
            running = [request for request in self.requests.on(url) if request.aborted_at is None]
            if running:
                self._check_server(url, running, now)

    def _check_server(self, url: str, requests: Sequence[OpenRequest], now: float) -> None:
        member = self.pool.members[url]
        reason = silence(member, requests, now, self.deadlines)
        if reason is None:
            for request in silent_requests(requests, now, self.deadlines):
                self._give_up(request, now)
            requests = [request for request in requests if self.requests.get(request.key) is request]
            for request, message in stalled_requests(member, requests, now, self.deadlines):
                self._stall(request, message, now)
            return
        find: Any = self.scheduler.ledger.find
        stuck = [r for r in requests if find(r.command.candidate_id).num_empty_attempts >= MAX_STALLS]
        for request in stuck:
            self._stall(request, reason, now)
        if len(stuck) < len(requests):
            self.pool.lose(url, reason)

    def _stall(self, request: OpenRequest, reason: str, now: float) -> None:
        """Closes a request without tokens, so that its candidate is tried on another server."""
        logger.warning("Candidate %d of prompt %d: %s", request.command.index, request.command.group_id, reason)
        self._close(request)
        self._report(CandidateStalled(*request.key, reason, now))

    def _give_up(self, request: OpenRequest, now: float) -> None:
        reason = f"no tokens within `vllm_request_timeout_s` ({self.deadlines.request_s:g} s)"
        self._close(request)
        self._report(CandidateFailed(*request.key, reason, now))

    def _fail(self, error: Exception) -> None:
        if self.scheduler.drop_failed_groups and self.has_begun:  # the rollout ends with the groups complete by now
            self._report(RolloutExpired(str(error), time.perf_counter()))
        elif not self.finished.done():
            self.finished.set_exception(error)

    # Commands and events

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, TakeTurns):
                self.tail_turn = True
                self._keep_turns()
            elif isinstance(command, Submit):
                self._start(command)
            else:
                self.aborts.begin(self.requests[command.candidate_id, command.segment], self._end_unsent)

    def _start(self, command: Submit) -> None:
        version = self.pool.members[command.engine_id].decodes_version
        request = OpenRequest(command, time.perf_counter(), len(command.prior_tokens), version)
        self.requests[request.key] = request
        request.task = asyncio.create_task(self._decode(request))

    def _report(self, event: Event) -> None:
        if self.finished.done():
            return
        try:
            self._execute(self.scheduler.handle(event))
        except Exception as error:  # a policy failed: raised in the waiting thread
            self.finished.set_exception(error)
        else:
            if self.is_over:
                self.finished.set_result(None)

    def _close(self, request: OpenRequest) -> None:
        """Closes a request whose response is not needed, or will not arrive."""
        self.requests.pop(request.key, None)  # a task that is cancelled before it starts does not do this
        request.aborted_at = None
        if request.task is not None and request.task is not asyncio.current_task():
            request.task.cancel()

    def _end_unsent(self, request: OpenRequest) -> None:
        """Ends a request that no server has."""
        self._close(request)
        self._report_abort(request)

    async def _decode(self, request: OpenRequest) -> None:
        try:
            await self._receive(request)
        except asyncio.CancelledError:
            if request.aborted_at is None:
                raise
            self._report_abort(request)
        finally:
            if self.requests.get(request.key) is request:
                del self.requests[request.key]

    async def _receive(self, request: OpenRequest) -> None:
        member, candidate_id = self.pool.members[request.command.engine_id], request.command.candidate_id
        try:
            completion = self._request(request.command, request.version)
            if completion is None:  # its server was lost after the last token, but before the end
                self._add(request, CompletionChunk([], None, "length"))
                return
            may_share = candidate_id not in self.loners and self.pool.may_share(request.command.engine_id)
            request.stream = CandidateStream(completion, may_share)
            async with aclosing(member.opener.chunks(request.stream)) as chunks:
                async for chunk in chunks:
                    self._add(request, chunk)
        except Exception as error:
            await self._handle_error(request, error)

    async def _handle_error(self, request: OpenRequest, error: Exception) -> None:
        """Reports an error as the loss of the server, as the failure of the request, or as none of both."""
        if self.finished.done():  # all requests are being aborted
            return
        now, url = time.perf_counter(), request.command.engine_id
        if request.aborted_at is not None:  # if it was in the server's queue, it ends without a reason
            self._report_abort(request)
        elif isinstance(error, aiohttp.ConnectionTimeoutError) and self._was_late_since_sent(request):
            await self._receive(request)
        elif isinstance(error, ServerBusyError) or is_our_own(error):
            await self._retry(request, describe(error, "a request"), is_busy=True)
        elif isinstance(error, aiohttp.ClientError):
            # Even if it is healthy by now: a process that was restarted has other weights.
            self.pool.lose(url, describe(error, "a connection"))
        elif request.has_companions:  # one of them may be the cause
            self.loners.add(request.command.candidate_id)
            await self._retry(request, describe(error, "a request"))
        elif isinstance(error, ServerBrokenError) or self._lacks_adapter(error):
            await self._retry(request, describe(error, "a request"))
        elif isinstance(error, ServerRefusedError):
            self._report(CandidateFailed(*request.key, str(error), now))
        else:  # an invalid answer
            reason = f"the answer could not be read ({type(error).__name__}: {error})"
            self._report(CandidateFailed(*request.key, reason, now))

    def _was_late_since_sent(self, request: OpenRequest) -> bool:
        """Whether our own loop was late, so that a connection that was made in time seems to have taken too long."""
        shared = None if request.stream is None else request.stream.shared
        return shared is not None and self.monitor.lag.was_late_since(shared.began)

    def _lacks_adapter(self, error: Exception) -> bool:
        """Whether a server does not know the adapter that a request names, because it was restarted."""
        return self.pool.adapter is not None and isinstance(error, ServerRefusedError) and error.status == 404

    async def _retry(self, request: OpenRequest, reason: str, is_busy: bool = False) -> None:
        """Tries the candidate elsewhere if its server is healthy. Otherwise, the server is lost."""
        url, request.failing = request.command.engine_id, True
        if not await self.monitor.check(url):
            return
        tried = self._note_failure(request, url, reason, is_busy)
        if self.requests.get(request.key) is not request:  # the server is lost
            return
        if request.aborted_at is None:
            candidate: Any = self.scheduler.ledger.find(request.command.candidate_id)
            pause = min(MAX_RETRY_S, RETRY_S * 2**candidate.num_empty_attempts)
            await asyncio.sleep(BUSY_S if is_busy and not tried else pause)
        if request.aborted_at is not None:
            self._report_abort(request)
        else:
            self._report(CandidateErred(*request.key, reason, time.perf_counter(), tried))

    def _note_failure(self, request: OpenRequest, url: str, reason: str, is_busy: bool) -> bool:
        """Returns whether the server has tried the candidate by itself, or has refused all for too long."""
        member, now = self.pool.members[url], time.perf_counter()
        if is_busy:
            member.refuses_since, member.refusal = member.refuses_since or now, reason
            return now - member.refuses_since > self.deadlines.first_token_s
        if request.has_companions:
            return False
        since = self.failed_prompts.note(url, request.command.group_id, now)
        if since is not None and not self._runs(url, since):
            self.pool.lose(url, reason)
        return True

    def _runs(self, url: str, since: float) -> bool:
        """Whether requests run on a server that it had before a time."""
        return any(r.sent and not r.failing and r.last_progress < since for r in self.requests.on(url))

    def _report_abort(self, request: OpenRequest) -> None:
        now = time.perf_counter()
        self._report(CandidateEnded(*request.key, request.num_tokens, (), None, FinishReason.ABORT, now))

    def _add(self, request: OpenRequest, chunk: CompletionChunk) -> None:
        now, member = time.perf_counter(), self.pool.members[request.command.engine_id]
        offset, request.num_tokens = request.num_tokens, request.num_tokens + len(chunk.tokens)
        if self.reuse is not None and chunk.tops:
            self.reuse.note(request.command.group_id, request.command.index, offset, chunk.tops)
        if chunk.tokens:
            self.tokens = Waiting(self.deadlines.token_s)
            request.last_progress = member.last_progress = now
            request.decodes = True
            self.failed_prompts.suspect(member.server.base_url)
        is_error = chunk.finish_reason == "error" or (chunk.finish_reason == "abort" and request.aborted_at is None)
        if chunk.finish_reason is None or is_error:
            self._report(TokensArrived(*request.key, offset, chunk.tokens, chunk.logprobs, now))
            if is_error:
                raise ServerBrokenError(f"{member.server.base_url} ended a request with {chunk.finish_reason!r}.")
            return
        # A completion that vLLM's `repetition_detection` cut off counts as one at the length limit.
        reason = FinishReason("length" if chunk.finish_reason == "repetition" else chunk.finish_reason)
        self._report(CandidateEnded(*request.key, offset, chunk.tokens, chunk.logprobs, reason, now))

    def _request(self, command: Submit, version: int) -> CompletionRequest | None:
        prompts = self.prompts[command.group_id]
        prompt = prompts[command.index % len(prompts)]
        if prompt.problem is not None:
            raise ServerRefusedError(prompt.problem)
        body = {**self.body, **(self.overrides(command) if self.overrides else {})}
        body["max_tokens"] -= len(command.prior_tokens)
        if body["max_tokens"] <= 0:
            return None
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - len(command.prior_tokens))
        if self.seed is not None and (self.seed.always or self.pool.needs_seed(command.engine_id)):
            body.setdefault("seed", self.seed.of(command.group_id, command.index, command.segment))
        member = self.pool.members[command.engine_id]
        if (name := member.model_name(version)) is not None:  # vLLM's prefix cache tells adapters apart
            body["model"] = name
        elif self.pool.keeps_kv:  # no keys and values of older weights from the prefix cache
            body["cache_salt"] = f"v{member.decodes_version}"
        request_id = f"{prompt_mark([len(prompt.tokens)])}-{self.run_id}-{command.candidate_id}-{command.segment}"
        return CompletionRequest.of(request_id, prompt, command.prior_tokens, body)

    async def _cancel(self) -> None:
        """Closes all open requests, so that servers stop decoding them."""
        self.finished.cancel()
        requests = list(self.requests.values())
        for request in requests:
            self._close(request)
        tasks = [*self.aborts.cancel(), *(request.task for request in requests if request.task is not None)]
        if self.turns is not None:
            self.turns.cancel()
            tasks.append(self.turns)
        await asyncio.gather(*tasks, return_exceptions=True)
