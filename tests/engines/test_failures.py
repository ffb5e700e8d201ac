"""
Whose fault it is: of a request, of a server, of our own late loop, or of nobody. Stubs decode in a step; servers are
`Stub`s unless said otherwise.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import aiohttp
import psutil
import pytest
from aiohttp import web

from tests.engines.fake_server import answer, completion, fake_server
from trl_darts.engines import ServerPrompt, VLLMServerEngine, monitor, server_log, vllm_api, vllm_rollout, waiting
from trl_darts.engines.continuous_run import ContinuousRun
from trl_darts.engines.discovery import Discovery
from trl_darts.engines.pool import State
from trl_darts.engines.waiting import LATE_S, Deadlines
from trl_darts.errors import GenerationError
from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings


BODY = {"model": "m", "max_tokens": 100, "logprobs": 0}
TOKENS = [4, 5, 6]
LATE = LATE_S + 0.5  # seconds for which the loop is blocked


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr(vllm_rollout, "RETRY_S", 0.001)
    monkeypatch.setattr(vllm_rollout, "BUSY_S", 0.02)
    monkeypatch.setattr(vllm_rollout, "CLOCK_S", 0.02)


class Stub:
    """A server that answers each request with three tokens. Replace a method to have it fail."""

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots
        self.requests: list[dict] = []
        self.aborts: list[list[str]] = []
        self.num_open = self.most_open = 0

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        if self.slots is None:
            return web.Response(status=404)
        return web.json_response({"vllm_config": {"scheduler_config": {"max_num_seqs": self.slots}}})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self.decode(request, self.requests[-1])
        finally:
            self.num_open -= 1

    async def decode(self, request: web.Request, body: dict) -> web.StreamResponse:
        return await answer(completion(TOKENS))

    async def abort(self, request: web.Request) -> web.StreamResponse:
        self.aborts.append((await request.json())["request_ids"])
        return web.json_response({})

    @property
    def routes(self) -> dict:
        return {
            "GET /health": self.health,
            "GET /server_info": self.server_info,
            "POST /v1/completions": self.completions,
            "POST /abort_requests": self.abort,
        }


async def stream(request: web.Request, body: dict, length: int, step_s: float) -> web.StreamResponse:
    """Sends one token every `step_s`: token i is i."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for token in range(len(body["prompt"]) - 1, length):
        await asyncio.sleep(step_s)
        chunk = completion([token], "stop" if token == length - 1 else None)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return response


async def hangs(request: web.Request, body: dict | None = None) -> web.StreamResponse:
    """Answers nothing until the client closes the connection."""
    while request.transport is not None and not request.transport.is_closing():
        await asyncio.sleep(0.01)
    return web.Response()


def error(status: int, message: str = "it broke") -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@contextmanager
def engine_on(*servers: Stub | str, **deadlines):
    with ExitStack() as stack:
        urls = [s if isinstance(s, str) else stack.enter_context(fake_server(s.routes)) for s in servers]
        engine = VLLMServerEngine(urls, Deadlines(**deadlines))
        stack.callback(engine.close)
        yield engine


def rollout(engine, num_groups=2, size=2, overrides=None, drops=False, on_progress=None):
    scheduler = Scheduler(ScheduleSettings("grpo", size).policies(), size, drops)
    plans = [GroupPlan(i, size) for i in range(num_groups)]
    prompts = [[ServerPrompt([i])] for i in range(num_groups)]
    return engine.run(scheduler, plans, prompts, BODY, overrides, on_progress)


def check_rows(result, num_groups):
    assert [[row.tokens for row in group.rows] for group in result.groups] == [[TOKENS] * 2] * num_groups


# Our own loop


