"""Builds the settings that a comparison runs over: schedules, and all combinations of values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from types import NoneType
from typing import Any, get_args, get_type_hints

from ...errors import ConfigurationError, did_you_mean
from ...scheduling import SCHEDULES, ScheduleSettings
from ...scheduling.schedule_fields import OF_SELECTION, SCHEDULE_DEFAULTS
from ...scheduling.settings import Facts


# `schedule` has an option of its own, tail engines are not simulated here, and the others change what is learned.
UNSWEPT = (
    *("schedule", "mask_stale_after", "kv_after_update", "defer_unsettled_groups", "audit_share"),
    *("drop_uniform_groups", "max_prompt_oversampling", "skip_uniform_prompts", "tail_switch_at", "tail_share"),
)
OF_ANY_SCHEDULE = (
    *("num_generations", "rollout_ahead", "drop_uniform_groups", "max_prompt_oversampling"),
    *("tail_switch_at", "tail_share"),
)
_HINTS = get_type_hints(ScheduleSettings)
KINDS: dict[str, tuple[Any, ...]] = {
    field.name: get_args(_HINTS[field.name]) or (_HINTS[field.name],)
    for field in fields(ScheduleSettings)
    if field.name not in UNSWEPT
}
"""The settings that can be swept, with the types of their values."""


def parse_sweep(options: Sequence[str]) -> dict[str, list[Any]]:
    """Parses `NAME=VALUE,…` into values by setting."""
    sweep: dict[str, list[Any]] = {}
    for option in options:
        name, equals, values = option.partition("=")
        if not equals or name not in KINDS or name in sweep:
            raise ConfigurationError(
                f"`--sweep` ({option!r}) must be NAME=VALUE,…, each NAME once, and one of {', '.join(KINDS)}."
                f"{did_you_mean(name, KINDS.keys() - sweep)}"
            )
        sweep[name] = [_value(name, word.strip().lower()) for word in values.split(",")]
    return sweep


def _value(name: str, word: str) -> Any:
    kinds = KINDS[name]
    try:
        value = None if word == "none" else json.loads(word)
    except ValueError:
        value = word
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    if type(value) in kinds:
        return value
    if str in kinds:
        return word
    names = {int: "a whole number", float: "a number", NoneType: "none", bool: "true or false"}
    wanted = [text for kind, text in names.items() if kind in kinds]
    raise ConfigurationError(f"`--sweep {name}` ({word!r}) must be {' or '.join(wanted)}.")


def settings_of(
    schedules: Sequence[str], num_generations: int, sweep: Mapping[str, Sequence[Any]]
) -> dict[str, ScheduleSettings]:
    """
    Returns all settings of a comparison, by name. Each schedule takes the settings of the sweep that have an effect on
    it, and is not repeated for the others: `"grpo"`, for example, takes `num_generations` alone. Long answers are
    guarded as a trainer with an engine in its process does, unless `long_end_every` is swept.
    """
    if not schedules or (unknown := [name for name in schedules if name not in SCHEDULES]):
        raise ConfigurationError(
            f"`--schedule` ({', '.join(map(repr, unknown)) if schedules else 'empty'}) must be one or several of "
            f"{', '.join(map(repr, SCHEDULES))}.{did_you_mean(unknown[0], SCHEDULES) if schedules else ''}"
        )
    settings: dict[str, ScheduleSettings] = {}
    unused = {(name, value) for name, values in sweep.items() for value in values}
    for schedule in schedules:
        # "darts" always selects, so it skips `selection="all"` if there are other selections.
        choices = [
            [value for value in values if (schedule, name, value) != ("darts", "selection", "all")] or values
            for name, values in sweep.items()
        ]
        for values in product(*choices):
            given = dict(zip(sweep, values, strict=True))
            own = {name: value for name, value in given.items() if has_effect(name, schedule, given)}
            unused -= own.items()
            made = ScheduleSettings(schedule, **{"num_generations": num_generations, **own})
            if "long_end_every" not in own:
                made.resolve(Facts(no_deferral="a simulation, which has no rewards"))
                own |= {"long_end_every": made.long_end_every} if made.long_end_every else {}
            label = ", ".join([schedule, *(f"{name}={value}" for name, value in own.items())])
            settings.setdefault(label, made)
    if unused:
        name, value = min(unused, key=str)
        belongs_to = " or ".join(map(repr, SCHEDULE_DEFAULTS.get(name, ())))
        others = f", or add {belongs_to} to the schedules" if belongs_to else ""
        raise ConfigurationError(
            f"`--sweep` ({name}={value}) has no effect with `--schedule` ({', '.join(schedules)}) and the other "
            f"values. Leave it out{others}."
        )
    return settings


def has_effect(name: str, schedule: str, given: Mapping[str, Any]) -> bool:
    """Whether a setting changes what a schedule does, given the values of the others."""
    if name in OF_ANY_SCHEDULE:
        return True
    if name == "max_staleness":
        return given.get("rollout_ahead") == "continuous"
    if name in SCHEDULE_DEFAULTS or schedule == "grpo":
        return schedule in SCHEDULE_DEFAULTS.get(name, ())
    selection = given.get("selection") or SCHEDULES[schedule]
    if name == "selection":
        return (schedule, selection) != ("darts", "all")
    selects = schedule == "darts" or selection != "all"
    if name == "num_longest":
        return selects and selection != "uniform"
    if name == "length_ema":
        return selects or given.get("submit_order") != "arrival"
    return selects or name not in OF_SELECTION
