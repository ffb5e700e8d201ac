"""
Whose fault it is: of a request, of a server, of our own late loop, or of nobody. Stubs decode in a step; servers are
`Stub`s unless said otherwise.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections import Counter

import aiohttp
import psutil
import pytest
from aiohttp import web

from tests.engines.fake_server import answer, completion
from tests.engines.stub_servers import (
    TOKENS,
    Stub,
    engine_on,
    event_stream,
    hangs,
    is_refreshed,
    run,
    send,
    start,
    stream,
    tokens_of,
)
from tests.waits import wait_for
from trl_darts.engines import aborts, monitor, opener, server_log, vllm_api, vllm_rollout, waiting
from trl_darts.engines.pool import State
from trl_darts.errors import GenerationError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr(vllm_rollout, "RETRY_S", 0.001)
    monkeypatch.setattr(vllm_rollout, "BUSY_S", 0.02)
    monkeypatch.setattr(vllm_rollout, "CLOCK_S", 0.02)


def error(status: int, message: str = "it broke") -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def fails(status: int, message: str = "it broke"):
    """Returns a method of a stub that always fails."""

    async def fail(request, body=None):
        return error(status, message)

    return fail


def check_rows(result, num_groups=2):
    assert tokens_of(result) == [[TOKENS] * 2] * num_groups


def check_streamed(result, length):
    assert {tuple(tokens) for group in tokens_of(result) for tokens in group} == {tuple(range(length))}


# Our own loop


def test_requests_are_opened_in_turns_and_control_requests_do_not_wait(monkeypatch):
    monkeypatch.setattr(aborts, "ABORT_GRACE_S", opener.MAX_OPENING_S + 0.3)  # after which others are opened

    async def decode(request, body):
        await asyncio.sleep(0.02)  # before the headers
        return await answer(completion(TOKENS))

    server = Stub(decode=decode)
    with engine_on(server) as engine:
        check_rows(run(engine, 50), 50)
    assert server.most_open == opener.MAX_OPENING == 16
    hung = Stub(decode=hangs)
    with engine_on(hung) as engine:
        future = start(engine, size=40)
        wait_for(lambda: hung.num_open == 16)
        assert engine.query(lambda server: server.get("/health")) == {engine.base_urls[0]: {}}
        future.cancel()
        engine.call(engine.idle())
        assert hung.most_open == 16  # those that waited for their turn were never sent
        assert {len(names) for names in hung.aborts} == {16}


def test_headers_that_come_with_the_first_token_do_not_hold_up_the_others(monkeypatch):
    """A proxy may hold them back. All 40 requests must have arrived before the first is answered."""
    monkeypatch.setattr(opener, "MAX_OPENING_S", 0.05)

    async def decode(request, body):
        while len(server.requests) < 40:
            await asyncio.sleep(0.01)
        return await answer(completion(TOKENS))

    server = Stub(decode=decode)
    with engine_on(server, first_token_s=5.0) as engine:
        check_rows(run(engine, 20), 20)


def test_a_connection_that_a_late_loop_timed_out_is_no_loss(monkeypatch):
    """The loop is blocked for longer than a connection may take, in the n-th turn after the requests were opened."""
    monkeypatch.setattr(waiting, "LATE_S", 0.2)
    plain, num_built = vllm_api.VLLMServer.open, []
    for turns in range(5):
        built = []

        async def block(turns=turns):
            for _ in range(turns):
                await asyncio.sleep(0)
            time.sleep(0.6)

        async def open(self, *args, built=built, block=block, **kwargs):
            built.append(None if built else asyncio.create_task(block()))
            return await plain(self, *args, **kwargs)

        monkeypatch.setattr(vllm_api.VLLMServer, "open", open)
        with engine_on(Stub(), connect_s=0.1) as engine:
            result = run(engine, 2)
            check_rows(result)
            assert (engine.num_losses, result.num_resumed) == (0, 0)
        num_built.append(len(built))
    assert max(num_built) > 4  # some were opened again


@pytest.mark.parametrize("is_late", [True, False])
def test_a_probe_that_a_late_loop_timed_out_is_repeated(monkeypatch, is_late):
    """`/health` answers after 0.8 s, and may take 0.6 s. The loop is blocked meanwhile, or not."""
    monkeypatch.setattr(waiting, "LATE_S", 0.3 if is_late else 1.0)
    probes, blocked = [], []

    async def health(request):
        probes.append(time.perf_counter())
        await asyncio.sleep(0.8 if len(probes) == 1 else 0.0)
        return web.Response()

    async def decode(request, body):
        while len(probes) < 1 or (is_late and len(probes) < 2):
            await asyncio.sleep(0.01)
        if not is_late and len(server.requests) <= 4:
            await asyncio.sleep(1.0)
        return await answer(completion(TOKENS))

    async def sleep():
        time.sleep(1.2 if is_late else 0.0)

    def block(ledger):
        if probes and not blocked:
            blocked.append(engine.call(sleep()))

    server = Stub(health=health, decode=decode)
    with engine_on(server, health_s=0.6) as engine:
        check_rows(run(engine, 2, on_progress=block))
        assert engine.num_losses == (not is_late)


@pytest.mark.parametrize("is_late", [True, False])
def test_tokens_that_a_late_loop_has_not_read_are_not_missing(monkeypatch, is_late):
    """The loop is blocked for longer than a token may take, as if the process had been suspended."""
    monkeypatch.setattr(waiting, "LATE_S", 0.3 if is_late else 1.0)
    blocked = []

    async def decode(request, body):
        if not is_late and len(server.requests) <= 4:
            return await hangs(request)
        return await stream(request, body, 40, 0.05 if is_late else 0.01)

    async def sleep():
        time.sleep(1.7 if is_late else 0.0)

    def block(ledger):
        if ledger.candidates[0].length > 3 and not blocked:
            blocked.append(engine.call(sleep()))

    server = Stub(decode=decode)
    with engine_on(server, first_token_s=1.0, token_s=1.0) as engine:
        check_streamed(run(engine, 2, on_progress=block), 40)
        assert engine.num_losses == (not is_late)
        assert len(blocked) == 1 or not is_late


def test_a_missed_probe_of_a_server_that_sends_tokens_is_repeated(monkeypatch):
    monkeypatch.setattr(waiting, "LATE_S", 0.1)  # a busy machine stops both, the loop and the server
    server = Stub(health=hangs, decode=lambda request, body: stream(request, body, 60, 0.03))
    with engine_on(server, health_s=0.7) as engine:
        result = run(engine, 2)
        check_streamed(result, 60)
        assert (engine.num_losses, result.num_resumed) == (0, 0)


def test_servers_that_are_not_reached_are_no_attempts(monkeypatch):
    """More of them than a candidate has attempts, without probes. The wait for a server decides."""
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 60.0)
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 45)]
    with engine_on(*urls, return_s=0.5) as engine, pytest.raises(GenerationError) as failure:
        run(engine)
    assert str(failure.value).startswith("All vLLM servers are lost, and none reconnected")
    assert "http://127.0.0.1:44: nothing listens there" in str(failure.value)


def test_too_many_connections_of_our_own_are_no_loss(monkeypatch):
    left = [3]
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
    with engine_on(Stub()) as engine:
        result = run(engine, 2)
        check_rows(result)
        assert (engine.num_losses, left) == (0, [0])
        assert all(row.num_empty_attempts == 0 for group in result.groups for row in group.rows)


# A request


def poisoned(prompt: int, kind: int | str = 500) -> Stub:
    """A server on which the requests of one prompt fail. Others take a moment."""
    payload = {"error": {"message": "it broke", "code": 500}} if kind == "in the stream" else completion([], None)

    async def decode(request, body):
        if body["prompt"][0] == prompt:
            return error(kind) if isinstance(kind, int) else await answer({"choices": [], **payload})
        await asyncio.sleep(0.05)
        return await answer(completion(TOKENS))

    return Stub(decode=decode)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (500, "answered 500: it broke"),
        (408, "answered 408: it broke"),
        ("in the stream", "it broke"),
        ("no end", "ended a stream without a `finish_reason`: its engine stopped."),
    ],
)
def test_one_poisoned_prompt_costs_no_server_and_is_the_one_that_is_dropped(kind, words):
    servers = [poisoned(31, kind) for _ in range(8)]
    with engine_on(*servers) as engine:
        result = run(engine, 128, drops=True)
        assert engine.num_losses == 0
        assert list(result.dropped) == [31]
        assert re.search("candidate . of prompt 31 on http", result.dropped[31])
        assert result.dropped[31].endswith(f"{words} (9 times in a row)")
        check_rows(result, 127)
    assert result.num_resumed <= 16  # those of the prompt's two candidates
    tried = Counter(i for i, server in enumerate(servers) for body in server.requests if body["prompt"][0] == 31)
    assert len(tried) >= 2


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_poisoned_prompt_is_named_where_it_ends_the_run(status):
    words = rf"of prompt 2 on .*answered {status}: it broke \(9 times in a row\)"
    with engine_on(*(poisoned(2, status) for _ in range(3))) as engine, pytest.raises(GenerationError, match=words):
        run(engine, 4)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_request_that_fails_once_goes_on_from_its_tokens(reason):
    """Its server ends it with an error, or aborts it for another client, whose list of aborts is empty."""

    async def decode(request, body):
        if len(body["prompt"]) == 1:
            return await answer(completion(TOKENS[:2], reason))
        return await answer(completion(TOKENS[2:]))

    server = Stub(decode=decode)
    with engine_on(server) as engine:
        result = run(engine, 2)
        check_rows(result)
        assert (engine.num_losses, result.num_resumed) == (0, 4)
    assert [body["prompt"] for body in server.requests].count([1, 4, 5]) == 2


# A server


@pytest.mark.parametrize("status", [500, 503])
def test_a_dead_engine_behind_a_live_api_is_lost_at_once(status):
    fail = fails(status, "the engine died")
    dead = Stub(health=fail, decode=fail)
    with engine_on(dead, Stub(), return_s=5.0) as engine:
        result = run(engine, 4)
        check_rows(result, 4)
        assert sorted(engine.states().values(), key=str) == [State.DOWN, State.UP]
        assert engine.num_losses == 1
        assert {row.engine_id for group in result.groups for row in group.rows} == {engine.base_urls[1]}
    assert len(dead.requests) <= 4  # no candidate came back to it


def test_a_healthy_server_on_which_several_prompts_fail_is_lost():
    with engine_on(Stub(decode=fails(500)), Stub()) as engine:
        check_rows(run(engine, 16), 16)
        assert engine.num_losses >= 1


def test_prompts_that_fail_while_others_decode_are_no_loss():
    """Ten prompts of 40 fail, on a server that decodes the others. They go on failing when these have ended."""
    asked = Counter()

    async def decode(request, body):
        (prompt,) = body["prompt"]
        asked[prompt] += 1
        if prompt % 4 == 0:
            return error(500)
        response = await event_stream(request)
        while min(asked[bad] for bad in range(0, 40, 4)) < 3:  # with the third, one of the first two is known to fail
            await asyncio.sleep(0.005)
        await send(response, completion(TOKENS))
        return response

    with engine_on(Stub(decode=decode)) as engine:
        result = run(engine, 40, drops=True)
        assert engine.num_losses == 0
        assert sorted(result.dropped) == list(range(0, 40, 4))


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(status):
    async def decode(request, body):
        return error(status, "the queue is full") if len(server.requests) <= 60 else await answer(completion(TOKENS))

    server = Stub(decode=decode)
    with engine_on(server) as engine:
        result = run(engine, 2)  # of four candidates, each is refused 15 times
        check_rows(result)
        assert engine.num_losses == 0
        assert all(row.num_empty_attempts == 0 for group in result.groups for row in group.rows)


def test_a_server_that_is_busy_for_too_long_is_an_error_that_says_so(monkeypatch, caplog):
    monkeypatch.setattr("trl_darts.engines.waiting.INTERVAL_S", 0.2)
    with engine_on(Stub(decode=fails(503, "the queue is full")), first_token_s=0.5) as engine:
        with pytest.raises(GenerationError, match=r"answered 503: the queue is full \(9 times in a row\)"):
            run(engine, 2)
        (url,) = engine.base_urls
    waited = f"No new tokens; waiting for {url}, which is busy ({url} answered 503: the queue is full)"
    assert any(message.startswith(waited) for message in caplog.messages)


def test_a_request_that_is_refused_goes_to_a_server_that_is_not_busy():
    free = Stub()
    with engine_on(Stub(decode=fails(429)), free) as engine:
        check_rows(run(engine, 4), 4)
        assert engine.num_losses == 0
    assert len(free.requests) == 8


# Deadlines of a request


def test_an_answer_that_still_arrives_is_not_failed_by_the_clock():
    server = Stub(decode=lambda request, body: stream(request, body, 30, 0.05))
    with engine_on(server, request_s=0.8) as engine:
        result = run(engine, 2)
        check_streamed(result, 30)
        assert result.num_resumed == 0


def test_silence_beyond_the_limit_is_an_error(monkeypatch):
    """Others decode, and without metrics the server may have queued it."""
    monkeypatch.setattr(aborts, "ABORT_GRACE_S", 0.1)

    async def decode(request, body):
        if body["request_id"].split("-")[-2] == "3":
            return await hangs(request)
        return await stream(request, body, 60, 0.03)

    words = r"candidate 1 of prompt 1 on .*no tokens within `vllm_request_timeout_s` \(0.8 s\)"
    with (
        engine_on(Stub(decode=decode), request_s=0.8) as engine,
        pytest.raises(GenerationError, match=words),
    ):
        run(engine, 2)


def test_a_request_that_fails_on_a_process_with_other_weights_loses_it():
    """It was restarted behind a proxy, which told the request so, and is healthy again."""

    async def decode(request, body):
        return error(502) if len(server.requests) <= 4 else await answer(completion(TOKENS))

    async def weight_info(request):
        return web.json_response({"weight_version": "default" if len(server.requests) < 5 else "v3"})

    server = Stub(more_routes={"GET /weight_info": weight_info}, decode=decode)
    with engine_on(server, options={"refresh": is_refreshed}) as engine:
        (member,) = engine.members.values()
        member.version = 3
        engine.call(engine.pool()).version = 3
        check_rows(run(engine, 2))
        assert engine.num_losses == 1
        assert member.reason == "it has the weights 'default' instead of 'v3', so it was restarted"


# A loss and a return


def test_what_a_lost_server_still_decodes_is_aborted_before_it_gets_more():
    events = []

    async def decode(request, body):
        events.append(body["request_id"])
        if len(server.requests) == 4:
            request.transport.close()
        if len(server.requests) <= 4:
            return await hangs(request)
        return await answer(completion(TOKENS))

    async def abort(request):
        events.append("abort")
        return await Stub.abort(server, request)

    server = Stub(decode=decode, abort=abort)
    with engine_on(server) as engine:
        check_rows(run(engine, 2))
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

    async def decode(request, body):
        await asyncio.sleep(0.2)  # ten intervals of probes
        return await answer(completion(TOKENS))

    with engine_on(*(Stub(decode=decode) for _ in range(8))) as engine:
        check_rows(run(engine, 16), 16)
        assert len(scans) == 1
        for url in engine.base_urls:
            engine.lose(url, "for the test")
        wait_for(lambda: set(engine.states().values()) == {State.UP})
    assert len(scans) <= 6  # they return within one or two intervals


# Slots


@pytest.mark.parametrize("how", ["500", "never", "cut"])
def test_a_server_that_does_not_tell_its_slots_has_those_of_the_others(how):
    """It told the preflight that it is like the others, but has much to do now."""
    tells = []

    async def server_info(request):
        if tells:
            return await Stub.server_info(other, request)
        if how == "cut":
            request.transport.close()
        return await hangs(request) if how == "never" else error(500)

    def decode(request, body):
        return stream(request, body, 3, 0.02)

    known, other = Stub(slots=8, decode=decode), Stub(slots=8, decode=decode, server_info=server_info)
    with engine_on(known, other, info_s=1.0) as engine:
        assert len(run(engine, 60).groups) == 60
        assert [member.capacity for member in engine.members.values()] == [10, 10]
        assert other.most_open <= 10
        other.slots = 4
        tells.append(True)
        wait_for(lambda: engine.members[engine.base_urls[1]].capacity == 6)  # it is asked again


def test_slots_are_kept_if_a_server_returns_without_telling_them():
    server = Stub(slots=4)
    with engine_on(server) as engine:
        check_rows(run(engine, 2))
        server.server_info = fails(500)
        (url,) = engine.base_urls
        engine.lose(url, "for the test")
        wait_for(lambda: engine.states() == {url: State.UP})
        assert engine.members[url].capacity == 6


def test_a_tight_limit_of_open_files_is_told_with_numbers(monkeypatch, caplog):
    monkeypatch.setattr("trl_darts.engines.vllm_server.max_open_files", lambda: 56 * 2)
    with engine_on(Stub(slots=256), Stub(slots=256)) as engine:
        check_rows(run(engine, 2))
        assert [member.capacity for member in engine.members.values()] == [56, 56]
    (message,) = [message for message in caplog.messages if "limit of open files" in message]
    assert "allows 56 connections to each of 2 vLLM servers, which could decode 274 sequences at once" in message
    assert "at least 1060 (`ulimit -Hn 1060`" in message  # 2 × 274 + 512


def test_processes_that_share_the_servers_share_their_slots_and_probe_only_during_rollouts():
    server = Stub(slots=64)
    with engine_on(server, options={"num_sharing": 8}) as engine:
        (url,) = engine.base_urls
        check_rows(run(engine, 2))
        assert engine.members[url].capacity == 8 + 2
        engine.call(asyncio.sleep(0))
        before = server.num_probes
        time.sleep(0.5)
        assert server.num_probes == before
        engine.lose(url, "for the test")
        engine.follow(0, {url: True})  # the main process has found it
        check_rows(run(engine, 2))
