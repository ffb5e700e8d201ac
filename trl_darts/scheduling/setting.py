"""
A field of a config, as TRL declares its own, with the check of its type, and the values that a config computes for
fields that nobody set.
"""

import os
from dataclasses import field, fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from ..errors import ConfigurationError


def setting(default: Any, help: str) -> Any:
    """One with its help, which the command line and the documentation show."""
    return field(default=default, metadata={"help": help})


def check_types(config: Any, declared: type) -> None:
    """
    Raises [`ConfigurationError`] if a field of the dataclass `declared` has a value of another type than declared.
    NumPy scalars and paths are replaced by Python's numbers and text, which is what files have.
    """
    hints = _hints(declared)
    for own in fields(declared):
        given = getattr(config, own.name)
        value = _plain(given)
        kinds = get_args(hints[own.name]) or (hints[own.name],)
        if own.default is None:
            kinds += (NoneType,)  # also where a value is filled in, and the field's type does not say so
        numbers = (int,) if float in kinds else ()
        if not isinstance(value, kinds + numbers) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(dict.fromkeys("None" if kind is NoneType else kind.__name__ for kind in kinds))
            raise ConfigurationError(
                f"`{own.name}` ({given!r:.60}) must be of type {names}. Correct it, or leave it out."
            )
        if value is not given:
            setattr(config, own.name, value)


_hints = cache(get_type_hints)  # the fields' own types won't do: a parser that is built changes those


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class FilledIn:
    """
    Marks a value that a config has computed for a field that nobody set. `dataclasses.replace` hands on the values of
    all fields: those with this mark are computed again.
    """


class _Int(FilledIn, int): ...


class _Float(FilledIn, float): ...


class _Str(FilledIn, str): ...


_MARKED: dict[type, type] = {int: _Int, float: _Float, str: _Str}


def filled_in(value: Any) -> Any:
    """A value with the mark. Others than numbers and text stay as they are."""
    return _MARKED.get(type(value), lambda same: same)(value)


def unmarked(value: Any) -> Any:
    """A value without the mark, for files: YAML's safe dumper knows plain types alone."""
    plain = next((plain for plain, marked in _MARKED.items() if type(value) is marked), None)
    return value if plain is None else plain(value)
