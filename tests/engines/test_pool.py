"""The pool of servers: its members, its notifications, and how an engine reconnects a server."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from tests.engines.fake_server import answer, completion, fake_server
from tests.engines.stub_servers import BODY, TOKENS, Stub, engine_on, event_stream, rollout_of, run, start, tokens_of
from tests.waits import wait_for
from trl_darts.engines import aborts, monitor, server_log, vllm_server, waiting
from trl_darts.engines.monitor import Monitor
from trl_darts.engines.pool import ServerPool, State
from trl_darts.engines.vllm_api import VLLMServer, new_session
from trl_darts.engines.waiting import Deadlines
from trl_darts.errors import GenerationError, GenerationTimeoutError
from trl_darts.scheduling.concurrency import ServerLoad


PROBE_S = 0.02
LIMIT = 100


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", PROBE_S)
    monkeypatch.setattr(vllm_server, "PROGRESS_INTERVAL_S", PROBE_S)


class Log:
    """A listener that records its notifications."""

    keeps_kv = False

    def __init__(self):
        self.heard = []

    def num_held(self, url):
        return 0

    def on_lost(self, url, reason):
        self.heard.append(("lost", reason))

    def on_joined(self, url, capacity):
        self.heard.append(("joined", capacity))

    def on_resized(self, url, capacity):
        self.heard.append(("resized", capacity))


class Switch(Stub):
    """A server whose `/health` and completions can be changed while it runs."""

    def __init__(self, status=200, body=b"", breaks=0):
        super().__init__()
        self.status, self.body = status, body
        self.breaks = breaks  # so many completions are cut

    async def health(self, request):
        await super().health(request)
        return web.Response(status=self.status, body=self.body)

    async def decode(self, request, body):
        if self.breaks:
            self.breaks -= 1
            request.transport.close()
        return await super().decode(request, body)


async def waits(member, version):
    """Makes a reconnected server wait for a weight sync."""
    return False


def with_pool(switch, play, refresh=waits, **deadlines):
    """Runs `play(pool, member, log)` on a monitored pool of one server."""

    async def main(url):
        async with new_session() as session:
            connect = partial(VLLMServer, session=session)
            servers = ServerPool({url: connect(url)}, LIMIT)
            watching = Monitor(servers, connect, Deadlines(**deadlines), refresh)
            watching.start()
            await watching.ready()
            servers.listeners = [log := Log()]
            await play(servers, servers.members[url], log)

    with fake_server(switch.routes) as url:
        asyncio.run(main(url))


def test_a_strange_answer_does_not_end_the_watch(monkeypatch):
    """Otherwise, a lost server could never reconnect."""
    switch, get_text = Switch(), VLLMServer.get_text

    async def strange(self, *args):
        if switch.num_probes == 0:
            switch.num_probes = 1
            raise RuntimeError("something that nobody thought of")
        return await get_text(self, *args)

    monkeypatch.setattr(VLLMServer, "get_text", strange)

    async def play(servers, member, log):
        servers.lose(next(iter(servers.members)), "gone")
        await until(lambda: member.state is State.RETURNED)

    with_pool(switch, play)


async def until(condition, timeout_s=5.0):
    deadline = time.perf_counter() + timeout_s
    while not condition():
        assert time.perf_counter() < deadline
        await asyncio.sleep(0.005)


def test_life_of_a_server():
    switch = Switch(body=b"\xff")  # a proxy in between may say what it likes

    async def play(servers, member, log):
        (url,) = servers.members
        servers.join(url)  # it is up
        assert log.heard == []
        switch.status = 503
        await until(lambda: member.state is State.DOWN)
        servers.join(url)  # nothing is known of it yet
        assert member.state is State.DOWN
        for status, state in ((200, State.RETURNED), (500, State.DOWN), (200, State.RETURNED)):
            switch.status = status
            await until(lambda state=state: member.state is state)
        assert servers.urls(State.RETURNED) == [url]
        servers.join(url)
        assert servers.urls(State.UP) == [url]
        assert [name for name, _ in log.heard] == ["lost", "joined"]
        assert "answered 503" in log.heard[0][1]
        assert log.heard[1] == ("joined", LIMIT)
        assert member.num_losses == 1

    with_pool(switch, play)


def test_loss_is_told_once_and_its_last_reason_is_kept():
    async def play(servers, member, log):
        (url,) = servers.members
        servers.lose(url, "first")
        servers.lose(url, "second")
        assert log.heard == [("lost", "first")]
        assert (member.reason, member.num_losses) == ("second", 1)

    with_pool(Switch(), play)


def test_a_loss_has_the_words_of_its_cause(tmp_path, monkeypatch, caplog):
    log = tmp_path / "server.log"
    log.write_text("RuntimeError: no memory left")
    monkeypatch.setattr(server_log, "find_logs", lambda urls: dict.fromkeys(urls, log))
    switch = Switch(500, b'{"error": {"message": "It broke. See stack trace (above) for the root cause."}}')

    async def play(servers, member, log):
        await until(lambda: member.state is State.DOWN)

    with_pool(switch, play)
    assert caplog.messages[0].endswith(f"answered 500: It broke. RuntimeError: no memory left. Its log: {log}")


def test_draining():
    async def play(servers, member, log):
        (url,) = servers.members
        servers.drain(url)
        assert (member.state, member.capacity) == (State.UP, 0)
        servers.drain(url, False)
        assert log.heard == [("resized", 0), ("resized", LIMIT)]
        servers.lose(url, "gone")
        servers.drain(url)
        await until(lambda: member.state is State.RETURNED)
        servers.join(url)
        assert log.heard[2:] == [("lost", "gone"), ("joined", 0)]

    with_pool(Switch(), play)


# The engine and its pool


def test_refreshed_server_serves_again():
    """The main thread is busy. The server gets no requests before it has the weights of the last sync."""
    switch, asked = Switch(breaks=2), []  # both candidates' first requests

    async def refresh(pool, member):
        asked.append((member.server.base_url, pool.version, len(switch.requests)))
        return True

    with engine_on(switch, options={"refresh": refresh}) as engine:
        assert tokens_of(run(engine)) == [[TOKENS] * 2]
        (url,) = engine.base_urls
        assert engine.states() == {url: State.UP}
        assert engine.num_losses == 1
    ((asked_of, version, num_before),) = asked
    assert (asked_of, version) == (url, 0)
    assert num_before <= 2 < len(switch.requests)


def test_server_that_is_not_refreshed_stays_out(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.2)
    words = "ZeroDivisionError: division by zero"
    switch, broken = Switch(breaks=2), [True]

    async def refresh(pool, member):
        return bool(1 / (not broken))

    with engine_on(switch, return_s=2.0, options={"refresh": refresh}) as engine:
        (url,) = engine.base_urls
        with pytest.raises(GenerationError, match=f"within `vllm_server_timeout` .2 s.*{url}: {words}"):
            run(engine)
        assert any(f"No vLLM server is up; waiting for {url} (" in message for message in caplog.messages)
        assert len(switch.requests) <= 2
        broken.clear()
        wait_for(lambda: engine.states() == {url: State.UP})  # it is healthy; the next rollout may have it
        assert len(run(engine).groups) == 1


def test_server_that_waits_for_a_weight_sync_is_asked_about_once_and_used_when_it_has_had_one():
    switch, asked = Switch(breaks=2), []

    async def refresh(pool, member):
        return bool(asked.append(member.server.base_url))

    with engine_on(switch, return_s=0.5, options={"refresh": refresh}) as engine:
        (url,) = engine.base_urls
        with pytest.raises(GenerationError, match="`vllm_server_timeout`"):
            run(engine)
        assert asked == [url]
        assert engine.states() == {url: State.RETURNED}
        assert len(switch.requests) <= 2
        engine.join(url)
        assert len(run(engine).groups) == 1


def test_open_files_are_shared_among_the_servers_that_there_are():
    session: Any = None  # nothing is sent
    servers = ServerPool({"http://one": VLLMServer("http://one", session)}, LIMIT)
    servers.note_slots("http://one", None)
    assert servers.members["http://one"].capacity == LIMIT
    servers.add(VLLMServer("http://other", session))
    assert [m.capacity for m in servers.members.values()] == [LIMIT // 2, 0]  # nothing before it has been asked
    servers.note_slots("http://other", None)
    assert [m.capacity for m in servers.members.values()] == [LIMIT // 2] * 2
    servers.remove("http://other")
    assert {url: m.capacity for url, m in servers.members.items()} == {"http://one": LIMIT}


def test_share_of_a_run_in_the_requests_of_its_servers():
    """A server may not count all candidates yet, or still count some that have ended. Each reading is used once."""
    session: Any = None  # nothing is sent
    servers = ServerPool({"http://one": VLLMServer("http://one", session)}, LIMIT)
    servers.note_slots("http://one", 8)
    servers.note_load("http://one", ServerLoad(4, 0, 0, 0.1, 0))  # no rollout is running
    assert servers.pop_share() is None
    servers.listeners = [log := Log()]
    log.num_held = lambda url: 4
    servers.note_load("http://one", ServerLoad(8, 4, 0, 0.1, 0), 6)
    servers.note_load("http://one", ServerLoad(3, 0, 0, 0.1, 0))
    assert servers.pop_share() == 9 / 15
    assert servers.pop_share() is None


def test_another_process_follows_the_main_one():
    with fake_server(Stub().routes) as new, engine_on(Stub(), Stub()) as engine:
        _, other = engine.base_urls
        engine.follow(2, {other: False, new: True})
        assert engine.states() == {other: State.DOWN, new: State.UP}
        assert engine.state == (2, {other: False, new: True})


def test_drained_server_gets_nothing_new():
    first, second = Stub(), Stub()
    with engine_on(first, second) as engine:
        url, _ = engine.base_urls
        engine.drain(url)
        run(engine, size=4)
        assert (len(first.requests), len(second.requests)) == (0, 4)
        engine.drain(url, False)
        run(engine, size=4)
        assert len(first.requests) == 2


# The end of a rollout that fails


class Aborted(Stub):
    """A server whose streams end without a reason when they are aborted, as vLLM's do in its queue."""

    def __init__(self):
        super().__init__()
        self.running, self.ended, self.closed = set(), set(), set()

    async def decode(self, request, body):
        name = f"cmpl-{body['request_id']}-0"
        self.running.add(name)
        response = await event_stream(request)
        while name not in self.ended and request.transport is not None:
            await asyncio.sleep(0.01)
        if name not in self.ended:
            self.closed.add(name)
        return response

    async def abort(self, request):
        for name in (await request.json())["request_ids"]:
            await asyncio.sleep(0.05)
            self.ended.add(name)
        return web.json_response({})


