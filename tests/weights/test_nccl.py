"""
Weights over NCCL without NCCL: TRL's packed producer is replaced by its own packing, which needs no GPU.

The point is *when* tensors are read: TRL's iterator unmerges LoRA adapters in place after its last item.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from tests.weights.probes import load_model
from tests.weights.stubs import stub_client
from trl_darts.errors import ConfigurationError, WeightSyncError
from trl_darts.weights.fleet import GROUP_PORT, FleetVLLMClient, free_port


peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
pytestmark = pytest.mark.vllm


@pytest.fixture
def generation(tiny_model_dir):
    """TRL's `VLLMGeneration` with a LoRA model whose adapter does something."""
    model = peft.get_peft_model(load_model(tiny_model_dir), peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.fill_(0.1)
    generation = object.__new__(VLLMGeneration)
    generation.model = model
    generation._dist = SimpleNamespace(gather_params=lambda params: nullcontext(), is_fsdp=False)
    return generation


@pytest.fixture
def sent(monkeypatch):
    """What the producer broadcasts: `{group: bytes}`."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    sent: dict[object, list[torch.Tensor]] = {}

    def produce(iterator, group, src, post_iter_func):
        while (chunk := pack_tensors(iterator, post_iter_func, buffer_size_bytes=1 << 30)) is not None:
            sent.setdefault(group, []).append(chunk.packed_tensor)

    monkeypatch.setattr("trl.generation.vllm_client.packed_nccl_broadcast_producer", produce)
    return sent


def metadata_of(generation):
    return [
        (name, str(param.dtype).removeprefix("torch."), list(param.shape))
        for name, param in generation._iter_named_params()
    ]


def sync_weights(generation, client):
    client.update_named_params(metadata_of(generation), generation._iter_named_params())


def merged_bytes(generation):
    return torch.cat([param.clone().reshape(-1).view(torch.uint8) for _, param in generation._iter_named_params()])


def fleet_of(*clients):
    for index, client in enumerate(clients):
        client.communicator = f"group{index}"
    return FleetVLLMClient(clients, chunk_bytes=30_000)


def is_merged(generation):
    return any(getattr(module, "merged", False) for module in generation.model.modules())


def test_each_server_gets_all_of_the_merged_weights(generation, sent):
    clients = [stub_client(0), stub_client(1)]
    sync_weights(generation, fleet_of(*clients))
    for index, client in enumerate(clients):
        assert len(sent[f"group{index}"]) > 3
        assert torch.equal(torch.cat(sent[f"group{index}"]), merged_bytes(generation))
        assert (client.version, client.session.weight_version) == (1, "v1")
        assert not client._updating_weights
        assert list(dict.fromkeys(client.session.paths)) == [
            "/pause",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
        ]
    assert not is_merged(generation)


def test_trl_sends_the_last_buffer_unmerged(generation, sent):
    """Why `whole` holds the iterator back. If this fails, TRL or vLLM was repaired."""
    client = stub_client()
    client.communicator = "group"
    sync_weights(generation, client)
    assert not torch.equal(torch.cat(sent["group"]), merged_bytes(generation)), (
        "`VLLMClient.update_named_params` of TRL sends merged LoRA weights now: the remark on NCCL in `whole` of "
        "trl_darts/weights/update.py can go. `whole` itself is still needed for sharded models."
    )


def test_failure_leaves_the_adapter_unmerged_and_the_server_running(generation, sent):
    """The model would train on merged weights otherwise. The other server has the new ones."""
    clients = [stub_client(0), stub_client(1)]
    clients[0].session.answers["/update_weights"] = (500, {"error": {"message": "no memory left"}})
    fleet = fleet_of(*clients)
    with pytest.raises(WeightSyncError, match=r"stub0: .*no memory left"):
        sync_weights(generation, fleet)
    assert not is_merged(generation)
    assert torch.equal(torch.cat(sent["group1"]), merged_bytes(generation))
    assert fleet.behind == ["http://stub0"]
    assert clients[0].session.paths[-1] == "/resume"
    assert clients[0].session.weight_version == "v1-incomplete"
    assert not clients[0]._updating_weights


def test_a_server_that_is_back_gets_the_weights_in_a_group_of_its_own(generation, sent, monkeypatch):
    joined = []
    monkeypatch.setattr(VLLMClient, "close_communicator", lambda client: None)
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device: joined.append(client.base_url))
    fleet = fleet_of(stub_client(0), stub_client(1))
    fleet.excluded = {"http://stub1"}
    sync_weights(generation, fleet)
    assert not fleet.refresh("http://stub1", [], None)  # a sharded model, whose processes wait for a rollout
    metadata = metadata_of(generation)
    assert fleet.refresh("http://stub1", metadata, generation._iter_named_params())
    assert joined == ["http://stub1"]
    assert torch.equal(torch.cat(sent["group1"]), merged_bytes(generation))
    assert (fleet.behind, fleet.version) == ([], 1)
    assert not is_merged(generation)


def test_two_trainings_on_one_machine_have_their_own_ports(monkeypatch):
    """Each with a group per server, all from TRL's default on. The listening half of a group is vLLM's own."""
    from vllm.distributed.utils import StatelessProcessGroup

    def open_group(client, device):
        group = StatelessProcessGroup.create("127.0.0.1", client.group_port, rank=0, world_size=1)
        client.communicator = SimpleNamespace(group=group)

    monkeypatch.setattr(VLLMClient, "init_communicator", open_group)
    clients = [stub_client(index) for index in (0, 1, 0, 1)]
    fleets = [FleetVLLMClient(clients[:2]), FleetVLLMClient(clients[2:])]
    for fleet in fleets:
        fleet.init_communicator()
    ports = [client.group_port for client in clients]
    assert len(set(ports)) == 4
    assert min(ports) >= GROUP_PORT
    assert fleets[1].rejoin("http://stub0")
    for fleet in fleets:
        fleet.close_communicator()
    with pytest.raises(ConfigurationError, match=r"`vllm_group_port` \(65536\)"):
        free_port(65536)


def test_update_that_a_lost_trainer_left_open(generation, sent):
    """It started an update, then it was killed: `/start_weight_update` says so once."""
    client = stub_client()
    request = client.session.request

    def left_open(method, url, **kwargs):
        if url.endswith("/finish_weight_update"):
            client.session.answers.pop("/start_weight_update", None)
        return request(method, url, **kwargs)

    client.session.request = left_open
    client.session.answers["/start_weight_update"] = (500, {"error": "A weight update is already active"})
    sync_weights(generation, fleet_of(client))
    assert client.version == 1