def test_requests_are_opened_in_turns_and_control_requests_do_not_wait():
    server = Stub()

    async def decode(request, body):
        await asyncio.sleep(0.02)  # before the headers
        return await answer(completion(TOKENS))

    server.decode = decode
    with engine_on(server) as engine:
        check_rows(rollout(engine, 50), 50)
    assert server.most_open == vllm_api.MAX_OPENING == 16
    hung = Stub()
    hung.decode = hangs
    with engine_on(hung) as engine:
        future = engine.start(
            Scheduler(ScheduleSettings("grpo", 40).policies(), 40), [GroupPlan(0, 40)], [[ServerPrompt([1])]], BODY
        )
        while hung.num_open < 16:
            time.sleep(0.01)
        assert engine.query(lambda server: server.get("/health")) == {engine.base_urls[0]: {}}
        future.cancel()
        engine.call(engine.idle())
        assert hung.most_open == 16  # those that waited for their turn were never sent
        assert {len(names) for names in hung.aborts} == {16}


def test_headers_that_come_with_the_first_token_do_not_hold_up_the_others(monkeypatch):
    """A proxy may hold them back. All 40 requests must have arrived before the first is answered."""
    monkeypatch.setattr(vllm_api, "MAX_OPENING_S", 0.05)
    server = Stub()

    async def decode(request, body):
        while len(server.requests) < 40:
            await asyncio.sleep(0.01)
        return await answer(completion(TOKENS))

    server.decode = decode
    with engine_on(server, first_token_s=5.0) as engine:
        check_rows(rollout(engine, 20), 20)


def test_a_connection_that_a_late_loop_timed_out_is_no_loss(monkeypatch):
    """The loop is blocked for longer than a connection may take, in the n-th turn after the requests were opened."""
    monkeypatch.setattr(waiting, "LATE_S", 0.2)
    plain, num_built = vllm_api.VLLMServer.open, []
    for turns in range(8):
        server, built = Stub(), []

        async def block(turns=turns):
            for _ in range(turns):
                await asyncio.sleep(0)
            time.sleep(0.6)

        async def open(self, *args, built=built, block=block, **kwargs):
            built.append(None if built else asyncio.create_task(block()))
            return await plain(self, *args, **kwargs)

        monkeypatch.setattr(vllm_api.VLLMServer, "open", open)
        with engine_on(server, connect_s=0.1) as engine:
            result = rollout(engine)
            check_rows(result, 2)
            assert (engine.num_losses, result.num_resumed) == (0, 0)
        num_built.append(len(built))
    assert max(num_built) > 4  # some were opened again


@pytest.mark.parametrize(("late", "num_losses"), [(LATE, 0), (0.0, 1)])
def test_a_probe_that_a_late_loop_timed_out_is_repeated(late, num_losses):
    """`/health` answers after 0.4 s, and may take 0.3 s. The loop is blocked meanwhile, or not."""
    server, probes = Stub(), []

    async def health(request):
        probes.append(time.perf_counter())
        await asyncio.sleep(0.4 if len(probes) == 1 else 0.0)
        return web.Response()

    async def decode(request, body):
        while len(probes) < 1 or (late and len(probes) < 2):
            await asyncio.sleep(0.01)
        if not late and len(server.requests) <= 4:
            await asyncio.sleep(1.0)
        return await answer(completion(TOKENS))

    server.health, server.decode = health, decode
    with engine_on(server, health_s=0.3) as engine:

        def block(ledger):
            if probes and len(blocked) < 1:
                blocked.append(engine.call(sleep(late)))

        async def sleep(seconds):
            time.sleep(seconds)

        blocked = []
        check_rows(rollout(engine, on_progress=block), 2)
        assert engine.num_losses == num_losses


@pytest.mark.parametrize(("late", "num_losses"), [(LATE, 0), (0.0, 1)])
def test_tokens_that_a_late_loop_has_not_read_are_not_missing(late, num_losses):
    """The loop is blocked for longer than a token may take, as if the process had been suspended."""
    server, blocked = Stub(), []

    async def decode(request, body):
        if not late and len(server.requests) <= 4:
            return await hangs(request)
        return await stream(request, body, 40, 0.05)

    async def sleep(seconds):
        time.sleep(seconds)

    def block(ledger):
        if ledger.candidates[0].length > 3 and not blocked:
            blocked.append(engine.call(sleep(late)))

    server.decode = decode
    with engine_on(server, first_token_s=0.8, token_s=0.8) as engine:
        result = rollout(engine, on_progress=block)
        assert {len(row.tokens) for group in result.groups for row in group.rows} == {40}
        assert engine.num_losses == num_losses
        assert len(blocked) == 1 or not late


