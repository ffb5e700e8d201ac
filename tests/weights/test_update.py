"""`WeightUpdate` by its invariants, the messages of its errors, and which server has which weights."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest
import requests
import torch
from PIL import Image

from tests.engines.fake_server import answer, fake_server
from tests.weights.stubs import stub_client
from trl_darts import waiting
from trl_darts.engines.pool import State
from trl_darts.engines.vllm_generation import SyncedGeneration
from trl_darts.errors import ConfigurationError, GenerationError, WeightSyncError
from trl_darts.weights.files import WeightDirectory
from trl_darts.weights.fleet import FleetVLLMClient, make_client
from trl_darts.weights.update import WeightUpdate


pytestmark = pytest.mark.vllm  # TRL's client wants vLLM importable
METADATA = [("a", "float32", [2]), ("b", "bfloat16", [3])]


def params():
    yield "a", torch.zeros(2)
    yield "b", torch.zeros(3, dtype=torch.bfloat16)


@pytest.fixture
def clients():
    return [stub_client(index) for index in range(3)]


@pytest.fixture
def fleet(clients, tmp_path):
    fleet = FleetVLLMClient(clients, WeightDirectory(tmp_path))
    fleet.init_communicator()
    return fleet


@pytest.mark.parametrize("way", ["each", "in_turn"])
def test_a_server_that_fails_leaves_the_update_and_the_others_go_on(clients, way):
    seen = []

    def act(client):
        seen.append(client)
        if client is clients[1]:
            raise WeightSyncError("its own message")

    with pytest.raises(WeightSyncError, match=r"(?s)- http://stub1: its own message") as caught:  # noqa: PT012, SIM117
        with WeightUpdate(clients, version=3) as update:
            getattr(update, way)(act)
            getattr(update, way)(act)
    assert "stub0" not in str(caught.value)
    assert [seen.count(client) for client in clients] == [2, 1, 2]
    assert [client.session.weight_version for client in clients] == ["v3", "v3-incomplete", "v3"]
    assert [client.version for client in clients] == [3, 0, 3]


@pytest.mark.parametrize("error", [KeyError("caller"), KeyboardInterrupt()])
def test_every_server_is_resumed_whatever_happens(clients, error):
    with pytest.raises(type(error)), WeightUpdate(clients, version=1):
        raise error
    assert [client.session.paths[0] for client in clients] == ["/pause"] * 3
    assert [client.session.paths[-1] for client in clients] == ["/resume"] * 3
    assert [client.version for client in clients] == [0] * 3


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/reset_prefix_cache", (200, {"success": False}), r"stub2.*prefix cache"),
        ("/weight_info", (200, {"weight_version": "v7"}), r"stub2 .*'v7' after an update to 'v1'"),
        ("/resume", (500, "stuck"), r"`/resume` of .*stub2 failed \(500\): stuck"),
        ("/pause", (404, {"detail": "Not Found"}), r"no `/pause`.*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_has_the_weights_only_if_it_did_everything(clients, path, answer, message):
    clients[2].session.answers[path] = answer
    with pytest.raises(WeightSyncError, match=message), WeightUpdate(clients, version=1):
        pass
    assert [client.version for client in clients] == [1, 1, 0]
    assert clients[2].session.paths[-1] == "/resume"
    assert clients[2].session.weight_version == "v1-incomplete"


@pytest.mark.parametrize("path", ["/pause", "/reset_prefix_cache", "/resume"])
def test_no_server_stays_paused_after_ctrl_c(clients, monkeypatch, path):
    """Also where it comes before the weights or after them."""
    each = WeightUpdate.each

    def interrupted(update, action):
        each(update, action)
        if path in clients[0].session.paths[-2:]:
            raise KeyboardInterrupt

    monkeypatch.setattr(WeightUpdate, "each", interrupted)
    with pytest.raises(KeyboardInterrupt), WeightUpdate(clients, version=1):
        pass
    assert path in clients[0].session.paths
    assert [client.session.paths[-1] for client in clients] == ["/resume"] * 3
    assert [client.version for client in clients] == [0] * 3


def test_servers_without_versions(clients):
    clients[0].session.answers["/update_weight_version"] = (404, "")
    with WeightUpdate(clients, version=1):
        pass
    assert clients[0].version == 1


@pytest.mark.parametrize(
    "answer", ["plain text", {"error": {"message": "plain text"}}, {"error": "plain text"}, {"detail": "plain text"}]
)
def test_errors_have_the_servers_own_message(clients, answer):
    clients[0].session.answers["/pause"] = (500, answer)
    with pytest.raises(WeightSyncError, match=r"`/pause` of .*http://stub0 failed \(500\): plain text$"):
        clients[0].pause()


def test_a_cpu_server_without_our_plugin_is_refused(fleet, clients):
    """It would keep a stale LM head without a word: its answer is not that of our `reload_weights`."""
    clients[1].session.answers["/collective_rpc"] = (200, {"results": [None]})
    with pytest.raises(WeightSyncError, match=r"stub1.*pip install trl-darts"):
        fleet.update_named_params(METADATA, params())
    assert fleet.behind == ["http://stub1"]
    assert [path.name for path in fleet.directory.roots[0].iterdir()] == ["v1"]


def test_servers_on_another_machine_need_a_directory_that_they_see(tmp_path):
    clients = [stub_client(host="192.0.2.1")]
    with pytest.raises(ConfigurationError, match="`weight_sync_dir`, a directory that both see"):
        FleetVLLMClient(clients, WeightDirectory()).init_communicator()
    FleetVLLMClient(clients, WeightDirectory(tmp_path)).init_communicator()


def test_a_server_that_still_has_the_weights_is_not_given_them_again(fleet, clients):
    assert fleet.refresh("http://stub0", METADATA, None)  # before the first sync
    assert not clients[0].session.posts
    fleet.update_named_params(METADATA, params())
    session = clients[0].session
    session.posts.clear()
    assert fleet.refresh("http://stub0", METADATA, None)
    assert session.paths == ["/resume"]
    session.weight_version = "default"  # it was restarted
    assert fleet.refresh("http://stub0", METADATA, None)
    assert "/collective_rpc" in session.paths
    assert session.weight_version == "v1"


def test_a_server_that_is_not_there_does_not_rejoin(fleet, clients):
    assert fleet.rejoin("http://stub0")
    clients[0].session.answers["/server_info"] = (404, {"detail": "Not Found"})
    assert not fleet.rejoin("http://stub0")
    with pytest.raises(WeightSyncError, match="VLLM_SERVER_DEV_MODE=1"):
        fleet.init_communicator()


def test_the_version_of_an_earlier_run_proves_nothing(fleet, clients):
    fleet.excluded = {"http://stub0"}
    clients[0].session.weight_version = "v1"
    fleet.update_named_params(METADATA, params())
    assert fleet.refresh("http://stub0", METADATA, None)
    assert "/collective_rpc" in clients[0].session.paths


def test_weights_that_could_not_be_written(fleet, clients):
    """The servers keep the last ones; one that comes back waits, because there is nothing to give."""

    def broken():
        yield "a", torch.zeros(2)
        raise OSError("No space left on device")

    with pytest.raises(WeightSyncError, match="No space left"):
        fleet.update_named_params(METADATA, broken())
    assert fleet.behind == ["http://stub0", "http://stub1", "http://stub2"]
    assert not clients[0].session.posts
    assert not fleet.refresh("http://stub0", METADATA, None)


def test_each_server_is_lost_with_its_own_words(fleet, clients):
    clients[0].session.answers["/collective_rpc"] = (500, "no memory left")
    clients[2].session.answers["/pause"] = (500, "stuck")
    lost = {}
    generation = object.__new__(SyncedGeneration)
    generation.mode, generation.main, generation.vllm_client = "server", SimpleNamespace(is_here=True), fleet
    generation.settings = SimpleNamespace(takes_turns=False)
    generation.engine = SimpleNamespace(
        states=lambda: dict.fromkeys(fleet.base_urls, State.UP), lose=lambda url, reason: lost.update({url: reason})
    )
    with generation._servers_left_out():
        fleet.update_named_params(METADATA, params())
    assert lost.keys() == {"http://stub0", "http://stub2"}
    assert "no memory left" in lost["http://stub0"]
    assert "stuck" not in lost["http://stub0"]
    assert lost["http://stub2"] == "`/pause` of the vLLM server at http://stub2 failed (500): stuck"


def test_a_server_that_takes_long_is_said(clients, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.05)
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    request = clients[0].session.request

    def slow(*args, **kwargs):
        time.sleep(0.08)
        return request(*args, **kwargs)

    clients[0].session.request = slow
    clients[0].pause()
    assert caplog.messages == ["Waiting for http://stub0 to answer `/pause` (0 of 15 s)"]


def test_every_tensor_is_asked_for(fleet):
    """The processes that gather with us wait for each; and one that was not announced is an error."""
    rest = iter([*params(), ("c", torch.zeros(1))])
    with pytest.raises(WeightSyncError, match="1 tensors were not announced, and not sent: c"):
        fleet.update_named_params(METADATA, rest)
    assert next(rest, None) is None
    rest = iter([("a", "not a tensor"), *params()])
    with pytest.raises(AttributeError):
        fleet.update_named_params(METADATA, rest)
    assert next(rest, None) is None


def test_images_are_processed_by_the_first_server_that_answers(clients, monkeypatch):
    def features(client, images):
        if client is clients[0]:
            raise requests.ConnectionError("refused")
        return [client.base_url for _ in images]

    monkeypatch.setattr("trl_darts.weights.client.VLLMClient.image_features", features)
    fleet = FleetVLLMClient(clients)
    assert fleet.image_features([None]) == ["http://stub1"]
    fleet.excluded = {"http://stub1"}
    assert fleet.image_features([None]) == ["http://stub2"]
    fleet.excluded = {"http://stub1", "http://stub2"}
    with pytest.raises(GenerationError, match="stub0: ConnectionError: refused"):
        fleet.image_features([None])


def test_another_process_asks_a_server_that_is_up_for_images():
    """It has clients of its own, and was pinned to the first server, also when that one was lost."""

    async def reply(body, request):
        return await answer(body)

    def processor(name):
        answers = {"GET /health": {}, "GET /v1/models": {"data": [{"id": "m"}]}}
        answers["POST /v1/chat/completions/render"] = {"features": {"by": name}}
        return fake_server({route: partial(reply, body) for route, body in answers.items()})

    generation = object.__new__(SyncedGeneration)
    generation.main, generation.settings = SimpleNamespace(is_here=False), SimpleNamespace(api_key=None)
    images = [[Image.new("RGB", (2, 2))], None]
    with processor("second") as second:
        with processor("first") as first:
            generation.engine = SimpleNamespace(states=lambda: {first: State.UP, second: State.UP})
            assert generation.image_features(images) == [{"by": "first"}, None]
        # It is lost, and this process, which has asked nothing of it yet, does not know.
        assert generation.image_features(images) == [{"by": "second"}, None]


def test_generation_keeps_the_order(clients, monkeypatch):
    def generate(client, prompts, features, n):
        return {
            "completion_ids": [[*prompt, client.base_url] for prompt in prompts for _ in range(n)],
            "logprobs": None,
        }

    monkeypatch.setattr("trl_darts.weights.client.VLLMClient.generate", generate)
    output = FleetVLLMClient(clients).generate([[index] for index in range(5)], n=2)
    expected = [[index, f"http://stub{index // 2}"] for index in range(5) for _ in range(2)]
    assert output == {"completion_ids": expected, "logprobs": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["http://a"], "nccl", "cpu"), "needs a CUDA device.*'filesystem'"),
        ((["http://a"], "nccl", "cuda", 1, 0.0, "/tmp"), "`weight_sync_dir`"),
        ((["http://a", "http://a"],), "different addresses"),
    ],
)
def test_settings_that_can_not_work(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make_client(*arguments)
