"""Which settings a comparison runs over: schedules, and all combinations of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from ..errors import ConfigurationError
from ..scheduling import SCHEDULES, ScheduleSettings


TYPES: dict[str, type] = {
    "num_generations": int,
    "max_num_generations": int,
    "target_redundancy": float,
    "redundancy_cost_weight": float,
    "length_ema": float,
    "num_longest": int,
    "tail_pruning": bool,
    "long_end_patience": float,
}
OPTIONAL = frozenset({"redundancy_cost_weight", "long_end_patience"})
SHARED = frozenset({"num_generations"})
"""Settings that mean something to every schedule."""

_WORDS = {"true": True, "false": False}


def parse_sweep(options: Sequence[str]) -> dict[str, list[Any]]:
    """
    Reads settings and their values.

    Args:
        options (`Sequence[str]`):
            Such as `"max_num_generations=10,12"`; `"none"` stands for `None`.

    Returns:
        `dict[str, list]`: Values by name.

    Raises:
        [`ConfigurationError`]: If a name is unknown or given twice, or a value is none of its type.
    """
    sweep: dict[str, list[Any]] = {}
    for option in options:
        name, equals, values = option.partition("=")
        if not equals or name not in TYPES or name in sweep:
            raise ConfigurationError(
                f"`--sweep` ({option!r}) must be NAME=VALUE,…, each NAME once, and one of {', '.join(TYPES)}."
            )
        sweep[name] = [_value(name, word.strip()) for word in values.split(",")]
    return sweep


def _value(name: str, word: str) -> Any:
    kind = TYPES[name]
    try:
        if word.lower() == "none" and name in OPTIONAL:
            return None
        return _WORDS[word.lower()] if kind is bool else kind(word)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        more = " or none" if name in OPTIONAL else ""
        raise ConfigurationError(f"`--sweep {name}` ({word!r}) must be {expected}{more}.") from None


def settings_of(
    schedules: Sequence[str], num_generations: int, sweep: Mapping[str, Sequence[Any]]
) -> dict[str, ScheduleSettings]:
    """
    All settings of a comparison.

    Args:
        schedules (`Sequence[str]`):
            Names; the first one's first setting is the baseline.
        num_generations (`int`):
            M, where it is not swept.
        sweep (`Mapping[str, Sequence]`):
            Values by name. `"grpo"` takes `num_generations` alone, so it is not repeated for the others.

    Returns:
        `dict[str, ScheduleSettings]`: By a name that says what is special about each.

    Raises:
        [`ConfigurationError`]: If a schedule is unknown, none is given, or a combination can't work.
    """
    if not schedules or (unknown := [name for name in schedules if name not in SCHEDULES]):
        raise ConfigurationError(
            f"`--schedule` ({', '.join(map(repr, unknown)) if schedules else 'empty'}) must be one or several of "
            f"{', '.join(map(repr, SCHEDULES))}."
        )
    known = {field.name for field in fields(ScheduleSettings)}
    assert known >= set(TYPES)
    settings: dict[str, ScheduleSettings] = {}
    for schedule in schedules:
        names = [name for name in sweep if schedule != "grpo" or name in SHARED]
        for values in product(*(sweep[name] for name in names)):
            chosen = {"num_generations": num_generations, **dict(zip(names, values, strict=True))}
            label = ", ".join([schedule, *(f"{name}={value}" for name, value in zip(names, values, strict=True))])
            settings[label] = ScheduleSettings(schedule, **chosen)
    return settings
