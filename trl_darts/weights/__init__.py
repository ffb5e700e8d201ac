"""
Weights from the trainer to vLLM servers: over NCCL (TRL's way), over gloo where there is no CUDA, or through a
directory.

`plugin`, `gloo_engine` and `reload` run in the server's processes, `gloo` there and in the trainer, the rest in the
trainer alone. Every vLLM process imports this package, so nothing is loaded before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .client import NCCLVLLMClient
    from .factory import make_client, resolve_weight_sync
    from .filesystem import FilesystemVLLMClient
    from .fleet import FleetVLLMClient
    from .gloo_client import GlooVLLMClient

# The settings of `weight_sync`.
WEIGHT_SYNCS = ("auto", "nccl", "filesystem")

_MODULES = {
    "FilesystemVLLMClient": "filesystem",
    "FleetVLLMClient": "fleet",
    "GlooVLLMClient": "gloo_client",
    "NCCLVLLMClient": "client",
    "make_client": "factory",
    "resolve_weight_sync": "factory",
}

__all__ = [
    "WEIGHT_SYNCS",
    "FilesystemVLLMClient",
    "FleetVLLMClient",
    "GlooVLLMClient",
    "NCCLVLLMClient",
    "make_client",
    "resolve_weight_sync",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
