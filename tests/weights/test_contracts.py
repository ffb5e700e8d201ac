"""
One test per private behaviour of TRL, vLLM and torch that weight sync leans on.

A failure names the hook and where we use it. Behaviour that only a running server shows is held by `test_sync`,
`test_fleet` and `test_failures`.
"""

from __future__ import annotations

import inspect
import re

import pytest


pytestmark = pytest.mark.vllm


def source(function):
    return re.sub(r"\s+", " ", inspect.getsource(function))


def hook(name, used_by):
    return f"`{name}` is not what it was. It is used by {used_by}."


def test_trl_calls_our_clients_as_its_own():
    from trl.generation.vllm_generation import VLLMGeneration

    text = source(VLLMGeneration.sync_weights)
    for call in ("update_named_params(self._weight_metadata, self._iter_named_params())", "reset_prefix_cache()"):
        assert f"self.vllm_client.{call}" in text, hook("VLLMGeneration.sync_weights", "every client of ours")


def test_trl_client_attributes():
    from trl.generation.vllm_client import VLLMClient

    text = source(VLLMClient.__init__)
    for name in ("session", "host", "base_url", "group_port", "communicator", "_updating_weights", "model"):
        assert f"self.{name} =" in text, hook(f"VLLMClient.{name}", "trl_darts/weights/client.py")


def test_trl_update_within_an_open_one_only_sends():
    """`_updating_weights` keeps TRL from starting and finishing: we do that, for all servers together."""
    from trl.generation.vllm_client import VLLMClient

    text = source(VLLMClient.update_named_params)
    name = hook("VLLMClient.update_named_params", "NCCLVLLMClient and FleetVLLMClient")
    assert "if not self._updating_weights: self._start_weight_update()" in text, name
    assert "if not self._updating_weights: self._finish_weight_update()" in text, name
    assert list(inspect.signature(VLLMClient.update_named_params).parameters) == [
        "self",
        "metadata",
        "named_params",
    ], name


def test_trl_generate_answers_with_lists_per_row():
    from trl.generation.vllm_client import VLLMClient

    name = hook("VLLMClient.generate", "FleetVLLMClient.generate")
    assert list(inspect.signature(VLLMClient.generate).parameters)[:3] == ["self", "prompts", "features"], name
    for key in ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"):
        assert f'"{key}": ' in source(VLLMClient.generate), name


def test_vllm_takes_any_backend_name():
    from vllm.config import WeightTransferConfig

    name = hook("WeightTransferConfig.backend", "the server's flag for the gloo backend")
    assert WeightTransferConfig(backend="gloo").backend == "gloo", name


def test_vllm_engine_factory():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    name = hook("WeightTransferEngineFactory", "trl_darts/weights/plugin.py")
    assert isinstance(WeightTransferEngineFactory._registry, dict), name
    assert list(inspect.signature(WeightTransferEngineFactory.register_engine).parameters) == [
        "name",
        "module_path_or_cls",
        "class_name",
    ], name
    assert "gloo" not in WeightTransferEngineFactory._registry or _ours(WeightTransferEngineFactory), (
        "vLLM has a gloo weight-transfer engine of its own now: ours can go."
    )


def _ours(factory):
    return factory._registry["gloo"]().__module__.startswith("trl_darts.")


def test_registering_twice_is_harmless(caplog):
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from trl_darts.weights.plugin import register

    register()
    register()
    assert not caplog.records
    assert _ours(WeightTransferEngineFactory)


def test_vllm_worker_reload():
    """Its return value is ours to give: that is how a client learns of the plugin."""
    from vllm.v1.worker.gpu_worker import Worker

    name = hook("vllm.v1.worker.gpu_worker.Worker.reload_weights", "trl_darts/weights/plugin.py")
    original = inspect.unwrap(Worker.reload_weights)
    assert "return" not in source(original), name
    assert "self.model_runner.reload_weights(" in source(original), name
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert CPUWorker.reload_weights is Worker.reload_weights, name


def test_vllm_engine_base():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    name = hook("WeightTransferEngine", "trl_darts/weights/gloo_engine.py")
    assert WeightTransferEngine.__abstractmethods__ == {
        "init_transfer_engine",
        "start_weight_update",
        "receive_weights",
        "finish_weight_update",
        "shutdown",
    }, name
    text = source(WeightTransferEngine.__init__)
    for attribute in ("vllm_config", "parallel_config", "model_config", "device", "model"):
        assert f"self.{attribute}" in text, name
    from vllm.config import ParallelConfig

    fields = ParallelConfig.__dataclass_fields__
    assert {"data_parallel_index", "world_size", "rank"} <= set(fields), hook("ParallelConfig", "the same file")


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


def test_torch_gloo_options():
    from torch.distributed import ProcessGroupGloo

    name = hook("torch.distributed.ProcessGroupGloo._Options", "trl_darts/weights/gloo.py")
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    assert hasattr(options, "_timeout"), name
