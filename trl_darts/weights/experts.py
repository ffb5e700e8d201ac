"""Reloaded experts on a CPU. Runs in the servers' processes, so it imports nothing heavy."""

import functools
from types import ModuleType
from typing import Any


def pack_reloaded_experts(module: ModuleType) -> None:
    """
    Packs reloaded experts for a CPU's kernel. vLLM does that on the first load only, and a reload copies plain weights
    into the packed storage: log-probs are off by 0.1 to 1.1, without any error. Experts that are padded can't be
    reloaded at all. Remove this function once `UnquantizedFusedMoEMethod._setup_kernel` packs them on every load.
    """
    original = module.UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(original, "trl_darts_packs"):
        return

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_reload = self.moe_kernel is not None
        original(self, layer, *args, **kwargs)
        if is_reload and layer.w13_weight.device.type == "cpu":
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_kernel.trl_darts_packs = True  # type: ignore[attr-defined]
    module.UnquantizedFusedMoEMethod._setup_kernel = setup_kernel
