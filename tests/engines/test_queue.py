"""
Servers with few slots, which decode as many candidates at once, like vLLM's. A server with a queue is not late,
candidates without a slot wait in the trainer, and a single late candidate is tried on another server.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, contextmanager

import pytest
from aiohttp import web

from tests.engines.fake_server import completion, fake_server
from trl_darts.engines import ServerPrompt, VLLMServerEngine, monitor, vllm_rollout
from trl_darts.engines.pool import State
from trl_darts.engines.waiting import Deadlines
from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings


NUM_TOKENS = 8
BODY = {"model": "m", "max_tokens": NUM_TOKENS, "logprobs": 0}
METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total",
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr(vllm_rollout, "CLOCK_S", 0.02)


class SlottedServer:
    """Decodes `slots` candidates at once, one token every `step_s`. The others wait in its queue."""

    def __init__(self, slots=1, step_s=0.01, tells_slots=True, has_metrics=True):
        self.slots, self.step_s = slots, step_s
        self.semaphore = asyncio.Semaphore(slots)
        self.tells_slots, self.has_metrics = tells_slots, has_metrics
        self.held = self.most_held = self.num_requests = 0
        self.num_running = self.num_tokens = self.num_preemptions = 0
        self.stalls = set()  # numbers of requests that get no more tokens, after those that they have by then
        self.preempted = set()  # those that are put back into the queue then, until no other runs
        self.stall_at = 0
        self.usage = 0.5

    async def server_info(self, request):
        if not self.tells_slots:
            return web.Response(status=404)
        return web.json_response({"vllm_config": {"scheduler_config": {"max_num_seqs": self.slots}}})

    async def metrics(self, request):
        waiting = self.held - self.num_running
        values = (self.num_running, waiting, self.num_preemptions, self.usage, self.num_tokens)
        lines = [f'{name}{{engine="0"}} {value}' for name, value in zip(METRICS, values, strict=True)]
        return web.Response(text="\n".join(lines)) if self.has_metrics else web.Response(status=404)

    async def health(self, request):
        return web.Response()

    async def completions(self, request):
        fields = await request.json()
        self.held += 1
        self.most_held = max(self.held, self.most_held)
        number, self.num_requests = self.num_requests, self.num_requests + 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            async with self.semaphore:
                self.num_running += 1
                try:
                    await self._decode(response, number, fields["max_tokens"])
                finally:
                    self.num_running -= 1
        finally:
            self.held -= 1
        return response

    async def _decode(self, response, number, num_tokens):
        for token in range(num_tokens):
            if number in self.stalls and token >= self.stall_at:
                await asyncio.sleep(60)
            if number in self.preempted and token >= self.stall_at:
                self.num_running -= 1
                while self.num_running > 0:
                    await asyncio.sleep(0.01)
                self.num_running += 1
            await asyncio.sleep(self.step_s)
            self.num_tokens += 1
            reason = "stop" if token == num_tokens - 1 else None
            await response.write(b"data: " + json.dumps(completion([token], reason)).encode() + b"\n\n")

    @property
    def routes(self):
        gets = {"/health": self.health, "/metrics": self.metrics, "/server_info": self.server_info}
        posts = {"/v1/completions": self.completions, "/collective_rpc": self.num_outputs}
        return {f"GET {path}": handler for path, handler in gets.items()} | {
            f"POST {path}": handler for path, handler in posts.items()
        }

    async def num_outputs(self, request):
        return web.json_response({"results": []})


@contextmanager
def engine_on(*servers, **deadlines):
    with ExitStack() as stack:
        urls = [stack.enter_context(fake_server(server.routes)) for server in servers]
        engine = VLLMServerEngine(urls, Deadlines(**deadlines))
        stack.callback(engine.close)
        yield engine


def rollout(engine, num_groups=1, size=4):
    scheduler = Scheduler(ScheduleSettings("grpo", size).policies(), size)
    plans = [GroupPlan(i, size) for i in range(num_groups)]
    return engine.run(scheduler, plans, [[ServerPrompt([i])] for i in range(num_groups)], BODY)


def check_rows(result):
    for row in (row for group in result.groups for row in group.rows):
        assert len(row.tokens) == NUM_TOKENS


@pytest.mark.parametrize("tells_slots", [True, False])
@pytest.mark.parametrize("has_metrics", [True, False])
def test_a_queue_is_not_silence(tells_slots, has_metrics):
    """One slot, steady decoding, and answers that take longer than the first-token deadline."""
    server = SlottedServer(1, 0.1, tells_slots, has_metrics)
    with engine_on(server, first_token_s=0.6, token_s=0.6) as engine:
        result = rollout(engine)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (0, 0)


def test_what_has_no_slot_waits_with_us():
    server = SlottedServer(2)
    with engine_on(server) as engine:
        check_rows(rollout(engine, 3, 4))
    assert server.most_held == 4  # two to hide the round trip


def test_a_server_that_does_not_say_gets_all():
    server = SlottedServer(2, tells_slots=False)
    with engine_on(server) as engine:
        check_rows(rollout(engine, 3, 4))
    assert server.most_held == 12


def test_what_waits_goes_to_whichever_server_is_free_first():
    slow, fast = SlottedServer(2, 0.1), SlottedServer(2, 0.005)
    with engine_on(slow, fast) as engine:
        check_rows(rollout(engine, 4, 8))
    assert slow.num_requests + fast.num_requests == 32
    assert slow.num_requests < 16


@pytest.mark.parametrize(("stall_at", "has_metrics"), [(0, True), (3, True), (3, False)])
def test_a_candidate_that_is_late_by_itself_is_tried_elsewhere_and_its_server_stays(stall_at, has_metrics):
    """Without metrics, a candidate without tokens may be in the server's queue."""
    bad, good = SlottedServer(8, 0.15, has_metrics=has_metrics), SlottedServer(8)
    bad.stalls, bad.stall_at = {0}, stall_at
    with engine_on(bad, good, first_token_s=0.5, token_s=0.5) as engine:
        result = rollout(engine, 2, 4)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (0, 1)
    assert (bad.num_requests, good.num_requests) == (4, 5)


