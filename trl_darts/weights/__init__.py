"""
Weights from the trainer to vLLM servers: over NCCL (TRL's way), or through files where there is no CUDA.

`plugin` and `reload` run in the servers' processes, the rest in the trainer. Every vLLM process imports this package,
so nothing is loaded before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .client import SyncedVLLMClient
    from .fleet import FleetVLLMClient, make_client, resolve_weight_sync

# The settings of `weight_sync`.
WEIGHT_SYNCS = ("auto", "nccl", "filesystem")

_MODULES = {
    "FleetVLLMClient": "fleet",
    "SyncedVLLMClient": "client",
    "make_client": "fleet",
    "resolve_weight_sync": "fleet",
}

__all__ = ["WEIGHT_SYNCS", "FleetVLLMClient", "SyncedVLLMClient", "make_client", "resolve_weight_sync"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
