"""
Contracts of private behaviour of TRL and vLLM that weight sync uses. A failure names the hook and its use. Behaviour
that needs a running server is in `test_sync`.
"""

from __future__ import annotations

import inspect
import re
from typing import get_args

import pytest

from trl_darts.weights import ADAPTER_RANKS


pytestmark = pytest.mark.vllm


def source(function):
    return re.sub(r"\s+", " ", inspect.getsource(function))


def hook(name, used_by):
    return f"`{name}` is not what it was. It is used by {used_by}."


def test_trl_client():
    from trl.generation.vllm_client import VLLMClient

    name = hook("VLLMClient.__init__", "trl_darts/weights/client.py")
    text = source(VLLMClient.__init__)
    for attribute in ("session", "host", "base_url"):
        assert f"self.{attribute} =" in text, name
    assert text.index("self.session =") < text.index("self.check_server(") < text.index("self._get("), name
    # Only through its session, which is the engine's; `check_server` is replaced.
    others = source(VLLMClient).replace(source(VLLMClient.check_server), "")
    assert not re.search(r"requests\.(get|post|request|put)\(", others), name
    assert not set(re.findall(r"self\.session\.(\w+)", others)) - {"get", "mount", "post"}, name
    path = "/v1/chat/completions/render"
    assert path in source(VLLMClient.image_features), hook("VLLMClient.image_features", "trl_darts/weights/client.py")


def test_what_trl_asks_of_its_client_for_weights():
    from trl.generation.vllm_client import VLLMClient

    parameters = list(inspect.signature(VLLMClient.update_named_params).parameters)
    name = hook("VLLMClient.update_named_params", "FleetVLLMClient")
    assert parameters[1:] == ["metadata", "named_params"], name
    text = source(VLLMClient.update_named_params)
    assert '{"names": names, "dtype_names": dtype_names, "shapes": shapes}' in text, name
    assert 'if not _HAS_STATEFUL_TRAINER_ENGINE: update_info["packed"] = True' in text, name
    text = source(VLLMClient.init_communicator)
    name = hook("VLLMClient.init_communicator", "trl_darts/weights/nccl.py")
    for field in ('"master_address": get_ip()', '"rank_offset": 1', 'init_info["packed"] = True'):
        assert field in text, name


def test_what_vllm_takes_to_reset_its_caches():
    from vllm.entrypoints.serve.dev.cache import api_router
    from vllm.v1.core.sched.scheduler import Scheduler

    name = hook("/reset_prefix_cache", "trl_darts/weights/calls.py")
    parameters = inspect.signature(api_router.reset_prefix_cache).parameters
    assert {"reset_running_requests", "reset_external"} <= set(parameters), name
    assert "if self.connector is None:" in source(Scheduler.reset_connector_cache), name  # success without one


def test_vllm_group():
    """We build the group ourselves, so that it can be aborted, and listen for it ourselves."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    name = hook("StatelessProcessGroup.create", "trl_darts/weights/nccl.py")
    parameters = inspect.signature(StatelessProcessGroup.create).parameters
    assert {"host", "port", "rank", "world_size", "store_timeout", "listen_socket"} <= set(parameters), name
    text = source(nccl_common.stateless_init_process_group)
    assert "PyNcclCommunicator(pg, device=device)" in text, hook("stateless_init_process_group", "weights/nccl.py")
    name = hook("PyNcclCommunicator", "trl_darts/weights/nccl.py")
    assert "self.nccl.ncclCommAbort(self.comm)" in source(PyNcclCommunicator.destroy), name
    assert "self.comm: ncclComm_t = " in source(PyNcclCommunicator._init_comm), name
    assert list(inspect.signature(PyNcclCommunicator.broadcast).parameters)[1:] == ["tensor", "src", "stream"], name
    text = source(packed_tensor.packed_nccl_broadcast_consumer)  # a buffer ends with the tensor that is too much
    assert "if packing_tensor_sizes[buffer_idx] > target_packed_tensor_size: break" in text, hook(
        "packed_nccl_broadcast_consumer", "trl_darts/weights/nccl.py"
    )


def test_trl_generate_answers_with_lists_per_row():
    from trl.generation.vllm_client import VLLMClient

    name = hook("VLLMClient.generate", "FleetVLLMClient.generate")
    assert list(inspect.signature(VLLMClient.generate).parameters)[:3] == ["self", "prompts", "features"], name
    for key in ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"):
        assert f'"{key}": ' in source(VLLMClient.generate), name


def test_vllm_worker_reload():
    """It returns nothing, so that our return value tells a client that the plugin is installed."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    name = hook("vllm.v1.worker.gpu_worker.Worker.reload_weights", "trl_darts/weights/plugin.py")
    original = inspect.unwrap(Worker.reload_weights)
    assert "return" not in source(original), name
    assert "self.model_runner.reload_weights(" in source(original), name
    assert CPUWorker.reload_weights is Worker.reload_weights, name


