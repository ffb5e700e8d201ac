"""
Reads a recipe as `examples/train_grpo.py` does, on a machine that need not have its GPUs.

What `TrlParser` passes over is refused here: unknown names come with the closest known ones, and a value must be what
it would be on a command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trl import ModelConfig  # type: ignore[attr-defined]  # TRL exports it lazily
from trl.scripts.utils import TrlParser

from ..config import DARTSGRPOConfig
from ..errors import ConfigurationError
from ..field_types import known_fields, suggestions, typed
from ..yaml_files import read_mapping
from .arguments import ScriptArguments
from .batches import BatchPlan
from .data import check_dataset
from .rewards import check_rewards


# Set for the check alone: with `use_cpu`, transformers looks for no GPU that can do bfloat16. For TF32 it always does.
WITHOUT_DEVICE = {"use_cpu": True, "tf32": None}


@dataclass(frozen=True)
class Recipe:
    """
    A recipe, parsed, with the fields' own checks passed.

    Args:
        path (`Path`):
            The file.
        script ([`ScriptArguments`]):
            The script's arguments.
        config ([`DARTSGRPOConfig`]):
            The trainer's, as one of the planned processes sees them.
        model ([`~trl.ModelConfig`]):
            The model's.
        plan ([`BatchPlan`]):
            Its batches.
    """

    path: Path
    script: ScriptArguments
    config: DARTSGRPOConfig
    model: ModelConfig
    plan: BatchPlan

    @property
    def max_completion_length(self) -> int:
        """Limit of completions in tokens."""
        return self.config.max_completion_length or 0

    @property
    def num_made_prompts(self) -> int | None:
        """Prompts of a data set that is made on the spot; `None` for others, which are not looked at."""
        return self.script.num_prompts


def read_recipe(path: str | Path, num_processes: int = 1) -> Recipe:
    """
    Reads a recipe and has all its fields checked.

    Args:
        path (`str` or `Path`):
            A YAML file, in `TrlParser`'s form.
        num_processes (`int`, *optional*, defaults to `1`):
            Processes that it is meant for. They need not exist.

    Returns:
        [`Recipe`]: With defaults filled in.

    Raises:
        [`ConfigurationError`]: If the file can't be read, or a training with it would be refused.
    """
    if num_processes < 1:
        raise ConfigurationError(f"`num_processes` ({num_processes}) must be at least 1.")
    path = Path(path)
    values = _read_values(path)
    config_class = _planned(num_processes)
    classes: list[Any] = [ScriptArguments, config_class, ModelConfig]
    parser = _Parser(classes)
    parser.set_defaults_with_config(**{**values, **WITHOUT_DEVICE})
    parsed = vars(parser.parse_args([]))
    plan = BatchPlan.of(parsed, num_processes)
    try:
        script, config, model = parser.parse_dict(parsed, allow_extra_keys=True)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, ConfigurationError) else ConfigurationError(str(error)) from error
    recipe = Recipe(path, script, config, model, plan)
    _check_recipe(recipe)
    return recipe


def _check_recipe(recipe: Recipe) -> None:
    """What no field's own check sees."""
    if recipe.max_completion_length < 1:
        raise ConfigurationError(
            f"`max_completion_length` ({recipe.config.max_completion_length}) must be at least 1 token: expected "
            "lengths are relative to it. Set it."
        )
    if not recipe.model.model_name_or_path:
        raise ConfigurationError("`model_name_or_path` (empty) must be a model of the Hub, or a directory with one.")
    _check_adapter(recipe.model)
    check_dataset(recipe.script)
    check_rewards(recipe.script, recipe.max_completion_length)


def _check_adapter(model: ModelConfig) -> None:
    """What PEFT refuses of any model, but only once that is loaded."""
    if not model.use_peft:
        return
    if model.lora_r < 1:
        raise ConfigurationError(f"`lora_r` ({model.lora_r}) must be at least 1, the rank of the adapter. Raise it.")
    if not 0 <= model.lora_dropout <= 1:
        raise ConfigurationError(f"`lora_dropout` ({model.lora_dropout}) must be between 0 and 1. Correct it.")


def _read_values(path: Path) -> dict[str, Any]:
    """The file's fields, with their types."""
    values = read_mapping(path)
    environment = values.pop("env", {})  # `TrlParser` sets it; nothing here depends on it
    if not isinstance(environment, dict):
        raise ConfigurationError(f"`env` ({environment!r}) must be a mapping of environment variables to values.")
    for name in values:
        _check_name(name)
    return {name: typed(name, value) for name, value in values.items()}


def _planned(num_processes: int) -> type[DARTSGRPOConfig]:
    """A config whose batches are those of processes that are not there."""

    class Planned(DARTSGRPOConfig):
        @property
        def world_size(self) -> int:
            return num_processes

    return Planned


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        """Instead of a usage text of 500 lines and the end of the process."""
        raise ConfigurationError(f"{message[:1].upper()}{message[1:]}.")


def _check_name(name: str) -> None:
    if name not in known_fields():
        raise ConfigurationError(
            f"`{name}` must be a field of the script's, the trainer's or the model's arguments. "
            f"{suggestions(name) or 'Take it out.'}"
        )
