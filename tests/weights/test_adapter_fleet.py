"""
Adapters on servers without a model: what each is asked, in which order, and what a failure costs.

Invariants: no server is paused, and none has its own weights changed. A server that does not load a version is lost,
and the others go on. A version stays loaded, and its file stays, as long as a request could name it.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
import torch

from trl_darts.engines.pool import State
from trl_darts.weights import adapter_fleet
from trl_darts.weights.adapter_fleet import AdapterFleet, refresh_adapter, unload_run
from trl_darts.weights.files import WeightDirectory


pytestmark = pytest.mark.vllm  # TRL's client wants vLLM importable
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CONFIG = {"r": 1}


def cards(*names):
    loaded = [{"id": name, "root": "/x", "parent": "m"} for name in names]
    return 200, {"data": [{"id": "m", "root": "m", "parent": None}, *loaded]}


def tensors():
    return {"a.lora_A.weight": torch.ones(1, 4)}


@pytest.fixture
def fleet(servers):
    """A fleet of the servers, with its engine and its files."""
    from trl_darts.engines import VLLMServerEngine

    files = WeightDirectory()
    engine = VLLMServerEngine([server.url for server in servers])
    engine.use_adapters(files.name)
    for server in servers:
        server.answers["/v1/models"] = cards()
        server.answers["/collective_rpc"] = (200, {"results": [[]]})
    yield AdapterFleet(engine, files), engine, files
    engine.close()
    files.close()


class Listener:
    """A running rollout whose requests name versions of the first server."""

    keeps_kv = False

    def __init__(self, url, *versions):
        self.url, self.versions, self.updated, self.lost = url, set(versions), [], []

    def num_held(self, url):
        return 0

    def versions_on(self, url):
        return self.versions if url == self.url else set()

    def on_updated(self, url, num_outputs):
        self.updated.append((url, num_outputs))

    def on_lost(self, url, reason):
        self.lost.append(url)

    def on_joined(self, url, capacity): ...

    def on_resized(self, url, capacity): ...


def begin(engine, listener):
    async def add():
        (await engine.pool()).listeners.append(listener)

    engine.call(add())


def asked(server, path):
    return [body["lora_name"] for posted, body in server.posts if posted == path]


def test_a_sync_loads_one_adapter_and_pauses_nothing(fleet, servers):
    fleet, engine, files = fleet
    fleet.update_adapter(tensors(), CONFIG)
    assert fleet.num_bytes == 16
    for server in servers:
        assert [path for path in server.paths if path != "/collective_rpc"] == [LOAD]
        assert asked(server, LOAD) == [f"{files.name}-v1"]
        assert server.posts[-1][1]["lora_path"] == str(files.path(1))
    assert {member.version for member in engine.members.values()} == {1}


def test_what_requests_name_stays(fleet, servers):
    """The version of running requests, and the current one, which others may still name while the next is loaded."""
    fleet, engine, files = fleet
    for _ in range(3):
        fleet.update_adapter(tensors(), CONFIG)
    assert [files.path(version) is not None for version in (1, 2, 3)] == [False, False, True]
    listener = Listener(servers[0].url, 2)
    begin(engine, listener)
    for server in servers:
        server.answers["/v1/models"] = cards(*(f"{files.name}-v{version}" for version in (1, 2, 3)), "other-v1")
    fleet.update_adapter(tensors(), CONFIG)
    assert asked(servers[0], UNLOAD) == [f"{files.name}-v1"]
    assert asked(servers[1], UNLOAD) == [f"{files.name}-v1", f"{files.name}-v2"]
    assert sorted(listener.updated) == sorted((server.url, None) for server in servers)
    assert files.path(3) is not None
    assert files.path(4) is not None


def test_what_a_server_still_decodes_with_stays(fleet, servers):
    """Its client may be gone: vLLM would look for the file of an adapter that was unloaded, and end."""
    fleet, _, files = fleet
    fleet.update_adapter(tensors(), CONFIG)
    first = f"{files.name}-v1"
    for server in servers:
        server.answers["/v1/models"] = cards(first)
    servers[0].answers["/collective_rpc"] = (200, {"results": [[first, "other-v1"]]})
    fleet.update_adapter(tensors(), CONFIG)
    assert [asked(server, UNLOAD) for server in servers] == [[], [first], [first]]
    assert files.path(1) is not None


@pytest.mark.parametrize("answer", [(500, {"error": {"message": "too large"}}), (404, {"error": {"message": "gone"}})])
def test_a_server_that_fails_is_lost_alone(fleet, servers, answer):
    fleet, engine, _ = fleet
    servers[1].answers[LOAD] = answer
    fleet.update_adapter(tensors(), CONFIG)
    states = engine.states()
    assert [states[server.url] for server in servers] == [State.UP, State.DOWN, State.UP]
    reason = engine.members[servers[1].url].reason
    assert ("too large" if answer[0] == 500 else "`weight_sync_dir`") in reason


def test_an_adapter_that_is_not_unloaded_is_no_failure(fleet, servers):
    fleet, engine, files = fleet
    fleet.update_adapter(tensors(), CONFIG)
    for server in servers:
        server.answers["/v1/models"] = cards(f"{files.name}-v1")
        server.answers[UNLOAD] = (500, {"error": {"message": "no"}})
    fleet.update_adapter(tensors(), CONFIG)
    assert set(engine.states().values()) == {State.UP}


def test_a_server_that_is_back_loads_what_it_lacks(fleet, servers):
    """One that was restarted has no adapter, and one that was only silent still has it."""
    fleet, engine, files = fleet
    fleet.update_adapter(tensors(), CONFIG)
    name = f"{files.name}-v1"
    servers[1].answers["/v1/models"] = cards(name)
    for server in servers[:2]:
        server.posts.clear()

    async def come_back():
        pool = await engine.pool()
        for server in servers[:2]:
            assert await refresh_adapter(pool, pool.members[server.url], files)
        return [await pool.members[server.url].shown_version() for server in servers]

    assert engine.call(come_back()) == ["default", "v1", "default"]
    assert [asked(server, LOAD) for server in servers[:2]] == [[name], []]
    assert all("/resume" in server.paths for server in servers[:2])  # a killed trainer may have left it paused


def test_the_end_of_a_run_unloads_its_own_where_a_server_answers(fleet, servers, monkeypatch):
    """Not the adapters of other runs, and not one that the server still decodes with. Nothing is raised."""
    fleet, _, files = fleet
    first, frozen, broken = servers
    released = threading.Event()
    monkeypatch.setattr(adapter_fleet, "END_TIMEOUT_S", 0.5)
    fleet.update_adapter(tensors(), CONFIG)
    own = [f"{files.name}-v{version}" for version in (1, 2)]
    first.answers["/v1/models"] = cards(*own, f"{files.name}-trial", "other-v1")
    first.answers["/collective_rpc"] = (200, {"results": [[own[1]]]})
    frozen.acts["/v1/models"] = partial(asyncio.to_thread, released.wait, 10)
    broken.answers["/v1/models"] = (500, {"error": {"message": "no"}})
    fleet.unload_all()
    released.set()
    assert set(asked(first, UNLOAD)) == {own[0]}
    assert [asked(server, UNLOAD) for server in (frozen, broken)] == [[], []]


def test_closing_the_connections_unloads_too(fleet, servers):
    _, engine, files = fleet
    name = f"{files.name}-v1"

    async def is_unloaded():
        servers[0].answers["/v1/models"] = cards()

    servers[0].answers["/v1/models"] = cards(name)
    servers[0].acts[UNLOAD] = is_unloaded
    engine.before_close(partial(unload_run, engine.call(engine.pool())))
    engine.close()
    assert asked(servers[0], UNLOAD) == [name]
