"""Types of published values: what `TrlParser` takes from a file is taken here, as what it stands for."""

from __future__ import annotations

from argparse import Action, ArgumentTypeError
from contextlib import suppress
from functools import cache
from typing import Any, get_type_hints

from huggingface_hub.dataclasses import type_validator

from ..errors import ConfigurationError
from .fields import LISTS_OR_NAMES, argument_classes


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
    if "float" in str(hint) and isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError):  # a word, such as "auto"
            value = float(value)
    try:
        if not _is_of(hint, name, value):
            value = _converted(name, value, action)
    except (ValueError, TypeError, ArgumentTypeError) as error:
        expected = getattr(hint, "__name__", str(hint)) if not hasattr(hint, "__args__") else str(hint)
        raise ConfigurationError(
            f"`{name}` ({str(value)[:60]!r}) must be of type {expected}, not {type(value).__name__}."
        ) from error
    if action.choices is not None and value is not None and value not in action.choices:
        choices = ", ".join(repr(getattr(choice, "value", choice)) for choice in action.choices)
        raise ConfigurationError(f"`{name}` ({str(value)[:60]!r}) must be one of {choices}.")
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