def test_a_missed_probe_of_a_server_that_sends_tokens_is_repeated():
    server = Stub()
    server.health = hangs
    server.decode = lambda request, body: stream(request, body, 60, 0.03)
    with engine_on(server, health_s=0.7) as engine:
        result = rollout(engine)
        assert {tuple(row.tokens) for group in result.groups for row in group.rows} == {tuple(range(60))}
        assert (engine.num_losses, result.num_resumed) == (0, 0)


def test_servers_that_are_not_reached_are_no_attempts(monkeypatch):
    """More of them than a candidate has attempts, without probes. The wait for a server decides."""
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 60.0)
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 45)]
    with engine_on(*urls, return_s=1.0) as engine, pytest.raises(GenerationError) as failure:
        rollout(engine)
    assert str(failure.value).startswith("All vLLM servers are lost, and none reconnected")
    assert "http://127.0.0.1:44: nothing listens there" in str(failure.value)


def test_too_many_connections_of_our_own_are_no_loss(monkeypatch):
    server, left = Stub(), [3]
    plain = vllm_api.VLLMServer.open

    async def open(self, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            own = OSError(errno.EMFILE, "Too many open files")
            raise aiohttp.ClientConnectorError(
                aiohttp.client_reqrep.ConnectionKey("h", 1, False, True, *[None] * 3), own
            )
        return await plain(self, *args, **kwargs)

    monkeypatch.setattr(vllm_api.VLLMServer, "open", open)
    with engine_on(server) as engine:
        result = rollout(engine)
        check_rows(result, 2)
        assert (engine.num_losses, left) == (0, [0])
        assert all(row.num_empty_attempts == 0 for group in result.groups for row in group.rows)


# A request


def poison(*servers: Stub, prompt: int, kind: int | str = 500) -> None:
    """Makes the requests of one prompt fail on all servers. Others take a moment."""
    payload = {"error": {"message": "it broke", "code": 500}} if kind == "in the stream" else completion([], None)
    for server in servers:

        async def decode(request, body):
            if body["prompt"][0] == prompt:
                return error(kind) if isinstance(kind, int) else await answer({"choices": [], **payload})
            await asyncio.sleep(0.05)
            return await answer(completion(TOKENS))

        server.decode = decode


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (500, "answered 500: it broke"),
        (502, "answered 502: it broke"),
        (504, "answered 504: it broke"),
        (408, "answered 408: it broke"),
        ("in the stream", "it broke"),
        ("no end", "ended a stream without a `finish_reason`: its engine stopped."),
    ],
)
def test_one_poisoned_prompt_costs_no_server_and_is_the_one_that_is_dropped(kind, words):
    servers = [Stub() for _ in range(8)]
    poison(*servers, prompt=31, kind=kind)
    with engine_on(*servers) as engine:
        result = rollout(engine, 128, drops=True)
        assert engine.num_losses == 0
        assert list(result.dropped) == [31]
        assert re.search("candidate . of prompt 31 on http", result.dropped[31])
        assert result.dropped[31].endswith(f"{words} (9 times in a row)")
        check_rows(result, 127)
    assert result.num_resumed <= 16  # those of the prompt's two candidates
    tried = Counter(i for i, server in enumerate(servers) for body in server.requests if body["prompt"][0] == 31)
    assert len(tried) >= 2


def test_a_poisoned_prompt_is_named_where_it_ends_the_run():
    servers = [Stub() for _ in range(3)]
    poison(*servers, prompt=2)
    with (
        engine_on(*servers) as engine,
        pytest.raises(GenerationError, match=r"of prompt 2 on .*answered 500: it broke"),
    ):
        rollout(engine, 4)


