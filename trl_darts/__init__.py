"""GRPO training that does not wait for its slowest rollout: a drop-in subclass of TRL's `GRPOTrainer`."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .callbacks import VarianceTrackerCallback
    from .config import DARTSGRPOConfig
    from .length_recorder import record_lengths
    from .trainer import DARTSGRPOTrainer

__version__ = "0.1.0"

_MODULES = {
    "DARTSGRPOConfig": "config",
    "DARTSGRPOTrainer": "trainer",
    "VarianceTrackerCallback": "callbacks",
    "record_lengths": "length_recorder",
}

__all__ = ["DARTSGRPOConfig", "DARTSGRPOTrainer", "VarianceTrackerCallback", "__version__", "record_lengths"]


def __getattr__(name: str) -> object:
    # Lazy: every vLLM process imports this package for its plugin, and needs neither TRL nor the trainer.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
