"""
Names of the fields that a training takes, and the YAML files that set them. Neither torch nor TRL is imported, which
takes seconds: a typo is told at once.
"""

import argparse
import ast
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import yaml

from .errors import ConfigurationError, did_you_mean
from .resume import checkpoint_to_resume
from .settings import RolloutSettings


# The classes of `analysis.recipe.ARGUMENTS` and those that they extend, by file; what extends comes first.
CLASSES = {
    "trl_darts/analysis/recipe.py": ("ScriptArguments",),
    "trl_darts/settings.py": ("RolloutSettings",),
    "trl_darts/server_fields.py": ("ServerFields",),
    "trl_darts/scheduling/settings.py": ("ScheduleSettings",),
    "trl_darts/scheduling/batch_settings.py": ("BatchSettings",),
    "trl/scripts/grpo.py": ("GRPOScriptArguments",),
    "trl/scripts/utils.py": ("ScriptArguments", "DatasetMixtureConfig"),
    "trl/trainer/grpo_config.py": ("GRPOConfig",),
    "trl/trainer/base_config.py": ("_BaseConfig",),
    "trl/trainer/model_config.py": ("ModelConfig",),
    "transformers/training_args.py": ("TrainingArguments",),
}
DEFAULT_OUTPUT = "trainer_output"  # of TRL
MADE_DATASET = "tiny_reasoner"  # that of examples/tiny_reasoner, which is made and not loaded
OVERLONG = "get_soft_overlong_punishment"
MATH_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward")
REWARDS = (*MATH_REWARDS, "think_format_reward", OVERLONG)  # those that TRL's script knows by name


@cache
def field_defaults() -> dict[str, Any]:
    """Their defaults, as their sources declare them; without those that are computed."""
    return {name: value for name, value in _declared().items() if value is not MISSING}


@cache
def field_names() -> frozenset[str]:
    """The fields of all these classes, as their sources declare them."""
    return frozenset(_declared())


@cache
def _declared() -> dict[str, Any]:
    declared: dict[str, Any] = {}
    for file, classes in CLASSES.items():
        package, _, inner = file.partition("/")
        (root,) = find_spec(package).submodule_search_locations  # type: ignore[union-attr,misc]
        nodes = ast.parse(Path(root, inner).read_text(encoding="utf-8")).body
        for node in (node for node in nodes if isinstance(node, ast.ClassDef) and node.name in classes):
            for line in (line for line in node.body if isinstance(line, ast.AnnAssign)):
                if isinstance(line.target, ast.Name) and not line.target.id.startswith("_"):
                    declared.setdefault(line.target.id, _default(line.value))
    return declared


def _default(value: ast.expr | None) -> Any:
    """Of a field, which may be wrapped in a call."""
    if isinstance(value, ast.Call):
        named = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        value = (named or value.args or [None])[0]  # type: ignore[list-item]
    try:
        return MISSING if value is None else ast.literal_eval(value)
    except ValueError:
        return MISSING


def check_command_line(words: Sequence[str]) -> None:
    """
    Refuses what is no field on a command line, or in the file of its `--config`, values that can't work, and a
    checkpoint that is not there. What TRL computes of several fields is checked when the config is made, and types by
    the parser.
    """
    words, path = split_command_line(words)
    is_remote = path is not None and "://" in path
    values = read_values(path) if path is not None and not is_remote else {}
    values |= _read_words(words)
    if not is_remote:
        check_values(values, int(os.environ.get("WORLD_SIZE", "1")))
        checkpoint_to_resume(values.get("resume_from_checkpoint"), values.get("output_dir") or DEFAULT_OUTPUT)


def print_own_fields() -> None:
    """The help of the fields that are not TRL's. That of `--help` has over 300 of others."""
    parser = argparse.ArgumentParser(usage="train_grpo.py --FIELD VALUE …", add_help=False)
    for own in sorted(fields(RolloutSettings), key=lambda own: own.name):
        text = f"{own.metadata['help']} [{own.default!r}]".replace("%", "%%")
        parser.add_argument(f"--{own.name}", help=text, metavar="")
    parser.print_help()


def check_values(given: Mapping[str, Any], num_processes: int) -> None:
    """With the config's own checks, on an object that has the fields they read."""
    defaults, values = field_defaults(), {name: _number(value) for name, value in given.items()}
    numbers = {name: value for name, value in values.items() if type(defaults.get(name)) in (int, float)}
    if any(isinstance(value, bool) for value in numbers.values()):
        return  # Python would count with it; the parser refuses its type
    settings = object.__new__(_Words)
    for name, value in {**defaults, **values}.items():
        setattr(settings, name, value)
    for check in (
        settings.check,
        settings.check_start,
        lambda: settings.check_batch(num_processes),
        lambda: check_script(settings),
    ):
        with suppress(TypeError, AttributeError):  # of other types, which are the parser's to refuse
            check()


class _Words(RolloutSettings):
    """The fields as a command line or a file has them, whose words the parser has yet to convert."""

    def check_types(self) -> None:
        """The parser refuses what it can't convert."""


def check_script(arguments: Any) -> None:
    """Refuses arguments of the script: prompts of a data set that is not made, and rewards that nobody knows."""
    count, rewards = arguments.num_prompts, arguments.reward_funcs or []
    if count is not None and (count < 1 or arguments.dataset_name != MADE_DATASET):
        raise ConfigurationError(
            f"`num_prompts` ({count}) must be at least 1, and is only for `dataset_name` {MADE_DATASET!r}, which is "
            "made. Leave it out."
        )
    names = [rewards] if isinstance(rewards, str) else rewards
    unknown = [name for name in names if name not in REWARDS and not _is_import_path(name)]
    if unknown:
        raise ConfigurationError(
            f"`reward_funcs` ({unknown}) must be among {', '.join(REWARDS)}, or import paths such as "
            "'my_package.rewards.my_reward'. Correct them."
        )


def _is_import_path(name: str) -> bool:
    return "." in name and all(part.isidentifier() for part in name.split("."))


def _number(value: Any) -> Any:
    """YAML takes 1e-6 for a word."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _read_words(words: Sequence[str]) -> dict[str, Any]:
    """What a command line gives each field. As TRL's parser, it completes names that are cut short."""
    parser = RaisingParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="store_true")
    for name in field_names():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="*", dest=name)
        parser.add_argument(f"--no_{name}", action="store_const", const=False, dest=name)
    found, others = parser.parse_known_args(words)
    for word in others:
        if word.startswith("--"):
            raise _no_field(word.removeprefix("--").partition("=")[0].replace("-", "_"))
    values = {name: _of_words(value) if isinstance(value, list) else value for name, value in vars(found).items()}
    return {name: value for name, value in values.items() if name != "help"}


def _of_words(words: list[str]) -> Any:
    if len(words) > 1:
        return words
    return yaml.safe_load(words[0]) if words else True


class RaisingParser(argparse.ArgumentParser):
    """One whose errors are raised: it would print them below pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message[:1].upper()}{message[1:]}. Correct it; `--help` lists the arguments.")


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
