"""
How a config declares a field: its help, its type, the rule that its values follow, and the mark of a default that was
computed.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import ConfigurationError, did_you_mean


def setting(default: Any, help: str) -> Any:
    """Declares a field with its help text, which the command line and the documentation show."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Rule:
    """What a value must be. It stands in a field's annotation: `share: Annotated[float, Rule(...)]`."""

    allows: Callable[[Any], bool]
    text: str  # follows "must be"
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raises [`ConfigurationError`] if the value is not allowed."""
        if not self.allows(value):
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
    Raises [`ConfigurationError`] if a field that one of the dataclasses `declared` adds has a value of another type,
    or one that breaks its rule. NumPy scalars and paths are replaced by Python's numbers and strings, because config
    files hold nothing else.
    """
    for cls in declared:
        for name, kinds, rule in _fields(cls):
            value = _check_type(config, name, kinds)
            if rule is not None and value is not None:
                rule.check(name, value)


def check_types(config: Any, cls: type, names: Iterable[str]) -> None:
    """Checks types as [`check_fields`] does, of fields of TRL's `cls`, any of which may be `None`."""
    for name in names:
        if getattr(config, name) is not None:
            _check_type(config, name, _kinds(_hints(cls)[name]))


def _check_type(config: Any, name: str, kinds: tuple[type, ...]) -> Any:
    given = getattr(config, name)
    value = given.item() if isinstance(given, np.generic) else given
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    numbers = (int,) if float in kinds else ()
    if not isinstance(value, kinds + numbers) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(dict.fromkeys("None" if kind is NoneType else kind.__name__ for kind in kinds))
        raise ConfigurationError(f"`{name}` ({given!r:.60}) must be of type {names}. Correct it, or leave it out.")
    if value is not given:
        setattr(config, name, value)
    return value


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes of an annotation: `dict` and `str` of `dict[str, Any] | str`."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(get_origin(part) or part for part in parts)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _fields(cls: type) -> list[tuple[str, tuple[type, ...], Rule | None]]:
    """
    Name, types and rule of each field that a class itself declares. `dataclasses.fields` would not do: building a
    parser changes the types there.
    """
    found = []
    hints = get_type_hints(cls, include_extras=True)
    for name in cls.__annotations__:
        kind, rule = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name], None)
        kinds = _kinds(kind)
        if getattr(cls, name) is None:
            kinds += (NoneType,)  # also where the annotation is that of the value that is filled in
        found.append((name, kinds, rule))
    return found


class FilledIn:
    """
    Marks a value that a config has computed for a field that nobody set. `dataclasses.replace` passes the values of
    all fields on: those with this mark are computed again.
    """


class _Int(FilledIn, int): ...


class _Float(FilledIn, float): ...


class _Str(FilledIn, str): ...


_MARKED: dict[type, type] = {int: _Int, float: _Float, str: _Str}


def filled_in(value: Any) -> Any:
    """The value with the mark. Values that are neither numbers nor strings stay as they are."""
    return _MARKED.get(type(value), lambda same: same)(value)


def unmarked(value: Any) -> Any:
    """The value without the mark. YAML's safe dumper only knows plain types."""
    plain = next((plain for plain, marked in _MARKED.items() if type(value) is marked), None)
    return value if plain is None else plain(value)