def test_a_request_that_fails_once_goes_on_from_its_tokens():
    """Also if its server ends it with an error, or aborts it for another client, whose list of aborts is empty."""
    for reason in ("error", "abort"):
        server = Stub()

        async def decode(request, body, reason=reason):
            if len(body["prompt"]) == 1:
                return await answer(completion(TOKENS[:2], reason))
            return await answer(completion(TOKENS[2:]))

        server.decode = decode
        with engine_on(server) as engine:
            result = rollout(engine)
            check_rows(result, 2)
            assert (engine.num_losses, result.num_resumed) == (0, 4)
        assert [body["prompt"] for body in server.requests].count([1, 4, 5]) == 2


# A server


@pytest.mark.parametrize("status", [500, 503])
def test_a_dead_engine_behind_a_live_api_is_lost_at_once(status):
    dead, good = Stub(), Stub()

    async def fail(request, body=None):
        return error(status, "the engine died")

    dead.health = dead.decode = fail
    with engine_on(dead, good, return_s=5.0) as engine:
        result = rollout(engine, 4)
        check_rows(result, 4)
        assert sorted(engine.states().values(), key=str) == [State.DOWN, State.UP]
        assert engine.num_losses == 1
        assert {row.engine_id for group in result.groups for row in group.rows} == {engine.base_urls[1]}
    assert len(dead.requests) <= 4  # no candidate came back to it


def test_a_healthy_server_on_which_several_prompts_fail_is_lost():
    broken, good = Stub(), Stub()

    async def fail(request, body):
        return error(500)

    broken.decode = fail
    with engine_on(broken, good) as engine:
        check_rows(rollout(engine, 16), 16)
        assert engine.num_losses >= 1


def test_prompts_that_fail_while_others_decode_are_no_loss():
    """Ten prompts of 40 fail, on a server that decodes the others."""
    server = Stub()

    async def decode(request, body):
        if body["prompt"][0] % 4 == 0:
            return error(500)
        return await answer(completion(TOKENS))

    server.decode = decode
    with engine_on(server) as engine:
        result = rollout(engine, 40, drops=True)
        assert engine.num_losses == 0
        assert sorted(result.dropped) == list(range(0, 40, 4))


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(status):
    server = Stub()

    async def decode(request, body):
        return error(status, "the queue is full") if len(server.requests) <= 60 else await answer(completion(TOKENS))

    server.decode = decode
    with engine_on(server) as engine:
        result = rollout(engine)  # of four candidates, each is refused 15 times
        check_rows(result, 2)
        assert engine.num_losses == 0
        assert all(row.num_empty_attempts == 0 for group in result.groups for row in group.rows)


def test_a_server_that_is_busy_for_too_long_is_an_error_that_says_so(monkeypatch, caplog):
    monkeypatch.setattr("trl_darts.engines.waiting.INTERVAL_S", 0.2)
    server = Stub()

    async def decode(request, body):
        return error(503, "the queue is full")

    server.decode = decode
    with engine_on(server, first_token_s=0.5) as engine:
        with pytest.raises(GenerationError, match=r"answered 503: the queue is full \(9 times in a row\)"):
            rollout(engine)
        (url,) = engine.base_urls
    waited = f"No new tokens; waiting for {url}, which is busy ({url} answered 503: the queue is full)"
    assert any(message.startswith(waited) for message in caplog.messages)


def test_a_request_that_is_refused_goes_to_a_server_that_is_not_busy():
    busy, free = Stub(), Stub()

    async def decode(request, body):
        return error(429)

    busy.decode = decode
    with engine_on(busy, free) as engine:
        check_rows(rollout(engine, 4), 4)
        assert engine.num_losses == 0
    assert len(free.requests) == 8


# Deadlines of a request


