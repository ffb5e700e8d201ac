"""
Servers with few slots, which decode as many candidates at once, like vLLM's. A server with a queue is not late,
candidates without a slot wait in the trainer, and a single late candidate is tried on another server.
"""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.engines.fake_server import completion
from tests.engines.stub_servers import Stub, engine_on, event_stream, run, send, tokens_of
from trl_darts.engines import monitor, vllm_rollout
from trl_darts.engines.pool import State


NUM_TOKENS = 8
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


class SlottedServer(Stub):
    """Decodes `slots` candidates at once, one token every `step_s`. The others wait in its queue."""

    def __init__(self, slots=1, step_s=0.01, tells_slots=True, has_metrics=True):
        routes = {"GET /metrics": self.metrics, "POST /collective_rpc": self.num_outputs}
        super().__init__(slots if tells_slots else None, routes)
        self.step_s = step_s
        self.semaphore = asyncio.Semaphore(slots)
        self.has_metrics = has_metrics
        self.num_running = self.num_tokens = self.num_preemptions = 0
        self.stalls = set()  # numbers of requests that get no more tokens, after those that they have by then
        self.preempted = set()  # those that are put back into the queue then, until no other runs
        self.stall_at = 0

    async def metrics(self, request):
        values = (self.num_running, self.num_open - self.num_running, self.num_preemptions, 0.5, self.num_tokens)
        lines = [f'{name}{{engine="0"}} {value}' for name, value in zip(METRICS, values, strict=True)]
        return web.Response(text="\n".join(lines)) if self.has_metrics else web.Response(status=404)

    async def num_outputs(self, request):
        return web.json_response({"results": []})

    async def decode(self, request, body):
        number, num_tokens = len(self.requests) - 1, NUM_TOKENS + 1 - len(body["prompt"])
        response = await event_stream(request)
        async with self.semaphore:
            self.num_running += 1
            try:
                for token in range(num_tokens):
                    await self._wait(number, token)
                    self.num_tokens += 1
                    await send(response, completion([token], "stop" if token == num_tokens - 1 else None))
            finally:
                self.num_running -= 1
        return response

    async def _wait(self, number, token):
        if number in self.stalls and token >= self.stall_at:
            await asyncio.sleep(60)
        if number in self.preempted and token >= self.stall_at:
            self.num_running -= 1
            while self.num_running > 0:
                await asyncio.sleep(0.01)
            self.num_running += 1
        await asyncio.sleep(self.step_s)


def check_rows(result):
    assert all(len(tokens) == NUM_TOKENS for group in tokens_of(result) for tokens in group)


@pytest.mark.parametrize("tells_slots", [True, False])
@pytest.mark.parametrize("has_metrics", [True, False])
def test_a_queue_is_not_silence(tells_slots, has_metrics):
    """One slot, steady decoding, and answers that take longer than the first-token deadline."""
    server = SlottedServer(1, 0.05, tells_slots, has_metrics)
    with engine_on(server, first_token_s=0.6, token_s=0.6) as engine:
        result = run(engine, size=4)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (0, 0)


def test_what_has_no_slot_waits_with_us():
    server = SlottedServer(2)
    with engine_on(server) as engine:
        check_rows(run(engine, 3, 4))
    assert server.most_open == 4  # two to hide the round trip


def test_a_server_that_does_not_say_gets_all():
    server = SlottedServer(2, tells_slots=False)
    with engine_on(server) as engine:
        check_rows(run(engine, 3, 4))
    assert server.most_open == 12


def test_what_waits_goes_to_whichever_server_is_free_first():
    slow, fast = SlottedServer(2, 0.1), SlottedServer(2, 0.005)
    with engine_on(slow, fast) as engine:
        check_rows(run(engine, 4, 8))
    assert len(slow.requests) + len(fast.requests) == 32
    assert len(slow.requests) < 16


@pytest.mark.parametrize(("stall_at", "has_metrics"), [(0, True), (3, True), (3, False)])
def test_a_candidate_that_is_late_by_itself_is_tried_elsewhere_and_its_server_stays(stall_at, has_metrics):
    """Without metrics, a candidate without tokens may be in the server's queue."""
    bad, good = SlottedServer(8, 0.3, has_metrics=has_metrics), SlottedServer(8)
    bad.stalls, bad.stall_at = {0}, stall_at
    with engine_on(bad, good, first_token_s=1.0, token_s=1.0) as engine:
        result = run(engine, 2, 4)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (0, 1)
    assert (len(bad.requests), len(good.requests)) == (4, 5)


def test_a_preempted_candidate_is_not_late():
    """The server has queued it again."""
    server = SlottedServer(8, 0.15)
    server.preempted, server.stall_at = {0}, 2
    with engine_on(server, token_s=0.6) as engine:
        result = run(engine, size=4)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (0, 0)


@pytest.mark.parametrize("stall_at", [0, 2])
def test_a_silent_server_is_lost(stall_at):
    bad, good = SlottedServer(8), SlottedServer(8)
    bad.stalls, bad.stall_at = {0, 1, 2, 3}, stall_at
    with engine_on(bad, good, first_token_s=0.5, token_s=0.5) as engine:
        result = run(engine, 2, 4)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (1, 4)


def test_a_server_that_preempts_gets_fewer():
    server = SlottedServer(32, 0.05)
    with engine_on(server) as engine:
        limits = []

        def watch(ledger):
            server.num_preemptions += len(limits) == 1
            (member,) = engine.members.values()
            limits.append(member.capacity)

        result = run(engine, size=80, on_progress=watch)
        check_rows(result)
        assert engine.states() == dict.fromkeys(engine.base_urls, State.UP)
    assert min(limits) < limits[0] == 36


def test_a_weight_sync_is_no_pressure():
    """A pause preempts all requests, which the server counts once it decodes again."""
    server = SlottedServer(32, 0.05)
    with engine_on(server) as engine:
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

        check_rows(run(engine, size=80, on_progress=watch))
    assert len(limits) > 3
    assert set(limits) == {36}
