"""
The fields of a training, from a file: what they are called, and which values they take.

They are those of the script's, the trainer's and the model's arguments. `TrlParser` converts strings and hands on
anything else as it is, whatever its type; here a value must be what it would be on a command line.
"""

from __future__ import annotations

import math
from argparse import Action, ArgumentTypeError
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

from huggingface_hub.dataclasses import type_validator

from .errors import ConfigurationError


# PEFT takes a name here as well.
LISTS_OR_NAMES = ("lora_target_modules", "lora_target_parameters")
# Its annotation says `str`, and TRL takes `true` for "group" and `false` for "none".
BOOLEANS_OR_NAMES = ("scale_rewards",)
# Infinity means something here: the norm of gradients is measured and nothing clipped, and ratios have no upper bound.
UNBOUNDED = ("max_grad_norm", "epsilon_high")


def argument_classes() -> list[Any]:
    """The script's, the trainer's and the model's arguments; loads TRL."""
    from trl import ModelConfig  # type: ignore[attr-defined]

    from .config import DARTSGRPOConfig
    from .recipes.arguments import ScriptArguments

    return [ScriptArguments, DARTSGRPOConfig, ModelConfig]


@cache
def known_fields() -> dict[str, Field[Any]]:
    """Fields of the three by name."""
    return {field.name: field for cls in argument_classes() for field in fields(cls)}


def default_of(field: Field[Any]) -> Any:
    """The value of a field that is left out."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def suggestions(name: str) -> str:
    """A question after the fields that an unknown name may stand for; empty where none is close."""
    close = get_close_matches(name, known_fields(), n=3)
    return f"Did you mean {' or '.join(f'`{other}`' for other in close)}?" if close else ""


def typed(name: str, value: Any) -> Any:
    """
    A value as its field has it.

    Args:
        name (`str`):
            A known field.
        value (`Any`):
            As it is in the file.

    Returns:
        `Any`: The same, with numbers as numbers: YAML takes `1e-6` for a string, and `1` for no float.

    Raises:
        [`ConfigurationError`]: If the field does not take it.
    """
    hint, action = hints()[name], _actions()[name]
    if isinstance(value, bool) and name in BOOLEANS_OR_NAMES:
        return value
    if "float" in str(hint) and isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError):  # a word, such as "auto"
            value = float(value)
    try:
        if not _is_of(hint, name, value):
            value = _converted(name, value, action)
    except (ValueError, TypeError, ArgumentTypeError) as error:
        expected = getattr(hint, "__name__", str(hint)) if not hasattr(hint, "__args__") else str(hint)
        is_no_list = action.nargs == "+" and not isinstance(value, dict | list | None)
        remedy = f"Put it in brackets: [{value!s:.60}]." if is_no_list else "Correct it, or leave the field out."
        raise ConfigurationError(
            f"`{name}` ({value!r:.60}) must be of type {expected}, not {type(value).__name__}. {remedy}"
        ) from error
    if action.choices is not None and value is not None and value not in action.choices:
        choices = ", ".join(repr(getattr(choice, "value", choice)) for choice in action.choices)
        raise ConfigurationError(f"`{name}` ({value!r:.60}) must be one of {choices}.")
    _check_finite(name, value)
    return value


@cache
def hints() -> dict[str, Any]:
    """The annotation of each field by name. The fields' own types won't do: a parser that is built changes those."""
    return {name: hint for cls in argument_classes() for name, hint in get_type_hints(cls).items()}


@cache
def _actions() -> dict[str, Action]:
    """What the command line makes of each field."""
    from trl.scripts.utils import TrlParser

    # `--no_x` comes after `--x`.
    return {action.dest: action for action in reversed(TrlParser(argument_classes())._actions)}


def _check_finite(name: str, value: Any) -> None:
    """YAML has `.inf` and `.nan`, with which a training breaks once it runs, or learns nothing."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number) and not (number > 0 and name in UNBOUNDED):
            raise ConfigurationError(f"`{name}` ({value!r:.60}) must be finite. Correct it, or leave the field out.")


def _is_of(hint: Any, name: str, value: Any) -> bool:
    try:
        type_validator(name, value, hint)
    except TypeError:
        return False
    return True


def _converted(name: str, value: Any, action: Action) -> Any:
    if isinstance(value, list) and action.nargs == "+":
        return [_item(item, action) for item in value]
    if action.nargs == "+" and not (isinstance(value, str) and name in LISTS_OR_NAMES):
        raise TypeError
    return _item(value, action)


def _item(value: Any, action: Action) -> Any:
    # A boolean is YAML's `no` or `off`, which is not that word any more.
    if value is None or isinstance(value, bool | dict | list) or not callable(action.type):
        raise TypeError
    return action.type(str(value))
