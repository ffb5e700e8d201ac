"""
What decodes candidates: vLLM servers, vLLM inside the trainer, transformers' `generate` and continuous batching, and a
stub with scripted lengths.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .deadlines import Deadlines
    from .hf_generate import SchedulerCriterion
    from .stub import StubEngine
    from .vllm_api import ServerPrompt
    from .vllm_server import VLLMServerEngine

_MODULES = {
    "Deadlines": "deadlines",
    "SchedulerCriterion": "hf_generate",
    "ServerPrompt": "vllm_api",
    "StubEngine": "stub",
    "VLLMServerEngine": "vllm_server",
}

__all__ = ["Deadlines", "SchedulerCriterion", "ServerPrompt", "StubEngine", "VLLMServerEngine"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
