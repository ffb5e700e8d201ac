"""GRPO training that does not wait for its slowest rollout: a drop-in subclass of TRL's `GRPOTrainer`."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .callbacks import VarianceTrackerCallback
    from .config import DARTSGRPOConfig
    from .errors import EnvironmentLost
    from .length_recorder import record_lengths
    from .trainer import DARTSGRPOTrainer
    from .training.chat_endpoint import chat_endpoint
    from .training.sessions import Session, session_reward

__version__ = "0.1.0"

_MODULES = {
    "DARTSGRPOConfig": "config",
    "DARTSGRPOTrainer": "trainer",
    "EnvironmentLost": "errors",
    "Session": "training.sessions",
    "VarianceTrackerCallback": "callbacks",
    "chat_endpoint": "training.chat_endpoint",
    "record_lengths": "length_recorder",
    "session_reward": "training.sessions",
}

__all__ = [
    "DARTSGRPOConfig",
    "DARTSGRPOTrainer",
    "EnvironmentLost",
    "Session",
    "VarianceTrackerCallback",
    "__version__",
    "chat_endpoint",
    "record_lengths",
    "session_reward",
]


def __getattr__(name: str) -> object:
    # Lazy: every vLLM process imports this package for its plugin, and needs neither TRL nor the trainer.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
