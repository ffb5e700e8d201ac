"""`UpdateRound` by its invariants, and the words of its errors."""

from __future__ import annotations

import pytest
from trl.generation.vllm_client import VLLMClient

from tests.weights.stubs import stub_client
from trl_darts.errors import WeightSyncError
from trl_darts.weights import FilesystemVLLMClient, GlooVLLMClient, NCCLVLLMClient
from trl_darts.weights.rounds import UpdateRound, call


pytestmark = pytest.mark.vllm  # TRL's client wants vLLM importable


@pytest.fixture
def clients():
    return [stub_client(VLLMClient, f"http://stub{index}") for index in range(3)]


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_server_that_fails_leaves_the_round_and_the_others_go_on(clients, concurrent):
    seen = []

    def act(client):
        seen.append(client)
        if client is clients[1]:
            raise WeightSyncError("its own words")

    with pytest.raises(WeightSyncError, match=r"(?s)- http://stub1: its own words") as caught:  # noqa: PT012, SIM117
        with UpdateRound(clients, version=3, concurrent=concurrent) as update:
            update.each(act)
            update.each(act)
    assert "stub0" not in str(caught.value)
    assert [seen.count(client) for client in clients] == [2, 1, 2]
    assert [client.session.weight_version for client in clients] == ["v3", "v3-incomplete", "v3"]


@pytest.mark.parametrize("error", [KeyError("caller"), KeyboardInterrupt()])
def test_every_server_is_resumed_whatever_happens(clients, error):
    with pytest.raises(type(error)), UpdateRound(clients, version=1):
        raise error
    assert [client.session.paths[0] for client in clients] == ["/pause"] * 3
    assert [client.session.paths[-1] for client in clients] == ["/resume"] * 3


def test_prefix_cache_must_be_empty(clients):
    clients[0].session.answers["/reset_prefix_cache"] = (200, {"success": False})
    with pytest.raises(WeightSyncError, match=r"stub0.*prefix cache"), UpdateRound(clients, version=1):
        pass
    assert clients[0].session.paths[-1] == "/resume"


def test_version_must_arrive(clients):
    clients[2].session.answers["/weight_info"] = (200, {"weight_version": "v7"})
    with (
        pytest.raises(WeightSyncError, match=r"stub2 .*'v7' after an update to 'v1'"),
        UpdateRound(clients, version=1),
    ):
        pass


def test_servers_without_versions(clients):
    clients[0].session.answers["/update_weight_version"] = (404, "")
    with UpdateRound(clients, version=1):
        pass
    assert clients[0].session.paths[-1] == "/resume"


@pytest.mark.parametrize(
    "answer",
    ["plain words", {"error": {"message": "plain words"}}, {"error": "plain words"}, {"detail": "plain words"}],
)
def test_errors_have_the_servers_own_words(clients, answer):
    clients[0].session.answers["/pause"] = (500, answer)
    with pytest.raises(
        WeightSyncError, match=r"`/pause` of the vLLM server at http://stub0 failed \(500\): plain words$"
    ):
        call(clients[0], "/pause")


@pytest.mark.parametrize("cls", [GlooVLLMClient, FilesystemVLLMClient, NCCLVLLMClient])
def test_server_without_development_endpoints(cls):
    client = stub_client(cls)
    client.session.answers["/server_info"] = (404, {"detail": "Not Found"})
    with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):
        client.init_communicator("cpu")


def test_missing_endpoints_name_the_remedy(clients):
    clients[0].session.answers["/pause"] = (404, {"detail": "Not Found"})
    with pytest.raises(WeightSyncError, match="VLLM_SERVER_DEV_MODE=1"):
        call(clients[0], "/pause")
