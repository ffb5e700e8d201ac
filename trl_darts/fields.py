"""
Names of the fields that a training takes, and the YAML files that set them. Neither torch nor TRL is imported, which
takes seconds: a typo is told at once.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigurationError, did_you_mean


# The classes of `analysis.recipe.ARGUMENTS` and those that they extend, by file.
CLASSES = {
    "trl_darts/analysis/recipe.py": ("ScriptArguments",),
    "trl_darts/config.py": ("DARTSGRPOConfig",),
    "trl_darts/scheduling/settings.py": ("ScheduleSettings",),
    "trl/scripts/grpo.py": ("GRPOScriptArguments",),
    "trl/scripts/utils.py": ("ScriptArguments", "DatasetMixtureConfig"),
    "trl/trainer/grpo_config.py": ("GRPOConfig",),
    "trl/trainer/base_config.py": ("_BaseConfig",),
    "trl/trainer/model_config.py": ("ModelConfig",),
    "transformers/training_args.py": ("TrainingArguments",),
}


@cache
def field_names() -> frozenset[str]:
    """The fields of all these classes, as their sources declare them."""
    names = set()
    for file, classes in CLASSES.items():
        package, _, inner = file.partition("/")
        (root,) = find_spec(package).submodule_search_locations  # type: ignore[union-attr,misc]
        for node in ast.parse(Path(root, inner).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                fields = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
                names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return frozenset(name for name in names if not name.startswith("_"))


def check_command_line(words: Sequence[str]) -> None:
    """Refuses what is no field on a command line, or in the file of its `--config`."""
    words, path = split_command_line(words)
    if path is not None and "://" not in path:
        read_values(path)
    options = [*field_names(), *(f"no_{name}" for name in field_names()), "help"]
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        # The parser completes what is cut short.
        if word.startswith("--") and not any(option.startswith(name) for option in options):
            raise _no_field(name)


def split_command_line(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without `--config FILE`, and the file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        found, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigurationError("`--config` must be followed by a YAML file. Add it, or leave both out.") from error
    return others, found.config


def read_values(path: str | Path) -> dict[str, Any]:
    """The values in a YAML file, whose names must be fields. `env` holds variables of the environment."""
    values = read_yaml(path)
    for name, value in values.items():
        if name not in field_names() and not (name == "env" and isinstance(value, dict)):
            raise _no_field(name, f"{path}: ")
    return values


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. An error names the line, but not what is in it, which may be a secret."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"`file` ({str(path)!r}) must be a file that can be read: {reason}. Correct its path."
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        words = getattr(error, "problem", "it is nested too deeply") + (f" in line {mark.line + 1}" if mark else "")
        raise ConfigurationError(f"`file` ({str(path)!r}) must be plain YAML: {words}. Correct it there.") from error
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigurationError(f"`file` ({str(path)!r}) must be a YAML mapping of names to values.")
    return data


def _no_field(name: str, where: str = "") -> ConfigurationError:
    remedy = did_you_mean(name, sorted(field_names())) or " Take it out."
    return ConfigurationError(f"{where}`{name}` is no field of the script, the trainer or the model.{remedy}")
