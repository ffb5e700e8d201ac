"""Which models are a plain LoRA adapter, what is written of them, and which servers have room for it."""

from __future__ import annotations

import asyncio
import json
import math
import re
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.builders import make_args
from tests.weights.probes import load_model
from trl_darts.engines import VLLMServerEngine
from trl_darts.engines.connection import num_versions, server_settings
from trl_darts.engines.preflight import AdapterNeeds, AdapterRoom, adapter_room
from trl_darts.engines.vllm_api import ServerRefusedError
from trl_darts.errors import WeightSyncError
from trl_darts.weights import calls
from trl_darts.weights.adapter import Adapter, is_quantized, why_no_adapter
from trl_darts.weights.files import WeightDirectory


pytestmark = pytest.mark.vllm  # TRL's client wants vLLM importable
CPU = torch.device("cpu")


def lora(model_dir, **fields):
    return get_peft_model(
        load_model(model_dir), LoraConfig(**{"r": 4, "target_modules": ["q_proj", "up_proj"], **fields})
    )


def gather(params):

    return nullcontext()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"q_proj": 8}, "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian", "layers_to_transform": [0], "layers_pattern": "layers"},
    ],
)
def test_plain(tiny_model_dir, fields):
    assert why_no_adapter(lora(tiny_model_dir, **fields)) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, r"`use_dora` \(True\)"),
        ({"modules_to_save": ["lm_head"]}, r"`modules_to_save` \(.*'lm_head'"),
        ({"bias": "all"}, r"`.*bias` is trained too"),
        ({"bias": "lora_only"}, r"`.*bias` is trained too"),
        ({"lora_bias": True}, "`lora_bias`"),
        ({"trainable_token_indices": [3]}, "`trainable_token_indices`"),
        ({"init_lora_weights": "pissa"}, r"`init_lora_weights` \('pissa'\) changes the base model"),
        ({"init_lora_weights": "olora"}, "changes the base model"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A.* is trained too"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapters of the head"),
    ],
)
def test_not_plain(tiny_model_dir, fields, message):
    """Each would be left out, or misread, without an error."""

    assert re.search(message, why_no_adapter(lora(tiny_model_dir, **fields)) or "")


def test_not_plain_by_the_model(tiny_model_dir):
    assert why_no_adapter(load_model(tiny_model_dir)) == "the model has no LoRA adapter"
    model = lora(tiny_model_dir)
    assert "FSDP of version 1" in why_no_adapter(model, fsdp_version=1)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    assert "norm.weight` is trained too" in why_no_adapter(model)


def test_a_reference_adapter_is_not_sent(tiny_model_dir):
    """TRL keeps one beside the trained one, if the model came with an adapter and `beta` is not zero."""
    model = lora(tiny_model_dir)
    names = Adapter(model).tensors(gather, CPU).keys()
    model.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    model.set_adapter("default")
    assert why_no_adapter(model) is None
    assert Adapter(model).tensors(gather, CPU).keys() == names


def test_what_is_written(tiny_model_dir):
    """The file has each layer's scale in its second matrix, and the shapes of the trial."""
    model = lora(
        tiny_model_dir, lora_alpha=32, use_rslora=True, rank_pattern={"q_proj": 8}, alpha_pattern={"up_proj": 2}
    )
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    adapter, directory = Adapter(model), WeightDirectory()
    path = directory.write_adapter(3, adapter.tensors(gather, CPU), adapter.config)
    written = load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 8, ["q_proj", "up_proj"])
    assert {name: value.shape for name, value in written.items()} == {
        name: value.shape for name, value in adapter.zeros().items()
    }
    scales = {"q_proj": 32 / math.sqrt(8), "up_proj": 2 / math.sqrt(4)}
    for name, param in model.named_parameters():
        if "lora_" in name:
            scale = scales[name.split(".")[-4]] if "lora_B" in name else 1.0
            torch.testing.assert_close(written[name.replace(".default", "")], param.detach() * scale)
    directory.close()


def test_dtype_of_the_servers(tiny_model_dir):
    """Matrices are sent in it if it is smaller, after they were scaled."""
    model = lora(tiny_model_dir)
    for dtype, sent in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (None, torch.float32)):
        tensors = Adapter(model, dtype).tensors(gather, CPU)
        assert {tensor.dtype for tensor in tensors.values()} == {sent}
    model = model.to(torch.bfloat16)
    assert {t.dtype for t in Adapter(model, torch.float32).tensors(gather, CPU).values()} == {torch.bfloat16}


