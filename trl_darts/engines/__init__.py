"""Engines that decode candidates: vLLM servers, colocated vLLM, and transformers (two ways)."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .vllm_api import ServerPrompt
    from .vllm_server import VLLMServerEngine
    from .waiting import Deadlines

_MODULES = {
    "Deadlines": "waiting",
    "ServerPrompt": "vllm_api",
    "VLLMServerEngine": "vllm_server",
}

__all__ = ["Deadlines", "ServerPrompt", "VLLMServerEngine"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
