"""
Our vLLM plugin. vLLM calls [`register`] in each of its processes, before a model is loaded.

It fixes `reload_weights` for training, and speculative decoding, and tells how many tokens each request has, and which
layers of an adapter are not used. It never imports a module of vLLM before vLLM does, which would take seconds in each
process, and bind kernels that the platform replaces later. It only warns if vLLM's interfaces differ, so that it does
not break a server.
"""

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..speculation.vllm_patches import fix_expand, notify_drafter, pass_batch, spare_generators, spares_generators
from .experts import pack_reloaded_experts
from .probe import probe


WORKER_MODULE = "vllm.v1.worker.gpu_worker"  # its `Worker` is also the base of the CPU's and XPU's workers
CORE_MODULE = "vllm.v1.engine.core"
EXPERTS_MODULE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"  # also the base of the CPU's and XPU's
CPU_KERNELS_MODULE = "vllm.utils.cpu_triton_utils"  # only imported on a CPU
# Methods of `/collective_rpc`.
NUM_OUTPUTS, PROBE = "trl_darts_num_outputs", "trl_darts_probe"
UNUSED, IN_USE = "trl_darts_unused_layers", "trl_darts_adapters_in_use"

logger = logging.getLogger("vllm.trl_darts")


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. Can be called repeatedly."""
    when_imported(WORKER_MODULE, _patch_worker)
    when_imported(EXPERTS_MODULE, pack_reloaded_experts)
    when_imported(CORE_MODULE, _tell_of_requests)
    when_imported(RUNNER_MODULE, pass_batch)
    when_imported(RUNNER_MODULE, spare_generators)
    when_imported(CPU_KERNELS_MODULE, fix_expand)


def _patch_worker(module: ModuleType) -> None:
    """
    Makes `Worker.reload_weights` repack tied LM heads, restore the model after a failure, and return our version.

    The return value tells a client that this plugin is installed: vLLM's own method returns nothing.
    """
    original = module.Worker.reload_weights
    if hasattr(original, "trl_darts_version"):
        return
    from .. import __version__

    @functools.wraps(original)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        from .reload import repack_tied_lm_heads, restore_unfinished_layers

        try:
            original(self, *args, **kwargs)
        except Exception:
            restore_unfinished_layers(self.model_runner.get_model(), self.vllm_config)
            raise
        repack_tied_lm_heads(self.model_runner.get_model())
        return {"trl_darts": __version__}

    reload_weights.trl_darts_version = __version__  # type: ignore[attr-defined]
    module.Worker.reload_weights = reload_weights
    setattr(module.Worker, PROBE, _answer)
    setattr(module.Worker, UNUSED, _unused_layers)
    notify_drafter(module.Worker)


def _answer(worker: Any, **kwargs: Any) -> dict[str, Any]:
    """Tells a client what this plugin can do, and what `trl-darts check` asks."""
    return {**probe(**kwargs), "seeds": spares_generators(worker.model_runner)}


def _unused_layers(worker: Any) -> list[str]:
    """
    Returns the layers of the newest adapter that vLLM leaves out without a message, because its model does not have
    them under that name, or does not adapt them. Older ones may be of other runs, and stay here after they are
    unloaded.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    adapters = manager.list_adapters()
    layers = set(adapters[max(adapters)].loras) if adapters else set()
    return sorted(layers - manager.modules.keys())


def _tell_of_requests(module: ModuleType) -> None:
    """
    Adds two methods to `/collective_rpc`, because no endpoint tells either. [`NUM_OUTPUTS`]: the number of output
    tokens of each request, by its ID, which reach a client later. (vLLM 0.32 has versions in the responses of
    `/inference/v1/generate`, at their end.) [`IN_USE`]: the adapters that requests decode with. If one of these is
    unloaded, vLLM loads it again from its file.
    """
    original = module.EngineCore.collective_rpc
    if hasattr(original, NUM_OUTPUTS):
        return

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        requests = self.scheduler.requests
        if method == NUM_OUTPUTS:
            return [{name: request.num_output_tokens for name, request in requests.items()}]
        if method == IN_USE:
            return [sorted({request.lora_request.lora_name for request in requests.values() if request.lora_request})]
        return original(self, method, *args, **kwargs)

    setattr(collective_rpc, NUM_OUTPUTS, True)
    module.EngineCore.collective_rpc = collective_rpc


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """
    Calls `action(module)` right after a module is imported, or now if it already is. Failures are logged. The same
    action is called once.
    """
    if name in sys.modules:
        _act(action, sys.modules[name])
    elif _AfterImport(name, action) not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport(name, action))


@dataclass(frozen=True)
class _AfterImport(MetaPathFinder):
    name: str
    action: Callable[[ModuleType], None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)  # asks the other finders
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            _act(self.action, module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec


def _act(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:
        logger.warning(
            "trl_darts does not support this vLLM (%s): %s: %s. The server works, but weight synchronization with "
            "`weight_sync='filesystem'` and speculative decoding may not. Install a supported vLLM version.",
            getattr(sys.modules.get("vllm"), "__version__", "unknown"),
            type(error).__name__,
            error,
        )
