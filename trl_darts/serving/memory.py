"""Limits the memory of servers that share GPUs and take turns by sleeping."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ..errors import ConfigurationError
from .build import gpu_bytes
from .options import ServeOptions


GIB = 1 << 30
DEFAULT = 0.92  # vLLM's own
FLAG = "--gpu-memory-utilization"
# Memory of a sleeping server (CUDA context, CUDA graphs, NCCL buffers) and of weights in transfer: an estimate, not
# measured.
KEPT = 4 * GIB


def shared_utilization(options: ServeOptions) -> float | None:
    """
    Returns the `--gpu-memory-utilization` of main and tail servers on the same GPUs, or `None` if the weights are not
    on this machine. Raises [`ConfigurationError`] if no value fits.

    A server that is awake uses u · memory bytes per GPU for weights, activations and KV cache. During a weight sync,
    the main servers are awake, and the tail servers are awake without their KV cache. With the bytes of their weights
    per GPU, this requires

        u · memory + tail + KEPT <= memory     and     max(main, tail) < u · memory.

    The first condition also holds while one server decodes and all others sleep.
    """
    weights = weight_bytes(options)
    if weights is None:
        return None
    main, tail = (weights / part.gpus_per_copy for part in options.sets)
    memory = gpu_bytes()
    most = math.floor(100 * min(DEFAULT, 1 - (tail + KEPT) / memory)) / 100
    sizes = f"{main / GIB:.1f} and {tail / GIB:.1f} GiB of weights on each GPU of {memory / GIB:.0f} GiB"
    if max(main, tail) >= most * memory:
        raise ConfigurationError(
            f"`layout` ({options.layout!r}) must leave room for a KV cache: main and tail servers have {sizes}, and a "
            f"weight sync holds both and {KEPT / GIB:.0f} GiB more. Use more GPUs per server, or run two commands "
            "with different `--devices`."
        )
    try:
        chosen = float(options.flags.get(FLAG, most))
    except ValueError:
        return most  # vLLM raises a better error
    if chosen > most:
        raise ConfigurationError(
            f"`{FLAG}` ({chosen:g}) must be at most {most:g} with `layout` ({options.layout!r}): main and tail "
            f"servers have {sizes}, and a weight sync holds both next to the main servers' KV cache. Lower it, or "
            "leave it out."
        )
    return most


def weight_bytes(options: ServeOptions) -> int | None:
    """Returns the bytes of the loaded weights. `None` if they are not on this machine, or are quantized by vLLM."""
    directory = _directory(options.model)
    if directory is None or {"--quantization", "-q"} & options.flags.keys():
        return None
    for name in ("model.safetensors", "pytorch_model.bin"):
        whole, index = directory / name, directory / f"{name}.index.json"
        if whole.is_file() or index.is_file():
            stored = (
                whole.stat().st_size if whole.is_file() else json.loads(index.read_text())["metadata"]["total_size"]
            )
            return int(stored * _served_width(options) / _stored_width(directory))
    return None


def _directory(model: str) -> Path | None:
    """Returns the model's directory, or that in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache  # loads an HTTP client
    from huggingface_hub.errors import HFValidationError

    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # the address of an object store
        return None
    return Path(config).parent if isinstance(config, str) else None


def _stored_width(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    return 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2


def _served_width(options: ServeOptions) -> int:
    """Returns the bytes per weight in vLLM, which loads float32 weights as bfloat16 by default."""
    return 4 if options.flags.get("--dtype") in ("float", "float32") else 2
