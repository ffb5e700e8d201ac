"""
Weight sync against real servers, of which the last test kills one.

Invariants: after every sync, and not only after the first, a server computes what the trainer's model computes. A
server that does not take the weights is lost, never waited for; it is not paused, still answers, and the next sync
brings it to the trainer's weights.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from tests.weights.probes import (
    MAX_ERROR,
    PROBE,
    greedy_error,
    load_model,
    max_error,
    model_logprobs,
    perturb,
    server_logprobs,
    sync,
)
from trl_darts.engines.pool import State
from trl_darts.weights import calls
from trl_darts.weights.files import WeightDirectory
from trl_darts.weights.update import refresh


pytestmark = pytest.mark.vllm


@pytest.fixture(params=["one, untied", "two, tied"])
def servers(request):
    if request.param == "one, untied":
        return [request.getfixturevalue("untied")]
    return list(request.getfixturevalue("pair"))


@pytest.fixture
def client_of(fleet_of):
    """`client_of(server, …)` returns a connected client that writes files, and the engine of the servers."""

    def connect(*servers):
        fleet, engine = fleet_of([server.base_url for server in servers], WeightDirectory())
        fleet.init_communicator()
        return fleet, engine

    return connect


def behind(engine):
    """Returns the servers without the weights of the last sync."""
    version = engine.call(engine.pool()).version
    return [url for url, member in engine.members.items() if member.version != version]


def come_back(engine, url):
    engine.members[url].state = State.RETURNED


def test_servers_follow_the_trainer(servers, client_of, rng):
    model = load_model(servers[0].model_dir)
    fleet, engine = client_of(*servers)
    for step in range(1, 4):
        perturb(model, rng)
        assert max_error(servers[0], model) > 10 * MAX_ERROR  # the step is visible, so agreement means something
        sync(fleet, model)
        assert {member.version for member in engine.members.values()} == {step}
        for server in servers:
            assert max_error(server, model) <= MAX_ERROR
            assert greedy_error(server, model) <= MAX_ERROR
            assert server.request("/weight_info") == {"weight_version": f"v{step}"}
            assert server.request("/is_paused") == {"is_paused": False}


def test_bfloat16_trainer(untied, client_of, rng):
    """The server keeps its dtype, and the files have the trainer's. A killed trainer has left the server paused."""
    model = load_model(untied.model_dir)
    untied.request("/pause?mode=keep", {})
    perturb(model, rng)
    model = model.to(torch.bfloat16)
    sync(client_of(untied)[0], model)
    assert max_error(untied, model.float()) <= MAX_ERROR


def test_running_requests_survive_a_sync(untied, client_of, rng):
    """They freeze, and continue under the new weights with all keys and values recomputed, including cached ones."""
    model = load_model(untied.model_dir)
    fleet, _ = client_of(untied)
    server_logprobs(untied, PROBE)  # fills the cache
    payload = {
        "model": untied.model,
        "prompt": PROBE,
        "max_tokens": 600,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    answers = []
    request = threading.Thread(target=lambda: answers.append(untied.request("/v1/completions", payload)))
    request.start()
    while untied.metric("vllm:num_requests_running") < 1:
        assert request.is_alive()
    perturb(model, rng)
    sync(fleet, model)
    assert request.is_alive(), "the request was to be running during the sync"
    request.join()
    choice = answers[0]["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 600)
    last = model_logprobs(model, PROBE + choice["token_ids"])[-5:]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"][-5:]), last, atol=MAX_ERROR, rtol=0)


def test_checkpoint_that_a_server_can_not_read(servers, client_of, rng, monkeypatch):
    """
    The reload fails in the middle of a fused layer. Incomplete layers are restored and do not affect the next reload.
    """
    model = load_model(servers[0].model_dir)
    fleet, engine = client_of(*servers)
    write = WeightDirectory.write

    def spoiled(self, version, params, num_bytes):
        path = write(self, version, list(params)[:5], num_bytes)
        (path / "model-99999.safetensors").write_bytes(b"no checkpoint")
        return path

    monkeypatch.setattr(WeightDirectory, "write", spoiled)
    perturb(model, rng)
    sync(fleet, model)
    assert set(behind(engine)) == {server.base_url for server in servers}
    assert all("under the same path" in member.reason for member in engine.members.values())
    for server in servers:
        assert server.request("/is_paused") == {"is_paused": False}
        server_logprobs(server, PROBE)  # would kill an engine that was not restored
        assert server.request("/weight_info")["weight_version"] == "v1-incomplete"
    monkeypatch.undo()
    for server in servers:
        come_back(engine, server.base_url)
    sync(fleet, model)
    assert all(max_error(server, model) <= MAX_ERROR for server in servers)


def test_a_server_that_was_left_out_gets_the_weights_when_it_is_back(pair, client_of, rng):
    """Also if no other server took them."""
    model = load_model(pair[0].model_dir)
    fleet, engine = client_of(*pair)
    for server in pair:
        engine.lose(server.base_url, "killed")
    perturb(model, rng)
    sync(fleet, model)
    assert behind(engine) == [server.base_url for server in pair]
    pool = engine.call(engine.pool())
    for server in pair:
        come_back(engine, server.base_url)  # otherwise it is not waited for
        assert engine.call(refresh(pool, engine.members[server.base_url], fleet._directory))
        assert max_error(server, model) <= MAX_ERROR


@pytest.mark.parametrize("moment", ["pause", "load"])
def test_server_that_freezes_is_not_waited_for(pair, client_of, rng, monkeypatch, moment):
    """The other server gets its weights. The frozen one takes the next sync once it continues."""
    for name in ("PAUSE_TIMEOUT_S", "LOAD_TIMEOUT_S"):
        monkeypatch.setattr(calls, name, 3.0)
    first, second = pair
    model = load_model(first.model_dir)
    fleet, engine = client_of(*pair)
    sync(fleet, model)
    perturb(model, rng)
    call = getattr(calls, moment)

    async def call_frozen(server, *args):
        processes = second.session() if server.base_url == second.base_url else []
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            await call(server, *args)
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)

    monkeypatch.setattr(calls, moment, call_frozen)
    start = time.perf_counter()
    sync(fleet, model)
    assert 3 < time.perf_counter() - start < 30
    assert f"{second.base_url} did not answer" in engine.members[second.base_url].reason
    assert max_error(first, model) <= MAX_ERROR
    assert behind(engine) == [second.base_url]
    monkeypatch.undo()
    perturb(model, rng)
    come_back(engine, second.base_url)
    sync(fleet, model)
    assert behind(engine) == []
    assert all(max_error(server, model) <= MAX_ERROR for server in pair)


def test_lost_server_does_not_keep_the_others_from_new_weights(pair, client_of, rng):
    first, second = pair
    model = load_model(first.model_dir)
    fleet, engine = client_of(second, first)
    second.kill()
    perturb(model, rng)
    sync(fleet, model)
    assert max_error(first, model) <= MAX_ERROR
    assert behind(engine) == [second.base_url]
    assert engine.states() == {second.base_url: State.DOWN, first.base_url: State.UP}
