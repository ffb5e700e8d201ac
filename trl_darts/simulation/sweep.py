"""Which settings a comparison runs over: schedules, and all combinations of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from ..errors import ConfigurationError
from ..scheduling import SCHEDULES, ScheduleSettings
from ..scheduling.policies import SELECTIONS
from ..scheduling.settings import SCHEDULE_DEFAULTS, SORTED_MODES


# The kind of a value: a type, or the words to choose from.
TYPES: dict[str, type | tuple[str, ...]] = {
    "num_generations": int,
    "max_num_generations": int,
    "target_redundancy": float,
    "redundancy_cost_weight": float,
    "length_ema": float,
    "num_longest": int,
    "tail_pruning": bool,
    "long_end_patience": float,
    "selection": SELECTIONS,
    "prompt_oversampling": float,
    "max_partial_age": int,
    "sorted_group_batches": int,
    "sorted_mode": SORTED_MODES,
    "length_ranked": bool,
    "num_long_servers": int,
    "long_share": float,
}
WORDS = {"redundancy_cost_weight": ("none",), "long_end_patience": ("auto", "none")}
"""What a number may also be."""

# Settings that mean something only where more is sampled of a prompt than is kept.
_REDUNDANCY = ("target_redundancy", "redundancy_cost_weight")
_SELECTING = frozenset({*_REDUNDANCY, "max_num_generations", "num_longest", "tail_pruning", "long_end_patience"})
_TRUTH = {"true": True, "false": False}


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
    kind, others, word = TYPES[name], WORDS.get(name, ()), word.lower()
    if isinstance(kind, tuple):
        others, kind = kind, str
    if word in others:
        return None if word == "none" else word
    try:
        if kind is not str:
            return _TRUTH[word] if kind is bool else kind(word)
    except (KeyError, ValueError):
        pass
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: ""}[kind]
    choices = " or ".join(part for part in (expected, *others) if part)
    raise ConfigurationError(f"`--sweep {name}` ({word!r}) must be {choices}.")


def settings_of(
    schedules: Sequence[str], num_generations: int, sweep: Mapping[str, Sequence[Any]]
) -> dict[str, ScheduleSettings]:
    """
    All settings of a comparison. Each schedule takes those settings of the sweep that mean something to it, and is not
    repeated for the others: `"grpo"`, for one, takes `num_generations` alone.

    Args:
        schedules (`Sequence[str]`):
            Names; the first one's first setting is the baseline.
        num_generations (`int`):
            M, where it is not swept.
        sweep (`Mapping[str, Sequence]`):
            Values by name.

    Returns:
        `dict[str, ScheduleSettings]`: By a name that says what is special about each.

    Raises:
        [`ConfigurationError`]: If a schedule is unknown, none is given, a combination can't work, or a value means
            nothing to any of the schedules.
    """
    if not schedules or (unknown := [name for name in schedules if name not in SCHEDULES]):
        raise ConfigurationError(
            f"`--schedule` ({', '.join(map(repr, unknown)) if schedules else 'empty'}) must be one or several of "
            f"{', '.join(map(repr, SCHEDULES))}."
        )
    settings: dict[str, ScheduleSettings] = {}
    idle = {(name, value) for name, values in sweep.items() for value in values}
    for schedule in schedules:
        # "darts" always selects: of several selections, it takes the others.
        choices = [
            [value for value in values if (schedule, name, value) != ("darts", "selection", "all")] or values
            for name, values in sweep.items()
        ]
        for values in product(*choices):
            given = dict(zip(sweep, values, strict=True))
            own = {name: value for name, value in given.items() if _means_something(name, schedule, given)}
            idle -= own.items()
            label = ", ".join([schedule, *(f"{name}={value}" for name, value in own.items())])
            if label not in settings:
                settings[label] = ScheduleSettings(schedule, **{"num_generations": num_generations, **own})
    if idle:
        name, value = min(idle, key=str)
        remedy = "Leave it out"
        if name in SCHEDULE_DEFAULTS:
            remedy += f", or add {' or '.join(map(repr, SCHEDULE_DEFAULTS[name]))} to the schedules"
        raise ConfigurationError(
            f"`--sweep` ({name}={value}) has no effect with `--schedule` ({', '.join(schedules)}) and the other "
            f"values. {remedy}."
        )
    return settings


def _means_something(name: str, schedule: str, given: Mapping[str, Any]) -> bool:
    """Whether a value that is given changes what a schedule does, beside the other values."""
    if name == "num_generations":
        return True
    if schedule == "grpo":
        return False
    if name == "selection":
        return not (schedule == "darts" and given[name] == "all")
    if name in SCHEDULE_DEFAULTS:
        return schedule in SCHEDULE_DEFAULTS[name]
    selection = given.get("selection", SCHEDULES[schedule])
    selects = schedule == "darts" or selection != "all"
    return selects if name in _SELECTING else True
