"""
Which published config another one was made of, for the cards of what is trained with it.

Only `from_pretrained` makes both at once. A script's parser sees a file and no name, so the name waits here for the
first config that says what the published one says: no other takes it, and none takes it twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Announced:
    """
    A published config that a parser is about to read.

    Args:
        address (`str`):
            `hf://org/name@commit`.
        data (`dict[str, Any]`):
            Values by field name that the parsed config will have.
    """

    address: str
    data: dict[str, Any]


_announced: list[Announced] = []  # one at most


def announce(address: str, data: Mapping[str, Any], words: Iterable[str]) -> None:
    """
    Says that the next config to be parsed is a published one.

    Args:
        address (`str`):
            `hf://org/name@commit`.
        data (`Mapping[str, Any]`):
            What it says, by field name.
        words (`Iterable[str]`):
            Of the command line, whose options win over the config's.
    """
    options = tuple(
        word[2:].partition("=")[0].replace("-", "_")
        for word in words
        if re.match("--[a-z]", word)  # parsers take the beginning of a name too
    )
    kept = {name: value for name, value in data.items() if not name.startswith(options)}
    _announced[:] = [Announced(address, kept)]


def withdraw() -> None:
    """Forgets a config that was announced and that nobody parsed."""
    _announced.clear()


def claimed(fields: Mapping[str, Any]) -> str | None:
    """
    The announced config, if it is this one, and it is no longer announced then.

    Args:
        fields (`Mapping[str, Any]`):
            Of a config that is being made, by name, before it fills any in. Those of the script are not among them.

    Returns:
        `str` or `None`: `hf://org/name@commit`.
    """
    for found in _announced:
        if all(fields[name] == value for name, value in found.data.items() if name in fields):
            withdraw()
            return found.address
    return None
