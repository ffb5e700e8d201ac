"""A colocated engine's layers after a failed sync."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


pytestmark = pytest.mark.vllm


@pytest.fixture
def llm():
    """The parts of a colocated engine that a reload uses, with a model of two layers."""
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    record_metadata_for_reloading(model)
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.float32)
    runner = SimpleNamespace(model=model, vllm_config=config, model_config=config.model_config)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor), model=model)


def load(param, value):
    param.weight_loader(param, torch.full(param.shape, value))


def test_layers_that_were_not_loaded_keep_their_weights(llm):
    """Otherwise, they have no memory after an error, and the next rollout ends the process."""
    from trl_darts.weights.reload import reloaded_layers

    last = {name: param.clone() for name, param in llm.model[1].named_parameters()}
    with pytest.raises(KeyError), reloaded_layers(llm):  # noqa: PT012
        for param in list(llm.model[0].parameters()):
            load(param, 1.0)
        load(llm.model[1].weight, 1.0)  # without its bias
        raise KeyError("the trainer's own error")
    for param in llm.model[0].parameters():
        assert (param == 1.0).all()
    for name, param in llm.model[1].named_parameters():
        assert torch.equal(param, last[name]), name
    with reloaded_layers(llm):  # and the next sync is complete
        for param in list(llm.model.parameters()):
            load(param, 2.0)
    assert all((param == 2.0).all() for param in llm.model.parameters())


class Method:
    """vLLM's `UnquantizedFusedMoEMethod`: experts are packed by the kernel, on the first load only."""

    def __init__(self):
        self.moe_kernel = None

    def _setup_kernel(self, layer, w13, w2):
        layer.w13_weight = w13
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=pack))
            pack(layer)


def pack(layer):
    layer.w13_weight = -layer.w13_weight


@pytest.mark.parametrize(("device", "reloaded"), [("cpu", -2.0), ("meta", 2.0)])
def test_experts_are_packed_on_each_load(device, reloaded):
    """Other devices' kernels need no packing. Without vLLM's classes, and once."""
    from trl_darts.weights.experts import pack_reloaded_experts

    module = SimpleNamespace(UnquantizedFusedMoEMethod=type("Own", (Method,), {}))
    pack_reloaded_experts(module)
    pack_reloaded_experts(module)
    method, layer = module.UnquantizedFusedMoEMethod(), SimpleNamespace()
    for load, expected in ((1.0, -1.0), (2.0, reloaded), (2.0, reloaded)):
        method._setup_kernel(layer, w13=Weight(load, device), w2=None)
        assert layer.w13_weight.value == expected


class Weight:
    def __init__(self, value, device):
        self.value, self.device = value, torch.device(device)

    def __neg__(self):
        return Weight(-self.value, self.device.type)


def test_colocated_engines_pack_experts_without_plugins(llm, monkeypatch):
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from trl_darts.weights.reload import reloaded_layers

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", Method._setup_kernel)
    with reloaded_layers(llm):
        assert UnquantizedFusedMoEMethod._setup_kernel.trl_darts_packs