def test_an_answer_that_still_arrives_is_not_failed_by_the_clock():
    server = Stub()
    server.decode = lambda request, body: stream(request, body, 30, 0.03)
    with engine_on(server, request_s=0.3) as engine:
        result = rollout(engine)
        assert {tuple(row.tokens) for group in result.groups for row in group.rows} == {tuple(range(30))}
        assert result.num_resumed == 0


def test_silence_beyond_the_limit_is_an_error():
    """Others decode, and without metrics the server may have queued it."""
    server = Stub()

    async def decode(request, body):
        if body["request_id"].split("-")[-2] == "3":
            return await hangs(request)
        return await stream(request, body, 60, 0.03)

    server.decode = decode
    words = r"candidate 1 of prompt 1 on .*no tokens within `vllm_request_timeout_s` \(0.5 s\)"
    with engine_on(server, request_s=0.5) as engine, pytest.raises(GenerationError, match=words):
        rollout(engine)


def test_a_request_that_fails_on_a_process_with_other_weights_loses_it():
    """It was restarted behind a proxy, which told the request so, and is healthy again."""
    server = Stub()

    async def decode(request, body):
        return error(502) if len(server.requests) <= 4 else await answer(completion(TOKENS))

    async def weight_info(request):
        return web.json_response({"weight_version": "default" if len(server.requests) < 5 else "v3"})

    server.decode = decode
    with fake_server({**server.routes, "GET /weight_info": weight_info}) as url:
        engine = VLLMServerEngine([url], refresh=refresh)
        (member,) = engine.members.values()
        member.version = 3
        engine.call(engine.pool()).version = 3
        result = rollout(engine)
        check_rows(result, 2)
        assert engine.num_losses == 1
        assert member.reason == "it has the weights 'default' instead of 'v3', so it was restarted"
        engine.close()


async def refresh(member, version):
    return True


# A loss and a return


def test_what_a_lost_server_still_decodes_is_aborted_before_it_gets_more():
    server, events = Stub(), []

    async def decode(request, body):
        events.append(body["request_id"])
        if len(server.requests) == 4:
            request.transport.close()
        if len(server.requests) <= 4:
            return await hangs(request)
        return await answer(completion(TOKENS))

    async def abort(request):
        server.aborts.append((await request.json())["request_ids"])
        events.append("abort")
        return web.json_response({})

    server.decode, server.abort = decode, abort
    with engine_on(server) as engine:
        result = rollout(engine)
        check_rows(result, 2)
        assert engine.num_losses == 1
    assert events[4] == "abort"
    assert sorted(server.aborts[0]) == sorted(f"cmpl-{body['request_id']}-0" for body in server.requests[:4])


def test_no_empty_list_of_aborts_is_sent():
    """vLLM takes it for all requests, also of others."""
    server = Stub()
    with engine_on(server) as engine:
        assert engine.query(lambda server: server.abort([])) == {engine.base_urls[0]: True}
    assert server.aborts == []


def test_logs_are_found_in_one_scan_for_all_servers(monkeypatch):
    scans, plain = [], psutil.net_connections

    def net_connections(*args):
        scans.append(args)
        return plain(*args)

    monkeypatch.setattr(server_log.psutil, "net_connections", net_connections)
    servers = [Stub() for _ in range(8)]

    async def decode(request, body):
        if len(servers[0].requests) == 1 and body is servers[0].requests[0]:
            await asyncio.sleep(0.2)
        return await answer(completion(TOKENS))

    for server in servers:
        server.decode = decode
    with engine_on(*servers) as engine:
        check_rows(rollout(engine, 16), 16)
        assert len(scans) == 1
        for url in engine.base_urls:
            engine.lose(url, "for the test")
        deadline = time.monotonic() + 10
        while set(engine.states().values()) != {State.UP}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(scans) <= 6  # they return within one or two intervals


# Slots