def test_a_preempted_candidate_is_not_late():
    """The server has queued it again."""
    server = SlottedServer(8, 0.15)
    server.preempted, server.stall_at = {0}, 2
    with engine_on(server, token_s=0.6) as engine:
        result = rollout(engine)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (0, 0)


@pytest.mark.parametrize("stall_at", [0, 2])
def test_a_silent_server_is_lost(stall_at):
    bad, good = SlottedServer(8), SlottedServer(8)
    bad.stalls, bad.stall_at = {0, 1, 2, 3}, stall_at
    with engine_on(bad, good, first_token_s=0.5, token_s=0.5) as engine:
        result = rollout(engine, 2, 4)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (1, 4)


def test_a_server_that_preempts_gets_fewer():
    server = SlottedServer(32, 0.05)
    with engine_on(server) as engine:
        scheduler = Scheduler(ScheduleSettings("grpo", 80).policies(), 80)
        limits = []

        def watch(ledger):
            server.num_preemptions += len(limits) == 1
            (member,) = engine.members.values()
            limits.append(member.capacity)

        result = engine.run(scheduler, [GroupPlan(0, 80)], [[ServerPrompt([0])]], BODY, on_progress=watch)
        check_rows(result)
        assert engine.states() == dict.fromkeys(engine.base_urls, State.UP)
    assert min(limits) < limits[0] == 36


def test_a_weight_sync_is_no_pressure():
    """A pause preempts all requests, which the server counts once it decodes again."""
    server = SlottedServer(32, 0.05)
    with engine_on(server) as engine:
        scheduler = Scheduler(ScheduleSettings("grpo", 80).policies(), 80)
        limits = []

        async def update():
            pool = await engine.pool()
            await pool.report_update(pool.members[engine.base_urls[0]])

        def watch(ledger):
            if len(limits) == 1:
                engine.call(update())
                server.num_preemptions += 32
            (member,) = engine.members.values()
            limits.append(member.capacity)

        check_rows(engine.run(scheduler, [GroupPlan(0, 80)], [[ServerPrompt([0])]], BODY, on_progress=watch))
    assert len(limits) > 3
    assert set(limits) == {36}
