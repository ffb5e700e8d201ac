"""
Declares fields of a config with their help, type and rule, and the conflicts between fields. Marks defaults that were
computed.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import ConfigurationError, did_you_mean


def setting(default: Any, help: str) -> Any:
    """Declares a field with its help text for the command line and the documentation."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Rule:
    """Rule for the values of a field, given in its annotation: `share: Annotated[float, Rule(...)]`."""

    allows: Callable[[Any], bool]
    text: str  # follows "must be"
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raises [`ConfigurationError`] if the value is not allowed, or can't be compared."""
        with suppress(TypeError, ValueError):
            if self.allows(value):
                return
        remedy = did_you_mean(value, self.choices) if self.choices else " Correct it, or leave it unset."
        raise ConfigurationError(f"`{name}` ({value!r}) must be {self.text}.{remedy}")


def one_of(choices: Iterable[str]) -> Rule:
    choices = tuple(choices)
    return Rule(choices.__contains__, f"one of {', '.join(map(repr, choices))}", choices)


def at_least(least: int) -> Rule:
    return Rule(lambda value: value >= least, f"at least {least}")


POSITIVE = Rule(lambda value: value > 0, "positive")
FINITE = Rule(math.isfinite, "finite")


def check_fields(config: Any, *declared: type) -> None:
    """
    Raises [`ConfigurationError`] if a field of the dataclasses `declared`, without those of their bases, has a value
    of another type, or one that breaks its rule. Replaces NumPy scalars and paths by Python's numbers and strings, so
    that the config can be saved.
    """
    for cls in declared:
        for name, kinds, rule in _fields(cls):
            value = checked_type(name, getattr(config, name), kinds)
            setattr(config, name, value)
            if rule is not None and (value is not None or getattr(cls, name) is not None):
                rule.check(name, value)


def check_types(config: Any, cls: type, names: Iterable[str]) -> None:
    """Checks types as [`check_fields`] does, of fields of TRL's `cls`, any of which may be `None`."""
    for name in names:
        if getattr(config, name) is not None:
            setattr(config, name, checked_type(name, getattr(config, name), kinds_of(_hints(cls)[name])))


def checked_type(name: str, given: Any, kinds: tuple[type, ...]) -> Any:
    """Returns a value as one of Python's types, or raises [`ConfigurationError`] if it is of none of `kinds`."""
    value = given.item() if isinstance(given, np.generic) else given
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    numbers = (int,) if float in kinds else ()
    if not isinstance(value, kinds + numbers) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(dict.fromkeys("None" if kind is NoneType else kind.__name__ for kind in kinds))
        raise ConfigurationError(f"`{name}` ({given!r:.60}) must be of type {names}. Correct it, or leave it out.")
    return value


def kinds_of(hint: Any) -> tuple[type, ...]:
    """Returns the classes of an annotation: `dict` and `str` of `dict[str, Any] | str`."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(
        type(get_args(part)[0]) if get_origin(part) is Literal else get_origin(part) or part for part in parts
    )


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _fields(cls: type) -> list[tuple[str, tuple[type, ...], Rule | None]]:
    """
    Returns name, types and rule of each field that a class itself declares. `dataclasses.fields` can't be used,
    because building a parser changes the types there.
    """
    found = []
    hints = get_type_hints(cls, include_extras=True)
    for name in cls.__annotations__:
        kind, rule = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name], None)
        kinds = kinds_of(kind)
        if getattr(cls, name) is None:
            kinds += (NoneType,)  # the annotation may be that of the computed value
        found.append((name, kinds, rule))
    return found


@dataclass(frozen=True)
class Conflict:
    """
    Fields, separated by spaces, whose values can't work with others. In `rule`, which follows a field and its value,
    `{other}` stands for another field with its value, or for a property.
    """

    fields: str
    when: Callable[[Any], object]  # of the config
    rule: str
    remedy: str = "Leave it unset, or change the other."

    def errors(self, config: Any) -> Iterator[str]:
        """Yields an error for each field that was set. A value that is computed, off or the default can't be wrong."""
        for name in self.fields.split():
            value = getattr(config, name)
            is_set = value not in (config.__dataclass_fields__[name].default, None, "") and value is not False
            if is_set and not isinstance(value, FilledIn) and self.when(config):
                others = {other: _shown(config, other) for _, other, _, _ in Formatter().parse(self.rule) if other}
                yield f"{_shown(config, name)} {self.rule.format(**others)}. {self.remedy}"


def check_conflicts(config: Any, table: Iterable[Conflict]) -> None:
    """Raises [`ConfigurationError`] for the first conflict in a config."""
    for message in (message for row in table for message in row.errors(config)):
        raise ConfigurationError(message)


def _shown(config: Any, name: str) -> str:
    value = getattr(config, name)
    return f"`{name}` ({value!r:.200})" if name in config.__dataclass_fields__ else str(value)


class FilledIn:
    """
    Marks a value that a config computed for an unset field. `dataclasses.replace` passes the values of all fields;
    marked ones are computed again.
    """


class _Int(FilledIn, int): ...


class _Float(FilledIn, float): ...


class _Str(FilledIn, str): ...


_MARKED: dict[type, type] = {int: _Int, float: _Float, str: _Str}


def filled_in(value: Any) -> Any:
    """Returns a number or a string with the mark, and other values unchanged."""
    return _MARKED.get(type(value), lambda same: same)(value)


def unmarked(value: Any) -> Any:
    """Returns the value without the mark, because YAML's safe dumper only accepts plain types."""
    plain = next((plain for plain, marked in _MARKED.items() if type(value) is marked), None)
    return value if plain is None else plain(value)
