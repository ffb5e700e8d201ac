"""How much of a GPU servers may take that share it, and take turns by sleeping."""

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
# What a sleeping server keeps (its CUDA context, CUDA graphs, NCCL's buffers), and weights that are on their way. An
# estimate: we had no GPU with vLLM to measure it.
KEPT = 4 * GIB


def shared_utilization(options: ServeOptions) -> float | None:
    """
    `--gpu-memory-utilization` of main and tail servers on the same GPUs, refused where there is none that fits; `None`
    where the weights are not here yet.

    With the bytes per GPU of its memory, of the main and tail servers' weights, and of `KEPT`, and the utilization u,
    a server that is awake has u · memory for weights, activations and KV cache. A weight sync finds the main servers
    awake, and wakes the tail's without their KV cache. Hence

        u · memory + tail + KEPT <= memory     and     max(main, tail) < u · memory.

    The first also holds while a server decodes and all others sleep. The model's bytes are divided by the GPUs that
    share one copy of it.
    """
    weights = weight_bytes(options)
    if weights is None:
        return None
    main, tail = (weights / own.gpus_per_copy for own in options.sets)
    memory = gpu_bytes()
    most = math.floor(100 * min(DEFAULT, 1 - (tail + KEPT) / memory)) / 100
    sizes = f"{main / GIB:.1f} and {tail / GIB:.1f} GiB of weights on each GPU of {memory / GIB:.0f} GiB"
    if max(main, tail) >= most * memory:
        raise ConfigurationError(
            f"`layout` ({options.layout!r}) must leave room for a KV cache: main and tail servers have {sizes}, both "
            f"at once in a weight sync, which takes {KEPT / GIB:.0f} GiB more. Use more GPUs per server, or start two "
            "commands with `--devices` of their own."
        )
    try:
        chosen = float(options.flags.get(FLAG, most))
    except ValueError:
        return most  # vLLM's own message is the best
    if chosen > most:
        raise ConfigurationError(
            f"`{FLAG}` ({chosen:g}) must be at most {most:g} with `layout` ({options.layout!r}): main and "
            f"tail servers have {sizes}, and a weight sync needs both beside the main servers' KV cache. Lower it, or "
            "leave it out."
        )
    return most


def weight_bytes(options: ServeOptions) -> int | None:
    """Bytes of the model's weights on the GPUs; `None` where they are not here, or are quantized while they load."""
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
    """Where the files of a model are: its directory, or that of the Hub's cache."""
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
    """Unless told otherwise, vLLM has float32 weights as bfloat16."""
    return 4 if options.flags.get("--dtype") in ("float", "float32") else 2
