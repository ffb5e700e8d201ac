"""Invariants of a weight update, the messages of its errors, and the weights of each server."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest
import torch
from PIL import Image

from tests.engines.fake_server import answer, fake_server
from tests.weights.stubs import answer_together
from trl_darts.engines import VLLMServerEngine, waiting
from trl_darts.engines.pool import State
from trl_darts.engines.vllm_generation import SyncedGeneration
from trl_darts.errors import ConfigurationError, GenerationError, WeightSyncError
from trl_darts.weights import calls
from trl_darts.weights.files import WeightDirectory
from trl_darts.weights.fleet import resolve_weight_sync
from trl_darts.weights.update import refresh


pytestmark = pytest.mark.vllm  # TRL's client wants vLLM importable
METADATA = [("a", "float32", [2]), ("b", "bfloat16", [3])]


def params():
    yield "a", torch.zeros(2)
    yield "b", torch.zeros(3, dtype=torch.bfloat16)


def urls_of(servers):
    return [server.url for server in servers]


@pytest.fixture
def fleet(servers, fleet_of, tmp_path):
    fleet, _ = fleet_of(urls_of(servers), WeightDirectory(tmp_path))
    fleet.init_communicator()
    return fleet


@pytest.fixture
def engine(fleet):
    return fleet._engine


def versions(engine):
    return [member.version for member in engine.members.values()]


def states(engine):
    return list(engine.states().values())


def test_a_server_that_fails_leaves_the_update_and_the_others_go_on(fleet, engine, servers, caplog):
    servers[1].answers["/collective_rpc"] = (500, {"error": {"message": "its own message"}})
    fleet.update_named_params(METADATA, params())
    assert versions(engine) == [1, 0, 1]
    assert states(engine) == [State.UP, State.DOWN, State.UP]
    assert [server.weight_version for server in servers] == ["v1", "v1-incomplete", "v1"]
    (message,) = caplog.messages
    assert message.startswith(f"The vLLM server at {servers[1].url} is lost: ")
    assert "answered 500: its own message" in message
    for server in servers:
        ends = ["/resume"] if server is servers[1] else ["/resume", "/update_weight_version"]
        assert (server.paths[0], server.paths[-len(ends) :]) == ("/pause", ends)


def test_a_server_that_is_lost_while_it_loads_is_not_waited_for(fleet, engine, servers):
    """Its health check fails. The timeout for loading files is half an hour."""

    async def freeze():
        threading.Thread(target=engine.lose, args=(servers[1].url, "no answer to `/health`")).start()
        await asyncio.sleep(60)

    servers[1].acts["/collective_rpc"] = freeze
    fleet.update_named_params(METADATA, params())
    assert versions(engine) == [1, 0, 1]
    assert states(engine) == [State.UP, State.DOWN, State.UP]


@pytest.mark.parametrize("error", [KeyError("caller"), KeyboardInterrupt()])
def test_every_server_is_resumed_whatever_happens(fleet, engine, servers, error, tmp_path):
    async def update():
        async with fleet._update(lambda member: True):
            pass

    with pytest.raises(type(error)), fleet._entered(fleet._update(lambda member: True)):
        raise error
    for server in servers:
        assert (server.paths[0], server.paths[-1]) == ("/pause", "/resume")
    assert versions(engine) == [0] * 3
    assert states(engine) == [State.DOWN] * 3  # they may have some of the weights
    assert "interrupted" in engine.members[servers[0].url].reason
    engine.call(update())  # the loop goes on


class Listener:
    """A rollout without an end, with a request on each server."""

    def __init__(self, keeps_kv):
        self.keeps_kv, self.updates = keeps_kv, []

    def num_held(self, url):
        return 1

    def on_updated(self, url, num_outputs):
        self.updates.append((url, num_outputs))

    def on_lost(self, *args): ...

    on_joined = on_resized = on_lost


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_requests_are_counted_before_they_continue(fleet, engine, servers, keeps_kv):
    """A server that can't count is lost, since nothing would tell which weights sampled what."""
    listener = Listener(keeps_kv)
    engine.call(engine.pool()).listeners.append(listener)
    counts = {"results": [{"cmpl-a-0-1234abcd": 7}]}
    for server in servers[:2]:
        server.answers["/collective_rpc"] = (200, counts)
    servers[2].answers["/collective_rpc"] = (500, "?")
    fleet.update_named_params(METADATA, params())
    assert sorted(listener.updates) == sorted((server.url, {"cmpl-a-0": 7}) for server in servers[:2])
    assert states(engine) == [State.UP, State.UP, State.DOWN]
    paths = servers[0].paths
    assert paths[-3:] == ["/collective_rpc", "/resume", "/update_weight_version"]
    assert ("/reset_prefix_cache" in paths) != keeps_kv


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/reset_prefix_cache", (200, {"success": False}), "could not empty its prefix cache"),
        ("/weight_info", (200, {"weight_version": "v7"}), "shows the weight version 'v7' after an update to 'v1'"),
        ("/resume", (500, "stuck"), "`/resume` of a vLLM server failed: {url} answered 500: stuck"),
        ("/pause", (404, {"detail": "Not Found"}), "has no `/pause`. Restart it with `VLLM_SERVER_DEV_MODE=1`"),
    ],
)
def test_a_server_has_the_weights_only_if_it_did_everything(fleet, engine, servers, path, answer, message):
    servers[2].answers[path] = answer
    fleet.update_named_params(METADATA, params())
    assert versions(engine) == [1, 1, 0]
    assert message.format(url=servers[2].url) in engine.members[servers[2].url].reason
    assert servers[2].paths[-1] == "/resume"
    assert servers[2].weight_version == "v1-incomplete"


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/reset_prefix_cache"])
def test_no_server_stays_paused_after_ctrl_c(fleet, engine, servers, path):
    """Also before and after the weights are sent, when the trainer ends."""

    async def update():
        async with fleet._update(lambda member: True) as update:
            await update.each(lambda member: calls.load(member.server, "x"))

    future = None

    async def interrupt():
        while future is None:
            await asyncio.sleep(0.001)
        future.cancel()
        await asyncio.sleep(0.05)

    servers[0].acts[path] = interrupt
    future = engine.submit(update())
    while not future.done():
        time.sleep(0.01)
    assert future.cancelled()
    engine.close()
    assert path in servers[0].paths
    for server in servers:
        assert server.paths[-1] == "/resume"