def test_registering_twice_is_harmless(caplog):
    from trl_darts.weights.plugin import register

    register()
    register()
    assert not caplog.records


def test_vllm_layerwise_reload():
    from vllm.model_executor.model_loader.reload import layerwise, types

    name = hook("vllm.model_executor.model_loader.reload", "trl_darts/weights/reload.py")
    fields = types.LayerReloadingInfo.__dataclass_fields__
    assert {"load_numel", "loaded_weights", "load_numel_total"} <= set(fields), name
    assert "load_numel_total is not None" in source(types.LayerReloadingInfo.can_load), name
    text = source(layerwise.finalize_layerwise_processing)
    assert "if info.load_numel <= 0:" in text, name  # what was not loaded gets its kernel tensors back
    assert "_place_kernel_tensors(layer, info)" in text, name


def test_vllm_packs_lm_heads_on_cpu():
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    name = hook("UnquantizedEmbeddingMethod.process_weights_after_loading", "repack_tied_lm_heads")
    text = source(UnquantizedEmbeddingMethod.process_weights_after_loading)
    assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=False)" in text, name
    assert "layer.cpu_linear =" in source(dispatch_cpu_unquantized_gemm), name


def test_vllm_packs_experts_on_cpu():
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    name = hook("UnquantizedFusedMoEMethod._setup_kernel", "pack_reloaded_experts")
    original = inspect.unwrap(UnquantizedFusedMoEMethod._setup_kernel)
    assert list(inspect.signature(original).parameters) == ["self", "layer", "w13", "w2"], name
    text = source(original)
    assert "is_weight_update = self.moe_kernel is not None" in text, name
    packs = "self.moe_kernel.fused_experts.process_weights_after_loading(layer)"
    assert text.index("if not is_weight_update:") < text.index(packs), name  # not on a reload


def test_vllm_routes_completions_by_rank():
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.completion import serving

    name = hook("X-data-parallel-rank", "trl_darts/weights/canary.py")
    assert '"X-data-parallel-rank"' in source(GenerateBaseServing._get_data_parallel_rank), name
    assert "data_parallel_rank = self._get_data_parallel_rank(raw_request)" in source(serving), name


def test_trl_gathers_parameters():
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    name = hook("VLLMGeneration._dist", "SyncedGeneration")
    assert "self._dist = DistributedBackend(accelerator)" in source(VLLMGeneration.__init__), name
    assert list(inspect.signature(DistributedBackend.gather_params).parameters) == ["self", "params"], name
    assert "self._dist.fsdp_version == 1" in source(VLLMGeneration._iter_fsdp_params), name


def test_vllm_adapters():
    from vllm.config.lora import MaxLoRARanks
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.v1.worker.gpu_worker import Worker

    assert get_args(MaxLoRARanks) == ADAPTER_RANKS, hook("MaxLoRARanks", "trl_darts/weights/__init__.py")
    name = hook("PEFTHelper", "trl_darts/weights/adapter.py")
    assert {"r", "lora_alpha", "target_modules", "use_rslora"} <= set(PEFTHelper.__dataclass_fields__), name
    ours = PEFTHelper.from_dict({"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"})
    assert ours.vllm_lora_scaling_factor == 1, name  # without patterns, for all layers
    assert "self.lora_b *= self.scaling" in source(LoRALayerWeights.optimize), name  # as we do
    name = hook("LoRAModelManager", "trl_darts/weights/plugin.py")
    assert "self.modules: dict[str, BaseLayerWithLoRA] = {}" in source(LoRAModelManager.__init__), name
    assert "self._registered_adapters" in source(LoRAModelManager.list_adapters), name
    assert "add_lora" in vars(Worker), hook("Worker.add_lora", "notify_drafter")
    text = source(OpenAIServingModels.show_available_models)
    assert "parent=lora.base_model_name if" in text, hook("/v1/models", "VLLMServer.adapters")