@pytest.mark.parametrize("how", ["500", "never", "cut"])
def test_a_server_that_does_not_tell_its_slots_has_those_of_the_others(how):
    """It told the preflight that it is like the others, but has much to do now."""
    known, other = Stub(slots=8), Stub(slots=8)
    tells = []

    async def server_info(request):
        if tells:
            return await Stub.server_info(other, request)
        if how == "cut":
            request.transport.close()
        if how == "never":
            return await hangs(request)
        return error(500)

    other.server_info = server_info
    for server in (known, other):
        server.decode = lambda request, body: stream(request, body, 3, 0.02)
    with engine_on(known, other, info_s=0.3) as engine:
        assert len(rollout(engine, 60).groups) == 60
        assert [member.capacity for member in engine.members.values()] == [10, 10]
        assert other.most_open <= 10
        other.slots = 4
        tells.append(True)
        deadline = time.monotonic() + 10
        while engine.members[engine.base_urls[1]].capacity != 6:  # it is asked again
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_slots_are_kept_if_a_server_returns_without_telling_them():
    server = Stub(slots=4)
    with engine_on(server) as engine:
        check_rows(rollout(engine), 2)

        async def fail(request):
            return error(500)

        server.server_info = fail
        (url,) = engine.base_urls
        engine.lose(url, "for the test")
        deadline = time.monotonic() + 10
        while engine.states() != {url: State.UP}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert engine.members[url].capacity == 6


def test_a_tight_limit_of_open_files_is_told_with_numbers(monkeypatch, caplog):
    monkeypatch.setattr("trl_darts.engines.vllm_server.max_open_files", lambda: 56 * 2)
    with engine_on(Stub(slots=256), Stub(slots=256)) as engine:
        check_rows(rollout(engine), 2)
        assert [member.capacity for member in engine.members.values()] == [56, 56]
    (message,) = [message for message in caplog.messages if "limit of open files" in message]
    assert "allows 56 connections to each of 2 vLLM servers, which could decode 274 sequences at once" in message
    assert "at least 1060 (`ulimit -Hn 1060`" in message  # 2 × 274 + 512


def test_processes_that_share_the_servers_share_their_slots_and_probe_only_during_rollouts(monkeypatch):
    server, probes = Stub(slots=64), []

    async def health(request):
        probes.append(request)
        return web.Response()

    server.health = health
    with fake_server(server.routes) as url:
        engine = VLLMServerEngine([url], num_sharing=8)
        check_rows(rollout(engine), 2)
        assert engine.members[url].capacity == 8 + 2
        engine.call(asyncio.sleep(0))
        before = len(probes)
        time.sleep(0.5)
        assert len(probes) == before
        engine.lose(url, "for the test")
        engine.follow(0, {url: True})  # the main process has found it
        check_rows(rollout(engine), 2)
        engine.close()


def test_what_a_rollout_without_end_knows_does_not_grow():
    """One entry for each version of the weights that a server has, however many syncs there were."""
    members = {"a": SimpleNamespace(version=0), "b": SimpleNamespace(version=0)}
    own = SimpleNamespace(version=0, members=members)
    run = object.__new__(ContinuousRun)
    run.pool, run.step, run._steps = own, 0, {0: 0}
    for sync in range(1, 100):
        own.version, run.step = sync, 10 * sync
        members["a"].version = sync  # the other one is lost
        assert run._step_of(sync) == 10 * sync
    assert run._steps == {0: 0, 99: 990}
    assert run._step_of(0) == 0


def test_what_is_known_of_addresses_that_left_the_list_is_forgotten():
    """On a cluster whose servers come and go, each has another address."""
    discovery = Discovery(SimpleNamespace(), hangs)
    monitor = SimpleNamespace(pool=SimpleNamespace(members={"http://b": None}))
    for number in range(5):
        discovery._retry_at[f"http://{number}"] = 0.0
        discovery._warned[f"http://{number}"] = "it can't join"
    asyncio.run(discovery._follow(monitor, ["http://b"]))
    assert (discovery._retry_at, discovery._warned) == ({}, {})