def test_servers_without_versions(fleet, engine, servers):
    servers[0].answers["/update_weight_version"] = (404, "")
    fleet.update_named_params(METADATA, params())
    assert versions(engine) == [1, 1, 1]


@pytest.mark.parametrize(
    "answer", ["plain text", {"error": {"message": "plain text"}}, {"error": "plain text"}, {"detail": "plain text"}]
)
def test_errors_have_the_servers_own_message(engine, servers, answer):
    servers[0].answers["/pause"] = (500, answer)
    server = engine.members[servers[0].url].server
    with pytest.raises(WeightSyncError, match=rf"`/pause` of .*{server.base_url} answered 500: plain text$"):
        engine.call(calls.pause(server))


def test_a_server_that_is_gone_and_one_that_is_late(engine, servers, monkeypatch):
    async def late():
        await asyncio.sleep(0.5)

    monkeypatch.setattr(calls, "PAUSE_TIMEOUT_S", 0.1)
    servers[0].acts["/pause"] = late
    server = engine.members[servers[0].url].server
    with pytest.raises(WeightSyncError, match=rf"{server.base_url} did not answer `/pause` within 0.1 s\.$"):
        engine.call(calls.pause(server))
    server.base_url = "http://127.0.0.1:9"
    with pytest.raises(WeightSyncError, match="did not answer `/pause`: the connection failed"):
        engine.call(calls.pause(server))


