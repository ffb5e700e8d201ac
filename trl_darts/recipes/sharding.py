"""What an accelerate config shards over processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigurationError


@dataclass(frozen=True)
class Sharding:
    """
    Who holds what.

    Args:
        name (`str`, *optional*, defaults to `"nothing sharded"`):
            As people call it.
        num_processes (`int`, *optional*):
            Of the accelerate config; `accelerate launch --num_processes` overrules it.
        weights (`bool`, *optional*, defaults to `False`):
            Whether a process holds only its share of the weights.
        gradients (`bool`, *optional*, defaults to `False`):
            The same for gradients.
        optimizer (`bool`, *optional*, defaults to `False`):
            The same for optimizer states.
        deepspeed (`bool`, *optional*, defaults to `False`):
            Whether DeepSpeed keeps half precision weights beside its own in full precision.
        offloads_weights (`bool`, *optional*, defaults to `False`):
            Whether weights are in the host's memory.
        offloads_optimizer (`bool`, *optional*, defaults to `False`):
            Whether optimizer states are.
    """

    name: str = "nothing sharded"
    num_processes: int | None = None
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    deepspeed: bool = False
    offloads_weights: bool = False
    offloads_optimizer: bool = False


def read_sharding(path: str | Path) -> Sharding:
    """
    Reads an accelerate config.

    Args:
        path (`str` or `Path`):
            A YAML file, such as those of `configs/accelerate`.

    Returns:
        [`Sharding`]: What it shards.

    Raises:
        [`ConfigurationError`]: If it can't be read, or is of a kind that the estimate does not know.
    """
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"`accelerate_config` ({str(path)!r}) must be a YAML file that can be read: "
            f"{getattr(error, 'strerror', None) or ' '.join(str(error).split())}."
        ) from error
    kind = values.get("distributed_type") if isinstance(values, dict) else None
    makers = {"NO": _replicated, "MULTI_GPU": _replicated, "MULTI_CPU": _replicated}
    makers |= {"DEEPSPEED": _deepspeed, "FSDP": _fsdp}
    if str(kind) not in makers:
        raise ConfigurationError(
            f"`distributed_type` ({kind!r}) of {str(path)!r} must be one of {', '.join(map(repr, makers))}. Others "
            "are not estimated."
        )
    return makers[str(kind)](values)


def _replicated(values: dict[str, Any]) -> Sharding:
    return Sharding(num_processes=values.get("num_processes"))


def _deepspeed(values: dict[str, Any]) -> Sharding:
    config = values.get("deepspeed_config") or {}
    stage = config.get("zero_stage")
    if stage not in (0, 1, 2, 3):
        raise ConfigurationError(
            f"`zero_stage` ({stage!r}) of the accelerate config's `deepspeed_config` must be 0, 1, 2 or 3. A "
            "DeepSpeed config in a file of its own is not read."
        )
    return Sharding(
        name=f"ZeRO-{stage}",
        num_processes=values.get("num_processes"),
        weights=stage >= 3,
        gradients=stage >= 2,
        optimizer=stage >= 1,
        deepspeed=True,
        offloads_weights=config.get("offload_param_device", "none") != "none",
        offloads_optimizer=config.get("offload_optimizer_device", "none") != "none",
    )


def _fsdp(values: dict[str, Any]) -> Sharding:
    config = values.get("fsdp_config") or {}
    if config.get("fsdp_version") != 2:
        raise ConfigurationError(
            f"`fsdp_version` ({config.get('fsdp_version')!r}) of the accelerate config must be 2. FSDP1 is not "
            "estimated; see configs/accelerate/fsdp2.yaml."
        )
    offloads = bool(config.get("fsdp_offload_params", False))
    return Sharding(
        name="FSDP2",
        num_processes=values.get("num_processes"),
        weights=True,
        gradients=True,
        optimizer=True,
        offloads_weights=offloads,
        offloads_optimizer=offloads,
    )
