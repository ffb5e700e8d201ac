"""What settings of a schedule can't be, alone or together. Each refusal names the setting, its value and a remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .policies import AUTO
from .schedules import SCHEDULES, SELECTIONS, check_choice


if TYPE_CHECKING:
    from .settings import ScheduleSettings

SORTED_MODES = ("on_policy", "partial", "post_hoc")
SORTED_ORDERS = ("shortest", "longest", "arrival")
# Settings that mean something with some schedules only.
BELONGS_TO = {
    "prompt_oversampling": ("tail_batching", "partial_rollout"),
    "max_partial_age": ("partial_rollout",),
    "mask_stale_after": ("partial_rollout", "sorted"),
    "sorted_group_batches": ("sorted",),
    "sorted_mode": ("sorted",),
    "sorted_grouped": ("sorted",),
    "sorted_order": ("sorted",),
}


def check_schedule(settings: ScheduleSettings) -> None:
    """
    Refuses unknown names, and settings that another schedule would ignore. Called before defaults are filled in.

    Args:
        settings ([`ScheduleSettings`]):
            As given.

    Raises:
        [`ConfigurationError`]: Names the setting.
    """
    check_choice("schedule", settings.schedule, SCHEDULES)
    if settings.num_generations < 1:
        raise ConfigurationError(f"`num_generations` ({settings.num_generations}) must be at least 1.")
    for name, schedules in BELONGS_TO.items():
        value = getattr(settings, name)
        if value is not None and settings.schedule not in schedules:
            raise ConfigurationError(
                f"`{name}` ({value!r}) has no effect with `schedule` ({settings.schedule!r}). Leave it unset, or set "
                f"`schedule` to {' or '.join(map(repr, schedules))}."
            )


def check_settings(settings: ScheduleSettings) -> None:
    """
    Refuses settings that can't work.

    Args:
        settings ([`ScheduleSettings`]):
            With its defaults filled in.

    Raises:
        [`ConfigurationError`]: Names the setting, its value, the rule and a remedy.
    """
    _check_selection(settings)
    _check_wait(settings)
    _check_budget(settings)
    _check_rounds(settings)


def _check_selection(settings: ScheduleSettings) -> None:
    schedule, selection = settings.schedule, settings.selection
    check_choice("selection", selection, SELECTIONS)
    if (schedule == "grpo") != (selection == "all") and schedule in ("grpo", "darts"):
        other = {"grpo": "darts", "darts": "grpo"}[schedule]
        raise ConfigurationError(
            f"`selection` ({selection!r}) does not go with `schedule` ({schedule!r}), which "
            f"{'keeps all that it samples' if schedule == 'grpo' else 'samples more than it keeps'}. Set "
            f"`schedule={other!r}`, or leave `selection` unset."
        )
    if settings.max_num_generations < settings.num_generations:
        raise ConfigurationError(
            f"`max_num_generations` ({settings.max_num_generations}) must be at least `num_generations` "
            f"({settings.num_generations}). Raise it, or leave it unset for 2 × `num_generations`."
        )
    if not 0 <= settings.num_longest < settings.num_generations:
        raise ConfigurationError(
            f"`num_longest` ({settings.num_longest}) must be at least 0 and less than `num_generations` "
            f"({settings.num_generations}): the other rows are the shortest ones. The paper uses 1."
        )


def _check_wait(settings: ScheduleSettings) -> None:
    patience = settings.long_end_patience
    if isinstance(patience, str) and patience != AUTO:
        raise ConfigurationError(f"`long_end_patience` ({patience!r}) must be a number, 'auto' or None.")
    if patience is not None and patience != AUTO and not patience >= 1:
        raise ConfigurationError(
            f"`long_end_patience` ({patience}) must be at least 1, in multiples of the `num_generations`-th shortest "
            "complete length. Set it to None for the paper's rule, which has no bound."
        )
    # "auto", the default, and None mean the same there: what is wanted is waited for.
    if patience not in (None, AUTO) and settings.selection == "all" and settings.schedule != "grpo":
        raise ConfigurationError(
            f"`long_end_patience` ({patience!r}) has no effect with `selection` ('all'): all candidates are wanted. "
            "Leave it unset, or set `selection='dual_end'`."
        )
    if not settings.fill_bubbles:
        return
    if settings.schedule not in ("darts", "tail_batching") or settings.selection == "all":
        raise ConfigurationError(
            f"`fill_bubbles` (True) does not go with `schedule` ({settings.schedule!r}) and `selection` "
            f"({settings.selection!r}): it adds candidates that compete for a prompt's rows, where engines have "
            "nothing better to do. Set `schedule='darts'`, or leave it out."
        )
    if patience is None:
        raise ConfigurationError(
            "`fill_bubbles` (True) needs a bounded wait: without one, a step would wait for candidates that were only "
            "added because engines were idle. Leave `long_end_patience` at 'auto'."
        )


def _check_budget(settings: ScheduleSettings) -> None:
    highest = settings.max_num_generations / settings.num_generations
    if not 1 <= settings.target_redundancy <= highest:
        raise ConfigurationError(
            f"`target_redundancy` ({settings.target_redundancy}) must be between 1 and `max_num_generations` / "
            f"`num_generations` ({highest:g}). Lower it, or raise `max_num_generations`."
        )
    if settings.redundancy_cost_weight is not None and not 0 < settings.redundancy_cost_weight < math.inf:
        raise ConfigurationError(
            f"`redundancy_cost_weight` ({settings.redundancy_cost_weight}) must be positive. Leave it unset to have "
            "it calibrated."
        )
    if not 0 < settings.length_ema <= 1:
        raise ConfigurationError(
            f"`length_ema` ({settings.length_ema}) must be greater than 0 and at most 1, the weight of the newest "
            "observation."
        )


def _check_rounds(settings: ScheduleSettings) -> None:
    oversampling = settings.prompt_oversampling
    if oversampling is not None and not 1 < oversampling < math.inf:
        raise ConfigurationError(
            f"`prompt_oversampling` ({oversampling}) must be greater than 1: the prompts started for each that is "
            "trained on."
        )
    for name, low in (("max_partial_age", 1), ("mask_stale_after", 0), ("sorted_group_batches", 2)):
        value = getattr(settings, name)
        if value is not None and value < low:
            raise ConfigurationError(f"`{name}` ({value}) must be at least {low}.")
    if settings.schedule == "sorted":
        check_choice("sorted_mode", settings.sorted_mode, SORTED_MODES)
        check_choice("sorted_order", settings.sorted_order, SORTED_ORDERS)
        if settings.sorted_mode == "post_hoc" and not settings.sorted_grouped:
            raise ConfigurationError(
                "`sorted_grouped` (False) does not go with `sorted_mode` ('post_hoc'), which brings all batches of a "
                "group to their end at once. Leave one of them out."
            )
    if settings.mask_stale_after is not None and settings.sorted_mode == "post_hoc":
        raise ConfigurationError(
            f"`mask_stale_after` ({settings.mask_stale_after}) does not go with `sorted_mode` ('post_hoc'): its later "
            "batches are of an old policy as a whole. Leave it unset, or use `sorted_mode='partial'`."
        )
    if settings.mask_stale_after is not None and not settings.keeps_tokens:
        raise ConfigurationError(
            f"`mask_stale_after` ({settings.mask_stale_after}) has no effect with `sorted_mode` "
            f"({settings.sorted_mode!r}): all tokens are of the newest policy. Leave it unset."
        )
    if settings.num_long_servers < 0:
        raise ConfigurationError(f"`num_long_servers` ({settings.num_long_servers}) must not be negative.")
    if not 0 < settings.long_share < 1:
        raise ConfigurationError(
            f"`long_share` ({settings.long_share}) must be between 0 and 1: the share of candidates that "
            "`num_long_servers` are for."
        )
    if settings.num_long_servers and not settings.length_ranked:
        raise ConfigurationError(
            f"`num_long_servers` ({settings.num_long_servers}) needs `length_ranked=True`: the candidates for those "
            "servers are those that are expected to be longest."
        )