def test_a_cpu_server_without_our_plugin_is_lost(fleet, engine, servers):
    """It would silently keep a stale LM head. Its answer is not that of our `reload_weights`."""
    servers[1].answers["/collective_rpc"] = (200, {"results": [None]})
    fleet.update_named_params(METADATA, params())
    assert "pip install trl-darts" in engine.members[servers[1].url].reason
    assert {path.name for path in fleet._directory.roots[0].iterdir()} == {"v1", "lock"}


def test_servers_on_another_machine_need_a_directory_that_they_see(fleet_of, tmp_path):
    with pytest.raises(ConfigurationError, match="`weight_sync_dir` to a directory that both can access"):
        fleet_of(["http://192.0.2.1:8000"], WeightDirectory())[0].init_communicator()
    fleet_of(["http://192.0.2.1:8000"], WeightDirectory(tmp_path))[0].init_communicator()


def refreshed(fleet, engine, server):
    return engine.call(refresh(engine.call(engine.pool()), engine.members[server.url], fleet._directory))


def test_a_server_that_still_has_the_weights_is_not_given_them_again(fleet, engine, servers):
    assert refreshed(fleet, engine, servers[0])  # before the first sync
    assert not servers[0].posts
    fleet.update_named_params(METADATA, params())
    servers[0].posts.clear()
    assert refreshed(fleet, engine, servers[0])
    assert servers[0].paths == ["/resume"]
    servers[0].weight_version = "default"  # it was restarted
    assert refreshed(fleet, engine, servers[0])
    assert "/collective_rpc" in servers[0].paths
    assert servers[0].weight_version == "v1"
    servers[0].weight_version = "default"
    servers[0].answers["/collective_rpc"] = (500, "no memory left")
    with pytest.raises(WeightSyncError, match="no memory left"):
        refreshed(fleet, engine, servers[0])


def test_a_server_that_is_back_takes_part_in_the_next_sync(fleet, engine, servers):
    engine.lose(servers[0].url, "killed")
    fleet.update_named_params(METADATA, params())
    assert not servers[0].posts
    assert (versions(engine), states(engine)[0]) == ([0, 1, 1], State.DOWN)
    engine.members[servers[0].url].state = State.RETURNED
    fleet.update_named_params(METADATA, params())
    assert (versions(engine), states(engine)[0]) == ([2, 2, 2], State.UP)


def test_the_version_of_an_earlier_run_proves_nothing(fleet, engine, servers):
    engine.lose(servers[0].url, "killed")
    servers[0].weight_version = "v1"
    fleet.update_named_params(METADATA, params())
    assert refreshed(fleet, engine, servers[0])
    assert "/collective_rpc" in servers[0].paths


def test_weights_that_could_not_be_written(fleet, engine, servers):
    """The run ends, because the servers would never get these weights."""

    def broken():
        yield "a", torch.zeros(2)
        raise OSError("No space left on device")

    with pytest.raises(WeightSyncError, match="No space left"):
        fleet.update_named_params(METADATA, broken())
    assert not servers[0].posts
    assert not refreshed(fleet, engine, servers[0])


def test_a_server_that_takes_long_is_said(engine, servers, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.1)
    monkeypatch.setattr(waiting, "POLL_S", 0.01)

    async def slow():
        await asyncio.sleep(0.15)

    servers[0].acts["/pause"] = slow
    engine.call(calls.pause(engine.members[servers[0].url].server))
    assert caplog.messages == [f"Waiting for {servers[0].url} to answer `/pause` (0 of 15 s)"]


def test_every_tensor_is_asked_for(fleet):
    """Other processes gather with this one and wait for each tensor. A tensor without metadata is an error."""
    rest = iter([*params(), ("c", torch.zeros(1))])
    with pytest.raises(WeightSyncError, match="1 tensors without metadata were not sent: c"):
        fleet.update_named_params(METADATA, rest)
    assert next(rest, None) is None
    rest = iter([("a", "not a tensor"), *params()])
    with pytest.raises(AttributeError):
        fleet.update_named_params(METADATA, rest)
    assert next(rest, None) is None


