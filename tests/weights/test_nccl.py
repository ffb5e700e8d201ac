"""
The NCCL client without NCCL: TRL's packed producer is replaced by its own packing, which needs no GPU.

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
from trl_darts.errors import WeightSyncError
from trl_darts.weights import FleetVLLMClient, NCCLVLLMClient


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


def sync_weights(generation, client):
    metadata = [
        (name, str(param.dtype).removeprefix("torch."), list(param.shape))
        for name, param in generation._iter_named_params()
    ]
    client.update_named_params(metadata, generation._iter_named_params())


def merged_bytes(generation):
    return torch.cat([param.clone().reshape(-1).view(torch.uint8) for _, param in generation._iter_named_params()])


def base_bytes(generation):
    """The base model's weights, which are those outside of a merge."""
    names = [name for name, _ in generation._iter_named_params()]
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): p.data
        for name, p in generation.model.named_parameters()
    }
    return torch.cat([base[name].reshape(-1).view(torch.uint8) for name in names])


def test_lora_is_merged_in_all_that_is_sent(generation, sent):
    client = stub_client(NCCLVLLMClient)
    client.communicator = "group"
    sync_weights(generation, client)
    assert torch.equal(torch.cat(sent["group"]), merged_bytes(generation))
    assert not any(getattr(module, "merged", False) for module in generation.model.modules())
    assert client.version == 1
    assert client.session.paths == [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]


def test_trl_sends_the_last_buffer_unmerged(generation, sent):
    """Why `NCCLVLLMClient` holds the iterator back. If this fails, TRL or vLLM was repaired."""
    client = stub_client(VLLMClient)
    client.communicator = "group"
    sync_weights(generation, client)
    assert not torch.equal(torch.cat(sent["group"]), merged_bytes(generation)), (
        "`VLLMClient.update_named_params` of TRL sends merged LoRA weights now: the remark on NCCL in `whole` of "
        "trl_darts/weights/client.py can go. `whole` itself is still needed for sharded models."
    )
    torch.testing.assert_close(
        torch.cat(sent["group"]).view(torch.float32), base_bytes(generation).view(torch.float32), atol=1e-6, rtol=0
    )


def test_fleet_over_nccl_in_turn(generation, sent):
    clients = [stub_client(NCCLVLLMClient, f"http://stub{index}") for index in range(2)]
    for index, client in enumerate(clients):
        client.communicator = f"group{index}"
    fleet = FleetVLLMClient(clients, chunk_bytes=30_000)
    sync_weights(generation, fleet)
    for index, client in enumerate(clients):
        assert len(sent[f"group{index}"]) > 3
        assert torch.equal(torch.cat(sent[f"group{index}"]), merged_bytes(generation))
        assert (client.version, client.session.weight_version) == (1, "v1")
    assert not any(getattr(module, "merged", False) for module in generation.model.modules())


def test_failure_leaves_the_adapter_unmerged_and_the_server_running(generation, sent):
    """The model would train on merged weights otherwise."""
    client = stub_client(NCCLVLLMClient)
    client.session.answers["/start_weight_update"] = (500, {"error": {"message": "no memory left"}})
    with pytest.raises(WeightSyncError, match="no memory left"):
        sync_weights(generation, client)
    assert not any(getattr(module, "merged", False) for module in generation.model.modules())
    assert client.session.paths[-1] == "/resume"
    assert client.session.weight_version == "v1-incomplete"
    assert client.version == 0
    assert not client._updating_weights