def test_requests_of_an_interrupted_rollout_are_aborted_and_none_is_closed():
    """vLLM misses some of many connections that close at once. The aborts do not make the server lost."""
    server = Aborted()

    def interrupt(ledger):
        if len(server.running) == 8:
            raise KeyboardInterrupt

    with engine_on(server) as engine:
        with pytest.raises(KeyboardInterrupt):
            run(engine, size=8, on_progress=interrupt)
        wait_for(lambda: server.ended == server.running)
        assert list(engine.states().values()) == [State.UP]
    assert server.closed == set()


def test_a_weight_sync_waits_for_the_end_of_a_cancelled_rollout():
    server = Aborted()
    with engine_on(server) as engine:
        running = start(engine, size=8)
        wait_for(lambda: len(server.running) == 8)
        running.cancel()
        engine.call(engine.idle())
        assert server.ended == server.running


def test_the_next_rollout_hears_of_losses_while_a_cancelled_one_ends():
    class Breaks(Aborted):
        breaks = True

        async def decode(self, request, body):
            if body["max_tokens"] == 100:
                return await super().decode(request, body)
            if self.breaks:
                self.breaks = False
                await asyncio.sleep(1.0)  # the cancelled one has ended by then
                request.transport.close()
            return await answer(completion([4]))

    server = Breaks()
    with engine_on(server, request_s=10.0) as engine:
        running = start(engine, size=8)
        wait_for(lambda: len(server.running) == 8)
        running.cancel()
        result = engine.run(*rollout_of(size=1, body={**BODY, "max_tokens": 99}))
    assert result.num_resumed == 1


