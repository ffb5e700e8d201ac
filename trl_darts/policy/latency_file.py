"""
Files of latency models: JSON with a `kind` and a `version`.

`trl-darts profile` writes one file that holds a curve and a surface as entries. Each model reads its own file, and its
entry of a profile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trl_darts.errors import ConfigurationError


T = TypeVar("T")

PROFILE_KIND = "latency_profile"
PROFILE_VERSION = 1


def check_kind(data: Any, noun: str, kind: str, version: int) -> None:
    """
    Refuses data that describe something else.

    Args:
        data (`Any`):
            What a file held.
        noun (`str`):
            What it should be, for the message.
        kind (`str`):
            Expected entry `kind`.
        version (`int`):
            Expected entry `version`.

    Raises:
        [`ConfigurationError`]: If `data` are not a mapping with these entries.
    """
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"A {noun} must be a mapping, and this is {type(data).__name__}.")
    for key, expected in (("kind", kind), ("version", version)):
        if data.get(key) != expected:
            raise ConfigurationError(f"`{key}` ({data.get(key)!r}) of a {noun} must be {expected!r}.")


def read(path: str | os.PathLike[str], noun: str, entry: str | None, parse: Callable[[Any], T]) -> T:
    """
    Reads a model from its own file or from a profile.

    Args:
        path (`str` or `os.PathLike`):
            The file.
        noun (`str`):
            What it should hold, for the message.
        entry (`str`, *optional*):
            Where a profile holds the model. `None` for a profile itself.
        parse (`Callable`):
            Turns the JSON into the model.

    Returns:
        `T`: What `parse` returned.

    Raises:
        [`ConfigurationError`]: If the file is missing or does not hold the model. Names the path and the remedy.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if entry is not None and isinstance(data, Mapping) and data.get("kind") == PROFILE_KIND:
            data = _entry(data, noun, entry)
        return parse(data)
    except (OSError, ValueError) as error:  # a `ConfigurationError` and a `JSONDecodeError` are `ValueError`s
        raise ConfigurationError(
            f"`path` ({os.fspath(path)!r}) must name a JSON file with a {noun}, and reading it failed: {error} Write "
            "one with `trl-darts profile`."
        ) from error


def write(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Writes JSON that people can read."""
    Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _entry(profile: Mapping[str, Any], noun: str, entry: str) -> Any:
    check_kind(profile, "latency profile", PROFILE_KIND, PROFILE_VERSION)
    if profile.get(entry) is None:
        why = " It was measured with one context length, and a surface needs two." if entry == "surface" else ""
        raise ConfigurationError(f"This profile holds no {noun}.{why}")
    return profile[entry]