def test_sharded_by_fsdp2(tiny_model_dir):
    """Matrices are gathered. Two processes were tested by hand, as ZeRO-3's were."""
    model = lora(tiny_model_dir, use_rslora=True)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    expected = Adapter(model).tensors(gather, CPU)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        assert any(isinstance(param, DTensor) for param in model.parameters())
        assert why_no_adapter(model, fsdp_version=2) is None
        found = Adapter(model).tensors(gather, CPU)
    finally:
        torch.distributed.destroy_process_group()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in expected.items()}


def test_names_on_every_process():
    """A process that only decodes later turns is told the version by the main one."""
    engine = VLLMServerEngine(["http://a:1"])
    engine.use_adapters("run")
    member = engine.members["http://a:1"]
    assert member.model_name(member.decodes_version) is None  # before the first sync, the server's own weights
    engine.follow(3, {"http://a:1": True})
    assert member.model_name(member.decodes_version) == "run-v3"
    engine.follow(3, {"http://a:1": True, "http://b:1": True})  # a server that joins
    assert engine.members["http://b:1"].model_name(3) == "run-v3"
    engine.close()


def test_quantized_weights_are_no_floats():
    layer = torch.nn.Linear(2, 2)
    assert not is_quantized(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    assert is_quantized(layer)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (AdapterNeeds(8, 3), None),
        (AdapterNeeds(1, 1), None),
        (AdapterNeeds(9, 1), "rank 9, and `--max-lora-rank` is 8. .*`trl-darts serve --lora-rank 9`"),
        (AdapterNeeds(8, 4), "up to 4 versions .* `--max-loras` is 3. .*`--max-loras 4`, or lower `max_staleness`"),
    ],
)
def test_room(needs, message):

    problem = AdapterRoom(8, 3).problem(needs)
    assert problem is None if message is None else re.search(message, problem)


def test_room_of_several_servers():
    missing = AdapterRoom(missing="one has none")
    assert AdapterRoom.common([AdapterRoom(8, 5), AdapterRoom(16, 2)]) == AdapterRoom(8, 2)
    assert AdapterRoom.common([AdapterRoom(8, 5), missing]) == missing


class Shown:
    """What a server shows."""

    base_url = "http://a:1"

    def __init__(self, paths=("/v1/load_lora_adapter",), version="default"):
        self.paths, self.version = paths, version

    async def get(self, path):
        return None if self.paths is None else {"paths": dict.fromkeys(self.paths)}

    async def weight_version(self):
        return self.version


def test_server_without_our_plugin():
    class Plain:
        base_url = "http://a:1"

        async def adapters_in_use(self):
            raise ServerRefusedError("no such method", 500)

    with pytest.raises(WeightSyncError, match="pip install -U trl-darts"):
        asyncio.run(calls.check_plugin(Plain()))


LORA = {"max_lora_rank": 8, "max_loras": 5}


@pytest.mark.parametrize(
    ("server", "config", "missing"),
    [
        (Shown(), {"lora_config": LORA}, ""),
        (Shown(paths=None, version=None), {"lora_config": LORA}, ""),  # without documentation, or an older vLLM
        (Shown(), {}, "`--enable-lora`. .*`trl-darts serve --lora-rank"),
        (Shown(paths=["/v1/models"]), {"lora_config": LORA}, "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`"),
        (Shown(version="v7"), {"lora_config": LORA}, "replaced by the weights 'v7' of a run. Restart it"),
        (Shown(), {"lora_config": LORA, "parallel_config": {"data_parallel_size": 2}}, "Start one server per copy"),
    ],
)
def test_room_of_a_server(server, config, missing):

    found = asyncio.run(adapter_room(server, config))
    if missing:
        assert re.search(missing, found.missing)
        assert "http://a:1" in found.missing
    else:
        assert found == AdapterRoom(8, 5)


@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({}, 1),
        ({"rollout_ahead": 1}, 1),
        ({"rollout_ahead": "continuous"}, 5),
        ({"rollout_ahead": "continuous", "max_staleness": 2}, 3),
        ({"rollout_ahead": "continuous", "num_iterations": 2}, 5),
        ({"rollout_ahead": "continuous", "num_iterations": 2, "max_staleness": 5}, 3),
    ],
)
def test_versions_in_use_at_once(tmp_path, fields, versions):
    assert num_versions(make_args(tmp_path, use_vllm=True, vllm_mode="server", **fields)) == versions


@pytest.mark.parametrize(
    ("weight_sync", "sends", "required"),
    [("auto", True, False), ("adapter", True, True), ("filesystem", False, False)],
)
def test_settings(tmp_path, tiny_model_dir, weight_sync, sends, required):
    args = make_args(tmp_path, use_vllm=True, vllm_mode="server", weight_sync=weight_sync)
    settings = server_settings(args, str(tiny_model_dir))
    assert (settings.adapters is not None) == sends
    assert (settings.requirements.adapters is not None) == required
    assert (settings.directory is not None) == (not required)
    assert settings.requirements.weight_transfer is None
