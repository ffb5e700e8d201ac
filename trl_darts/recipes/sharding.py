"""What an accelerate config shards over processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..yaml_files import read_mapping


REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")
OFFLOAD_DEVICES = ("none", "cpu", "nvme")


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
        upcasts (`bool`, *optional*, defaults to `False`):
            Whether weights that are trained in mixed precision are kept in full precision, whatever their `dtype`.
        offloads_weights (`bool`, *optional*, defaults to `False`):
            Whether weights are in the host's memory.
        offloads_optimizer (`bool`, *optional*, defaults to `False`):
            Whether optimizer states are, and gradients with them.
    """

    name: str = "nothing sharded"
    num_processes: int | None = None
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    deepspeed: bool = False
    upcasts: bool = False  # accelerate does that with FSDP
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
    values = read_mapping(path)
    num_processes = values.get("num_processes")
    if num_processes is not None and (type(num_processes) is not int or num_processes < 1):
        raise ConfigurationError(
            f"`num_processes` ({num_processes!r}) of {str(path)!r} must be a whole number of at least 1. Correct it, "
            "or leave it to `--num-processes`."
        )
    kind = values.get("distributed_type")
    if kind in REPLICATED:
        return Sharding(num_processes=num_processes)
    if kind == "DEEPSPEED":
        return _deepspeed(_section(values, "deepspeed_config", path), num_processes)
    if kind == "FSDP":
        return _fsdp(_section(values, "fsdp_config", path), num_processes)
    raise ConfigurationError(
        f"`distributed_type` ({kind!r}) of {str(path)!r} must be one of "
        f"{', '.join(map(repr, (*REPLICATED, 'DEEPSPEED', 'FSDP')))}. Others are not estimated."
    )


def _section(values: dict[str, Any], name: str, path: str | Path) -> dict[str, Any]:
    section = values.get(name, {})
    if not isinstance(section, dict):
        raise ConfigurationError(
            f"`{name}` ({section!r}) of {str(path)!r} must be a mapping. What stands in a file of its own is not "
            "read: write it there."
        )
    return section


def _deepspeed(config: dict[str, Any], num_processes: int | None) -> Sharding:
    stage = config.get("zero_stage")
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ConfigurationError(
            f"`zero_stage` ({stage!r}) of the accelerate config's `deepspeed_config` must be 0, 1, 2 or 3. A "
            "DeepSpeed config in a file of its own is not read."
        )
    return Sharding(
        name=f"ZeRO-{stage}",
        num_processes=num_processes,
        weights=stage >= 3,
        gradients=stage >= 2,
        optimizer=stage >= 1,
        deepspeed=True,
        offloads_weights=_offloads(config, "offload_param_device", stage, least=3),
        offloads_optimizer=_offloads(config, "offload_optimizer_device", stage, least=1),
    )


def _offloads(config: dict[str, Any], name: str, stage: int, least: int) -> bool:
    device = config.get(name, "none")
    if device not in OFFLOAD_DEVICES:
        raise ConfigurationError(
            f"`{name}` ({device!r}) of the accelerate config must be one of {', '.join(map(repr, OFFLOAD_DEVICES))}."
        )
    if device != "none" and stage < least:
        raise ConfigurationError(
            f"`{name}` ({device!r}) of the accelerate config needs `zero_stage` {least} or more, and that is {stage}. "
            f"Raise it, or set `{name}: none`."
        )
    return bool(device != "none")


def _fsdp(config: dict[str, Any], num_processes: int | None) -> Sharding:
    if config.get("fsdp_version") != 2:
        raise ConfigurationError(
            f"`fsdp_version` ({config.get('fsdp_version')!r}) of the accelerate config must be 2. FSDP1 is not "
            "estimated; see configs/accelerate/fsdp2.yaml."
        )
    offloads = config.get("fsdp_offload_params", False)
    if type(offloads) is not bool:
        raise ConfigurationError(
            f"`fsdp_offload_params` ({offloads!r}) of the accelerate config must be `true` or `false`."
        )
    return Sharding(
        name="FSDP2",
        num_processes=num_processes,
        weights=True,
        gradients=True,
        optimizer=True,
        upcasts=True,
        offloads_weights=offloads,
        offloads_optimizer=offloads,
    )
