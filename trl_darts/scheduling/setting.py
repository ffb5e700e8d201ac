"""A field of a config, as TRL declares its own, and the values that a config computes for fields that nobody set."""

from dataclasses import field
from typing import Any


def setting(default: Any, help: str) -> Any:
    """One with its help, which the command line and the documentation show."""
    return field(default=default, metadata={"help": help})


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