# Deadlines


@contextmanager
def mute_server(backlog=100):
    """Accepts connections and never answers. With a full backlog, it does not accept them either."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def check_deadline(url, seconds, error, words, **deadlines):
    with engine_on(url, **deadlines) as engine:
        start = time.perf_counter()
        with pytest.raises(error, match=words):
            run(engine)
        assert abs(time.perf_counter() - start - seconds) < 1.0


def test_rollout_deadline(monkeypatch):
    monkeypatch.setattr(aborts, "END_S", 0.5)
    with mute_server() as url:
        words = r"longer than `vllm_rollout_timeout_s` \(1 s\): 2 candidates are still open"
        # Its aborts are not answered either.
        check_deadline(url, 1.5, GenerationTimeoutError, words, rollout_s=1.0, info_s=0.3)


def test_server_that_never_answers_is_an_error_in_time(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.2)
    with mute_server() as url:
        words = rf"`vllm_server_timeout` \(1 s\). {url}: no answer to `/health` after 0.5 s"
        check_deadline(url, 1.5, GenerationError, words, health_s=0.5, return_s=1.0)
        assert caplog.messages[0] == f"No new tokens; waiting for {url} (0 of 600 s)"


def test_server_that_takes_no_connection_is_told_from_a_slow_one():
    with mute_server(backlog=0) as url, socket.socket() as first, socket.socket() as second:
        for taken in (first, second):  # the queue is full then
            taken.setblocking(False)
            taken.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        words = f"{url}: ConnectionTimeoutError: Connection timeout to host"
        check_deadline(url, 1.3, GenerationError, words, connect_s=0.3, return_s=1.0, health_s=10.0)
