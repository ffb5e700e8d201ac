"""
The LoRA adapter of a PEFT model, in the form in which vLLM loads it.

vLLM before 0.32 scales all matrices of an adapter alike and ignores patterns of ranks and scales. So each layer's
scale is multiplied into its second matrix, as vLLM does when it loads an adapter.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.distributed.tensor import DTensor

from .parameters import smaller_dtype


# Options of PEFT that a plain adapter does not have. Others train further parameters, which are looked for.
NOT_PLAIN = (
    *("use_dora", "modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "lora_bias", "use_bdlora", "arrow_config", "kasa_config"),
    *("monteclora_config",),
)
PLAIN_INITS = (True, False, "gaussian")  # others change the base model, such as PiSSA

Gather = Callable[[list[torch.nn.Parameter]], AbstractContextManager[None]]


def why_no_adapter(model: Any, fsdp_version: int | None = None) -> str | None:
    """Returns why a model's trained weights are not a plain LoRA adapter, `None` if they are."""
    if not is_peft_model(model):
        return "the model has no LoRA adapter"
    if len(model.active_adapters) != 1:
        return f"{len(model.active_adapters)} adapters are active"
    if fsdp_version == 1:
        return "FSDP of version 1 does not show a layer's parameters"
    config = model.peft_config[model.active_adapters[0]]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA":
        return f"the adapter is of type {type(config).__name__}"
    for name in NOT_PLAIN:
        if value := getattr(config, name, None):
            return f"vLLM does not load adapters with `{name}` ({value!r:.60})"
    if config.init_lora_weights not in PLAIN_INITS:
        return f"`init_lora_weights` ({config.init_lora_weights!r}) changes the base model"
    others = [name for name, param in model.named_parameters() if param.requires_grad and not _is_matrix(name)]
    if others:
        return f"`{others[0]}` is trained too"
    head = model.get_output_embeddings()
    for name, layer in _layers(model).items():
        if not isinstance(layer.lora_A[model.active_adapters[0]], torch.nn.Linear):
            return f"vLLM loads adapters of linear layers alone, and {name} is none"
        if layer is head:
            return f"vLLM does not load adapters of the head ({name})"
    return None


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether weights are quantized, so that an adapter can't be merged into what a server loads."""
    return any(not param.dtype.is_floating_point for param in model.parameters())


class Adapter:
    """
    The active adapter of a model, for which `why_no_adapter` is `None`.

    Args:
        model ([`~peft.PeftModel`]):
            The model.
        dtype (`torch.dtype`, *optional*):
            The servers' dtype. Matrices are sent in it if it is smaller.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        self._name = model.active_adapters[0]
        self._layers = _layers(model)
        self._dtype = dtype
        self.rank: int = max(layer.r[self._name] for layer in self._layers.values())

    @property
    def config(self) -> dict[str, Any]:
        """The content of `adapter_config.json`. Scales are part of the matrices."""
        modules = sorted({name.rpartition(".")[2] for name in self._layers})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": modules,
            "bias": "none",
        }

    def tensors(self, gather: Gather, device: torch.device) -> dict[str, torch.Tensor]:
        """
        Returns the matrices by their names in the file. Called on every process at once: sharded ones are gathered.
        With ZeRO-3 that is `gather`; FSDP2's gather themselves, on `device`.
        """
        with gather([param for _, param, _ in self._matrices()]), torch.no_grad():
            return {name: self._served(_whole(param, device) * scale) for name, param, scale in self._matrices()}

    def zeros(self) -> dict[str, torch.Tensor]:
        """Returns an adapter of the same shape without an effect, which can be had without the other processes."""
        found = {}
        for name, layer in self._layers.items():
            rank = layer.r[self._name]
            found[f"{name}.lora_A.weight"] = self._served(torch.zeros(rank, layer.in_features))
            found[f"{name}.lora_B.weight"] = self._served(torch.zeros(layer.out_features, rank))
        return found

    def _matrices(self) -> Iterator[tuple[str, torch.nn.Parameter, float]]:
        """Yields name, parameter and scale of each matrix."""
        for name, layer in self._layers.items():
            yield f"{name}.lora_A.weight", layer.lora_A[self._name].weight, 1.0
            yield f"{name}.lora_B.weight", layer.lora_B[self._name].weight, layer.scaling[self._name]

    def _served(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", smaller_dtype(tensor.dtype, self._dtype), copy=True).contiguous()


def _layers(model: Any) -> Mapping[str, Any]:
    """Returns the layers with an active adapter, by their names in a file of PEFT's."""
    active = model.active_adapters[0]
    named = ((name.replace("_orig_mod.", ""), module) for name, module in model.named_modules())
    return {name: module for name, module in named if active in (getattr(module, "lora_A", None) or ())}


def _whole(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a parameter, gathered if it is sharded by FSDP2, also where its shards are in the CPU's memory."""
    if not isinstance(param, DTensor):
        return param.detach()
    sharded: Any = param.detach().to(device)
    whole: torch.Tensor = sharded.full_tensor()
    return whole


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and (".lora_A." in name or ".lora_B." in name)