def test_one_sync_of_files_is_six_round_trips_and_one_copy(servers, fleet_of, tmp_path):
    """The number of servers does not matter. Matrices have the servers' dtype."""
    fleet, _ = fleet_of(urls_of(servers), WeightDirectory(tmp_path), dtype=torch.bfloat16)
    metadata = [("matrix", "float32", [4, 8]), ("vector", "float32", [8])]
    answer_together(servers)
    fleet.update_named_params(metadata, iter([("matrix", torch.rand(4, 8)), ("vector", torch.rand(8))]))
    assert fleet.num_bytes == 2 * 32 + 4 * 8
    fleet.reset_prefix_cache()
    assert [server.num_answers for server in servers] == [6, 6, 6]
    fleet, _ = fleet_of(urls_of(servers), WeightDirectory(tmp_path))  # of different dtypes
    fleet.update_named_params(metadata, iter([("matrix", torch.rand(4, 8)), ("vector", torch.rand(8))]))
    assert fleet.num_bytes == 4 * 40


def test_tail_servers_sleep_before_and_after(servers, fleet_of, tmp_path):
    fleet, engine = fleet_of(urls_of(servers), WeightDirectory(tmp_path), takes_turns=True)
    fleet.update_named_params(METADATA, params())
    assert (servers[2].paths[0], servers[2].paths[1], servers[2].paths[-1]) == (
        "/wake_up?tags=weights",
        "/pause",
        "/sleep",
    )
    assert "/sleep" not in servers[0].paths
    assert engine.members[servers[2].url].asleep is True
    servers[2].answers["/wake_up"] = (500, "no memory left")
    fleet.update_named_params(METADATA, params())
    assert versions(engine) == [2, 2, 1]
    assert "no memory left" in engine.members[servers[2].url].reason


def test_images_are_processed_by_the_first_server_that_is_up():
    """Each process uses clients of its own, and another server if the first one is lost."""

    async def reply(body, request):
        return await answer(body)

    def processor(name):
        answers = {"GET /health": {}, "GET /v1/models": {"data": [{"id": "m"}]}}
        answers["POST /v1/chat/completions/render"] = {"features": {"by": name}}
        return fake_server({route: partial(reply, body) for route, body in answers.items()})

    generation = object.__new__(SyncedGeneration)
    generation._place_features = lambda features, prompt: features
    prompts = [[1], [2]]
    images = [[Image.new("RGB", (2, 2))], None]
    with processor("second") as second:
        with processor("first") as first:
            generation.engine = VLLMServerEngine([first, second])
            assert generation.image_features(images, prompts) == [{"by": "first"}, None]
            generation.engine.lose(first, "for the test")
            assert generation.image_features(images, prompts) == [{"by": "second"}, None]
            generation.engine.close()
            generation.engine = VLLMServerEngine([first, second])
        # It has stopped, which this process does not know yet.
        assert generation.image_features(images, prompts) == [{"by": "second"}, None]
    with pytest.raises(GenerationError, match=f"{first}: nothing listens there; {second}: nothing"):
        generation.image_features(images, prompts)
    generation.engine.close()


def test_generation_keeps_the_order(fleet, servers, monkeypatch):
    def generate(client, prompts, features, n):
        return {
            "completion_ids": [[*prompt, client.base_url] for prompt in prompts for _ in range(n)],
            "logprobs": None,
        }

    for server in servers:
        server.answers["/v1/models"] = (200, {"data": [{"id": "m"}]})
    monkeypatch.setattr("trl_darts.weights.client.VLLMClient.generate", generate)
    output = fleet.generate([[index] for index in range(5)], n=2)
    expected = [[index, servers[index // 2].url] for index in range(5) for _ in range(2)]
    assert output == {"completion_ids": expected, "logprobs": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("nccl", "cpu"), "needs a CUDA device.*'filesystem'"), (("nccl", "cuda", "/tmp"), "`weight_sync_dir`")],
)
def test_settings_that_can_not_work(arguments, message):
    weight_sync, device, *rest = arguments
    with pytest.raises(ConfigurationError, match=message):
        resolve_weight_sync(weight_sync, torch.device(device), *rest)
