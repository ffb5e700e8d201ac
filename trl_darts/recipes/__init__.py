"""
Recipes: YAML files for `examples/train_grpo.py`, what the script makes of them, and what can be said of one before any
GPU is paid for: its batches, its optimizer steps and an estimate of its memory.
"""

from .arguments import MADE_DATASET, ScriptArguments
from .batches import BatchPlan
from .data import check_dataset, take_split, to_conversations
from .findings import Finding, find
from .memory import MemoryEstimate, ModelSize, estimate_memory
from .models import UnreadableModelError, read_model_size
from .reading import Recipe, read_recipe
from .rewards import load_rewards
from .sharding import Sharding, read_sharding


__all__ = [
    "MADE_DATASET",
    "BatchPlan",
    "Finding",
    "MemoryEstimate",
    "ModelSize",
    "Recipe",
    "ScriptArguments",
    "Sharding",
    "UnreadableModelError",
    "check_dataset",
    "estimate_memory",
    "find",
    "load_rewards",
    "read_model_size",
    "read_recipe",
    "read_sharding",
    "take_split",
    "to_conversations",
]
