"""
An estimate of the memory that training takes on each GPU.

What scales with parameters is bookkeeping ([ZeRO](https://huggingface.co/papers/1910.02054), Section 3.1): 16 bytes
for each that is trained with Adam in mixed precision. What scales with tokens is rough
([Korthikanti et al.](https://huggingface.co/papers/2205.05198), Section 4). docs/recipes.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .sharding import Sharding


GIB = 2**30
DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "auto": 2.0}  # checkpoints are in half precision
QUANTIZED_BYTES = {"load_in_4bit": 0.5, "load_in_8bit": 1.0}
MOMENTS_BYTES = {"4bit": 1.0, "8bit": 2.0}  # Adam's two, by what `optim` has in its name
# TRL 1.16 projects tiles of 4,096 tokens × 32,768 words (`trl.kernels.chunked_logprob`): logits are never whole.
TILE_TOKENS, TILE_WORDS = 4096, 32_768
LAYER_BYTES = 34  # per token and hidden unit, attention scores not kept
CHECKPOINT_BYTES = 2  # the layer's input alone


@dataclass(frozen=True)
class ModelSize:
    """
    Sizes of a model that memory depends on; `None` for what is not known.

    Args:
        num_parameters (`float`):
            All parameters.
        num_adapter_parameters (`int`, *optional*):
            Those that LoRA adds.
        hidden_size (`int`, *optional*):
            Width of the residual stream.
        num_layers (`int`, *optional*):
            Transformer layers.
        vocab_size (`int`, *optional*):
            Words of the LM head.
    """

    num_parameters: float
    num_adapter_parameters: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """
    Bytes on one GPU.

    Args:
        states (`dict[str, float]`):
            Weights, gradients, optimizer states: without them nothing begins.
        rough (`dict[str, float]`):
            What a forward and backward pass takes beside them.
        notes (`tuple[str, ...]`):
            What is not counted.
    """

    states: dict[str, float]
    rough: dict[str, float]
    notes: tuple[str, ...]

    @property
    def state_bytes(self) -> float:
        """Bytes of the states."""
        return sum(self.states.values())

    @property
    def total_bytes(self) -> float:
        """Bytes of all that is counted."""
        return self.state_bytes + sum(self.rough.values())


def estimate_memory(
    size: ModelSize, config: Any, model: Any, sharding: Sharding, num_processes: int, max_prompt_length: int = 0
) -> MemoryEstimate:
    """
    Estimates what a training takes on each GPU.

    Args:
        size ([`ModelSize`]):
            The model.
        config ([`DARTSGRPOConfig`]):
            The trainer's arguments.
        model ([`~trl.ModelConfig`]):
            The model's arguments.
        sharding ([`Sharding`]):
            What is shared out.
        num_processes (`int`):
            Over how many processes.
        max_prompt_length (`int`, *optional*, defaults to `0`):
            Tokens of the longest prompt.

    Returns:
        [`MemoryEstimate`]: Its parts.
    """
    states, notes = _states(size, config, model, sharding, num_processes), []
    if model.use_peft and size.num_adapter_parameters is None:
        notes.append("the adapter, which needs the model's config")
    tokens = config.per_device_train_batch_size * (max_prompt_length + config.max_completion_length)
    rough: dict[str, float] = {}
    if size.hidden_size is None or size.num_layers is None or size.vocab_size is None:
        notes.append("activations and the LM head, which need the model's config")
    else:
        rough["activations"] = _activations(size.hidden_size, size.num_layers, tokens, config)
        # The backward pass adds up the gradients of the head and of its inputs in float32.
        head = 0 if model.use_peft else size.vocab_size * size.hidden_size
        tile = min(tokens, TILE_TOKENS) * min(size.vocab_size, TILE_WORDS)
        rough["LM head"] = 4.0 * (head + tokens * size.hidden_size) + _compute_bytes(config) * tile
    if not _optimizer(config).removeprefix("paged_").startswith("adamw"):
        notes.append(f"`optim` ({_optimizer(config)}) as it is: its states are counted as Adam's")
    if config.colocates:
        notes.append(f"vLLM in the same process, which takes {config.vllm_gpu_memory_utilization:.0%} of the GPU")
    elif not config.use_vllm:
        notes.append("generation in the trainer's process")
    return MemoryEstimate(states, rough, tuple(notes))


def _states(size: ModelSize, config: Any, model: Any, sharding: Sharding, num_processes: int) -> dict[str, float]:
    per_parameter = _bytes_per_parameter(config, model, sharding)
    trained = float(size.num_adapter_parameters or 0) if model.use_peft else size.num_parameters
    frozen = size.num_parameters if model.use_peft else 0.0
    weights = frozen * per_parameter.frozen + trained * per_parameter.weight
    shares = {
        name: 1 / num_processes if getattr(sharding, name) else 1 for name in ("weights", "gradients", "optimizer")
    }
    states = {
        "weights": 0.0 if sharding.offloads_weights else weights * shares["weights"],
        "gradients": trained * per_parameter.gradient * shares["gradients"],
        "optimizer states": trained * per_parameter.optimizer * shares["optimizer"],
    }
    if sharding.offloads_optimizer:  # gradients go where the optimizer is, as they come
        states["gradients"] = states["optimizer states"] = 0.0
    if num_processes > 1 and not (sharding.deepspeed or sharding.gradients):
        # PyTorch's DDP copies gradients into buckets; with `gradient_as_bucket_view`, which is not set, it would not.
        states["buckets of DDP"] = states["gradients"]
    if config.beta and not model.use_peft:  # with an adapter, the model without it is the reference
        reference = size.num_parameters * per_parameter.frozen * shares["weights"]
        states["reference model"] = 0.0 if sharding.offloads_weights else reference
    return states


class _Bytes(NamedTuple):
    """Per parameter: of a weight that is not trained, and of all that belongs to one that is."""

    frozen: float
    weight: float
    gradient: float
    optimizer: float


def _bytes_per_parameter(config: Any, model: Any, sharding: Sharding) -> _Bytes:
    is_half = _compute_bytes(config) == 2
    moments = next((size for name, size in MOMENTS_BYTES.items() if name in _optimizer(config)), None)
    frozen = 2.0 if sharding.deepspeed and is_half else DTYPE_BYTES[model.dtype or "auto"]
    if model.use_peft:
        # PEFT keeps adapters in full precision. With DeepSpeed it is other parts of the same 16 bytes.
        frozen = next((size for name, size in QUANTIZED_BYTES.items() if getattr(model, name)), frozen)
        return _Bytes(frozen, 4.0, 4.0, moments or 8.0)
    if sharding.deepspeed and is_half:
        return _Bytes(frozen, 2.0, 2.0, 4.0 + (moments or 8.0))  # it has the weights in full precision too
    weight = 4.0 if sharding.upcasts and is_half else frozen
    return _Bytes(frozen, weight, weight, moments or 2 * weight)


def _optimizer(config: Any) -> str:
    """The optimizer's name, which transformers makes a member of an enumeration."""
    return str(getattr(config.optim, "value", config.optim))


def _compute_bytes(config: Any) -> float:
    return 2.0 if config.bf16 or config.fp16 else 4.0


def _activations(hidden_size: int, num_layers: int, tokens: int, config: Any) -> float:
    unit = tokens * hidden_size * _compute_bytes(config) / 2  # the paper's bytes are those of half precision
    if config.gradient_checkpointing:
        return unit * (CHECKPOINT_BYTES * num_layers + LAYER_BYTES)
    return unit * LAYER_BYTES * num_layers
