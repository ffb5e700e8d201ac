"""Completes vLLM's layerwise reload. Runs in the server's workers, and around the sync of a colocated engine."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from .experts import pack_reloaded_experts


@contextmanager
def reloaded_layers(llm: Any) -> Iterator[None]:
    """Inside this context, weights loaded into a colocated engine are processed layer by layer."""
    pack_reloaded_experts(unquantized_fused_moe_method)  # vLLM may run without plugins
    worker = llm.llm_engine.model_executor.driver_worker.model_runner
    initialize_layerwise_reload(worker.model)
    try:
        yield
    except BaseException:
        restore_unfinished_layers(worker.model, worker.vllm_config)
        raise
    finish_reload(worker.model, worker.model_config)


def repack_tied_lm_heads(model: torch.nn.Module) -> None:
    """
    Updates the packed copy of an LM head that shares its weight with the embedding.

    On a CPU, each linear layer multiplies with a packed copy of its weight (`cpu_linear`), made when the layer is
    loaded. A tied LM head is never loaded, only its embedding is, so after a reload its logits use the old weights:
    log-probs are off by 0.1 to 1.1, without any error. This is the second limitation listed in
    `vllm/model_executor/model_loader/reload/__init__.py` ("tied parameters will only reflect processing from one of
    the parent layers"). Remove this function once vLLM processes every parent of a tied parameter.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and owners[id(module.weight)] > 1:
            module.quant_method.process_weights_after_loading(module)


def finish_reload(model: torch.nn.Module, model_config: ModelConfig) -> None:
    """Activates the new weights, including tied ones."""
    finalize_layerwise_reload(model, model_config)
    repack_tied_lm_heads(model)


def restore_unfinished_layers(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """
    Ends a failed layerwise reload: layers that were not loaded completely get their previous weights back.

    Without this, these layers have no memory, so the next request kills the engine, and their buffered tensors count
    towards the next reload, which then processes them too early. Afterwards the model is a mixture of old and new
    layers. Remove this function once vLLM can abort a reload.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    with set_current_vllm_config(vllm_config):
        finish_reload(model, vllm_config.model_config)
