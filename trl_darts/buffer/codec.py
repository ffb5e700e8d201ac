"""Rows of a data set as JSON, for the prompts in a checkpoint. Arrays of a formatted data set keep their type."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import StateMismatchError


SAVED = ("null", "bool", "int", "uint", "float", "string", "large_string")  # beginnings of names of Arrow's types
# Keys that tell what an object of the JSON was.
TORCH, NUMPY, PAIRS = MARKS = ("__torch__", "__numpy__", "__pairs__")


def encode(value: Any) -> bytes:
    """Returns a value as JSON. Raises `TypeError` if it can't be saved."""
    return json.dumps(_escaped(value), default=_default).encode()


def decode(data: bytes) -> Any:
    return json.loads(data, object_hook=_from_json)


def _escaped(value: Any) -> Any:
    """Writes dictionaries as pairs if a key of theirs is one of the marks."""
    if isinstance(value, dict):
        own = {key: _escaped(inner) for key, inner in value.items()}
        return own if own.keys().isdisjoint(MARKS) else {PAIRS: [list(pair) for pair in own.items()]}
    return [_escaped(inner) for inner in value] if isinstance(value, list | tuple) else value


def _default(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {TORCH: str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return {NUMPY: value.dtype.str, "values": value.tolist()}
    raise StateMismatchError(
        f"A checkpoint can't hold the {type(value).__name__} of the data set that its rollout buffer has: "
        f"{value!r:.200}. Convert that column to text or numbers, or set `save_strategy='no'`."
    )


def _from_json(saved: dict[str, Any]) -> Any:
    if (name := saved.get(TORCH)) is not None:
        return torch.tensor(saved["values"], dtype=getattr(torch, name))
    if (name := saved.get(NUMPY)) is not None:
        array = np.array(saved["values"], name)
        return array if array.ndim else array[()]
    return dict(saved[PAIRS]) if PAIRS in saved else saved


def unsaved(row: Mapping[str, Any], features: Mapping[str, Any] | None = None) -> str | None:
    """
    Returns the column of a row that checkpoints can't save, with its type, or `None` if they can save all. The
    `features` of a data set tell what other rows have.
    """
    for column, feature in (features or {}).items():
        if (kind := _unsaved_type(feature)) is not None:
            return f"the column {column!r} ({kind})"
    for column, value in row.items():
        try:
            encode(value)
        except (StateMismatchError, TypeError, ValueError):
            return f"the column {column!r} ({type(value).__name__})"
    return None


def _unsaved_type(feature: Any) -> str | None:
    """Returns the type of a feature, or of a part of it, that JSON can't hold."""
    if isinstance(feature, Mapping):
        parts = list(feature.values())
    elif isinstance(feature, list):
        parts = feature
    elif (inner := getattr(feature, "feature", None)) is not None:  # a list
        parts = [inner]
    else:
        dtype = str(getattr(feature, "dtype", "null"))
        is_saved = dtype.startswith(SAVED) or dtype in ("dict", "list")
        return None if is_saved else dtype
    return next(filter(None, map(_unsaved_type, parts)), None)
