"""`ScheduleFields`: the settings of a rollout, as users read them, and which of them can't be combined."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from ..policy.budget import DEFAULT_REDUNDANCY
from ..policy.lengths import DEFAULT_EMA
from .policies import AUTO, SCHEDULES, SELECTIONS
from .rules import FINITE, Conflict, Rule, at_least, one_of, setting


# Settings that only have an effect if prompts get more candidates than rows.
OF_SELECTION = (
    *("max_num_generations", "min_num_generations", "target_redundancy", "redundancy_cost_weight"),
    *("num_longest", "tail_pruning", "long_end_patience", "long_end_every"),
)
# Settings that only some schedules read, with these defaults.
SCHEDULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "prompt_oversampling": {"tail_batching": 1.25, "partial_rollout": 2.0},
    "max_partial_age": {"partial_rollout": 4},
    "mask_stale_after": {"partial_rollout": None, "sorted": None},
    "sorted_group_batches": {"sorted": 4},
    "sorted_mode": {"sorted": "on_policy"},
}
GUARD_EVERY = 4  # `long_end_every` by default, where unsettled groups can't be deferred
CONTINUOUS = "continuous"
PLAIN = ("darts", "grpo")  # schedules that train on the data loader's next prompts
SUBMIT_ORDERS = {"grpo": "arrival", "sorted": "shortest"}  # 'longest' for other schedules
STALE_BATCHES = 4  # default of `max_staleness`, in batches
MAX_OVERSAMPLING = 4.0  # fills most batches with `drop_uniform_groups` if 3 groups of 4 are uniform
AHEAD = Rule(
    lambda value: str(value) in ("0", "1", CONTINUOUS),
    "0, 1 or 'continuous': at most one batch is sampled ahead, or rollouts never end",
)
PATIENCE = Rule(
    lambda value: value in (None, "none", AUTO) or float(value) >= 1,
    "'auto', None, or a number of at least 1, in multiples of the `num_generations`-th shortest complete length",
)
OVERSAMPLING = Rule(lambda value: 1 < value < math.inf, "greater than 1 and finite: the prompts per trained prompt")


@dataclass
class ScheduleFields:
    """Base class of [`~trl_darts.scheduling.ScheduleSettings`], which checks them."""

    # The first two can be given by position.
    schedule: Annotated[str, one_of(SCHEDULES)] = setting(
        "darts",
        "System that shapes rollouts, see docs/schedules.md. 'darts' samples up to `max_num_generations` "
        "candidates per prompt and keeps the shortest and the longest complete ones; 'grpo' samples and keeps "
        "`num_generations`, as TRL does; 'tail_batching' defers the slowest prompts to rounds of their own; "
        "'partial_rollout' continues unfinished candidates in the next step; 'sorted' starts several batches at once "
        "and trains first on the prompts that finish first.",
    )
    num_generations: Annotated[int, at_least(1)] = setting(
        8, "Number of generations per prompt that are trained on [M]."
    )

    # Number of candidates
    max_num_generations: int = setting(
        None, "Most candidates of one prompt [M_up]. Defaults to twice `num_generations`."
    )
    min_num_generations: int = setting(
        None,
        "Fewest candidates of one prompt [M_low]. With `long_end_patience='auto'` defaults to `num_generations + 2`, "
        "or less if `target_redundancy` and `max_num_generations` don't allow it: a prompt without spare candidates "
        "waits for all of them. Otherwise defaults to `num_generations`, as in the paper. If lengths hardly vary, or "
        "engines are full, spare candidates don't pay, and prompts get none unless this is set.",
    )
    target_redundancy: Annotated[float, FINITE] = setting(
        None,
        "Candidates per trained row, on average over a batch, while response lengths vary as in the first steps "
        "[M_total / (N·M)]. Later, the budget follows their spread. Between 1 and "
        f"`max_num_generations / num_generations`. Defaults to {DEFAULT_REDUNDANCY}, or to "
        "`max_num_generations / num_generations` if that is smaller.",
    )
    redundancy_cost_weight: Annotated[
        float | None, Rule(lambda value: 0 < value < math.inf, "positive and finite")
    ] = setting(
        None,
        "Weight of rollout time, in seconds, against variety in the budget [λ]. A larger one makes the budget "
        "smaller. Needs `latency_curve`, and replaces `target_redundancy`. If it is unset, `target_redundancy` sets "
        "the budget.",
    )
    length_ema: Annotated[float, Rule(lambda value: 0 < value <= 1, "greater than 0 and at most 1")] = setting(
        DEFAULT_EMA, "Weight of the newest observation in the moving averages of response lengths."
    )

    # End of a rollout and selection
    num_longest: Annotated[int, at_least(0)] = setting(
        1,
        "How many of a prompt's `num_generations` rows are its longest complete candidates [L]. The others are its "
        "shortest ones.",
    )
    tail_pruning: bool = setting(
        True,
        "Whether a prompt with `max_num_generations` candidates stops at its `num_generations`-th complete one, keeps "
        "those that are complete and aborts the rest.",
    )
    # `str` stands in the middle because that is the type `HfArgumentParser` gives to a command line's value.
    long_end_patience: Annotated[float | str | None, PATIENCE] = setting(
        AUTO,
        "Bound on the wait for the long end. With 'auto', a prompt that has `num_generations` complete candidates "
        "continues only while another prompt has fewer. A number, at least 1, aborts candidates that reach this many "
        "times the `num_generations`-th shortest complete length. None ('none' on a command line), the paper's rule, "
        "waits for all candidates of every prompt that `tail_pruning` does not stop.",
    )
    long_end_every: Annotated[int | None, at_least(2)] = setting(
        None,
        "One rollout in this many waits for the long end as in the paper, as if `long_end_patience` were None: long "
        "answers are then trained on, and all lengths are observed in full. At least 2. Defaults to "
        f"{GUARD_EVERY} where `defer_unsettled_groups` is unset and can't be on, otherwise no rollout does.",
    )
    selection: Annotated[str, one_of(SELECTIONS)] = setting(
        None,
        "Which of a prompt's candidates are kept: 'dual_end' keeps the shortest and the longest complete ones, "
        "'uniform' finished ones of any length, and 'all' samples no more than are kept. Defaults to 'dual_end' with "
        "`schedule='darts'` and to 'all' otherwise. 'tail_batching', 'partial_rollout' and 'sorted' can be combined "
        "with any.",
    )

    # Placement
    submit_order: Annotated[str, one_of(("longest", "shortest", "arrival"))] = setting(
        None,
        "In which order candidates start, by their expected lengths: 'longest' first, 'shortest' first, or in order "
        "of 'arrival'. Matters if engines have no room for all at once. Rows start before spare candidates in any "
        "order. Defaults to 'shortest' with `schedule='sorted'`, which trains first on the prompts that finish first, "
        "to 'arrival' with 'grpo', as in TRL, and to 'longest' otherwise.",
    )
    tail_switch_at: Annotated[int | None, Rule(lambda value: value >= 0, "at least 1 candidate, or 0 for never")] = (
        setting(
            None,
            "Number of unfinished candidates at which they move to `vllm_tail_server_url`. If it is unset, they move "
            "when that is predicted to pay, from the profile of both kinds of servers in `latency_curve`. 0: never.",
        )
    )
    tail_share: Annotated[float, Rule(lambda value: 0 <= value < 1, "at least 0 and less than 1")] = setting(
        0.0,
        "Share of prompts, those with the longest expected answers, whose candidates `vllm_tail_server_url` decodes "
        "from the start.",
    )

    # Prompts of a batch
    prompt_oversampling: Annotated[float | None, OVERSAMPLING] = setting(
        None,
        "Prompts that are started for each trained prompt, with 'tail_batching' (defaults to "
        "{tail_batching}) and 'partial_rollout' (defaults to {partial_rollout:g}).".format(
            **SCHEDULE_DEFAULTS["prompt_oversampling"]
        ),
    )
    max_partial_age: Annotated[int | None, at_least(1)] = setting(
        None,
        "Number of rollouts that may end before a prompt of 'partial_rollout' is finished. The next one waits for it. "
        f"Defaults to {SCHEDULE_DEFAULTS['max_partial_age']['partial_rollout']}.",
    )
    mask_stale_after: Annotated[int | None, at_least(0)] = setting(
        None,
        "Tokens sampled by a policy more than this many optimizer steps old are masked in the loss. Only with "
        "schedules that keep tokens. If it is unset, all are trained on, with TRL's importance sampling correction.",
    )
    sorted_group_batches: Annotated[int | None, at_least(2)] = setting(
        None,
        "Number of batches of prompts that start together with 'sorted'. Defaults to "
        f"{SCHEDULE_DEFAULTS['sorted_group_batches']['sorted']}.",
    )
    sorted_mode: Annotated[str | None, one_of(("on_policy", "partial"))] = setting(
        None,
        "What happens to unfinished prompts with 'sorted': 'on_policy' restarts them, 'partial' keeps their tokens. "
        "Defaults to 'on_policy'.",
    )
    rollout_ahead: Annotated[int | str | None, AHEAD] = setting(  # `str` in the middle: see `long_end_patience`
        0,
        "1 samples the next batch while the trainer trains on this one, so that servers and trainer work at the same "
        "time. Each batch is then sampled with the weights of the batch before, with TRL's importance sampling "
        "correction. 'continuous' never ends a rollout: two batches of prompts decode, a batch takes those that are "
        "complete first, and servers get new weights while they decode. 0 waits for each rollout. Only with "
        "`vllm_mode='server'`.",
    )
    max_staleness: Annotated[int | None, at_least(1)] = setting(
        None,
        "With `rollout_ahead='continuous'`: most optimizer steps between the oldest token of a row and its training. "
        "A prompt that would get older is waited for. At least the steps of one batch. "
        f"Defaults to {STALE_BATCHES} batches.",
    )
    kv_after_update: Annotated[str | None, one_of(("recompute", "keep"))] = setting(
        None,
        "With `rollout_ahead='continuous'`: what happens to the keys and values of running answers at a weight sync. "
        "'recompute' computes them with the new weights, as a forward pass would; 'keep' continues with them, which "
        "saves time if contexts are long. Defaults to 'recompute'.",
    )
    drop_uniform_groups: bool = setting(
        False,
        "Whether groups whose rewards are all equal, and have no gradient, are replaced by further prompts until all "
        "groups of the batch have different rewards (DAPO's dynamic sampling). Only with `schedule` 'darts' or "
        "'grpo' and `vllm_mode='server'`.",
    )
    max_prompt_oversampling: Annotated[float | None, OVERSAMPLING] = setting(
        None,
        "Most prompts sampled for each trained prompt with `drop_uniform_groups`. If groups are still missing then, "
        f"filler rows with zero loss weight replace them. Defaults to {MAX_OVERSAMPLING:g}.",
    )
    skip_uniform_prompts: bool = setting(
        False,
        "Whether a prompt whose latest group had equal rewards is skipped before it is sampled, with a probability "
        "that grows with how often in a row that was so, and is 0.95 at most (GRESO). The next prompts of the data "
        "fill the batch: a pass over the data then takes fewer steps, and `max_steps` stays as it is. For data that "
        "are passed several times, and only with `vllm_mode='server'`.",
    )
    defer_unsettled_groups: bool | None = setting(
        None,
        "Whether a group whose kept rewards are all equal is deferred to a long round if some of its candidates were "
        "aborted, because long answers may have other rewards. A long round decodes `num_generations` candidates of "
        "each prompt to their end. Only with `schedule='darts'`, a bounded `long_end_patience` and "
        "`vllm_mode='server'`. If it is unset, groups are deferred where that is possible, and elsewhere "
        f"`long_end_every` defaults to {GUARD_EVERY}. With `False`, nothing guards against the loss of long answers.",
    )
    audit_share: Annotated[float, Rule(lambda value: 0 <= value < 1, "at least 0 and less than 1")] = setting(
        0.0,
        "Share of prompts, chosen at random, that are sampled twice and to their end in long rounds, to measure "
        "what the bounded wait loses: `darts/audit/*`, and a warning if it aborts what earns rewards. "
        "0.06 gives some 150 prompts in 80 steps of 32. Only where `defer_unsettled_groups` can be set.",
    )


def _default(defaults: dict[str, Any], settings: Any) -> Any:
    return defaults.get(settings.schedule)


def _is_other(defaults: dict[str, Any], settings: Any) -> bool:
    return settings.schedule not in defaults


# What unset fields default to, in this order.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "selection": lambda s: SCHEDULES[s.schedule],
    "submit_order": lambda s: SUBMIT_ORDERS.get(s.schedule, "longest"),
    "max_num_generations": lambda s: s.num_generations * (2 if s.over_provisions else 1),
    "target_redundancy": lambda s: min(DEFAULT_REDUNDANCY, s.max_num_generations / s.num_generations),
    "min_num_generations": lambda s: min(s.num_generations + s.num_spare, s.max_num_generations, s.affordable),
    "max_prompt_oversampling": lambda s: MAX_OVERSAMPLING if s.drop_uniform_groups else None,
    "max_staleness": lambda s: STALE_BATCHES * s.steps_per_batch if s.is_continuous else None,
    "kv_after_update": lambda s: "recompute" if s.is_continuous else None,
    **{name: partial(_default, defaults) for name, defaults in SCHEDULE_DEFAULTS.items()},
}
KEEPS_ALL = "has no effect with {keeps_all}"
# fmt: off
# Which settings can't be combined. Rows have two lines, which is why they are not formatted.
SCHEDULE_CONFLICTS = (
    # Schedules
    *(Conflict(name, partial(_is_other, defaults), "has no effect with {schedule}",
               f"Leave it unset, or set `schedule` to {' or '.join(map(repr, defaults))}.")
      for name, defaults in SCHEDULE_DEFAULTS.items() if name != "mask_stale_after"),
    Conflict("mask_stale_after", lambda s: not (s.keeps_tokens or s.is_continuous),
             "has no effect with {schedule} and {sorted_mode}, with which all tokens are of the newest policy"),
    Conflict("drop_uniform_groups", lambda s: s.schedule not in PLAIN,
             "does not run with {schedule}, which chooses its prompts itself, unlike 'darts' and 'grpo'"),
    Conflict("max_prompt_oversampling", lambda s: not s.drop_uniform_groups,
             "has no effect without `drop_uniform_groups`"),
    # Candidates
    Conflict("selection", lambda s: s.schedule == "grpo" and s.over_provisions,
             "does not go with {schedule}, which keeps all that it samples, unlike `schedule='darts'`"),
    Conflict("selection", lambda s: s.schedule == "darts" and not s.over_provisions,
             "does not go with {schedule}, which samples more than it keeps, unlike `schedule='grpo'`"),
    Conflict("selection defer_unsettled_groups", lambda s: s.over_provisions and s.keeps_all, KEEPS_ALL),
    Conflict("redundancy_cost_weight num_longest long_end_patience long_end_every", lambda s: s.keeps_all, KEEPS_ALL),
    Conflict("max_num_generations", lambda s: s.keeps_all and s.max_num_generations != s.num_generations, KEEPS_ALL),
    Conflict("min_num_generations", lambda s: s.keeps_all and s.min_num_generations != s.num_generations, KEEPS_ALL),
    Conflict("target_redundancy", lambda s: s.keeps_all and s.target_redundancy != 1, KEEPS_ALL),
    Conflict("num_longest", lambda s: s.selection == "uniform",
             "has no effect with {selection}, which does not look at lengths, unlike 'dual_end'"),
    Conflict("num_longest num_generations",
             lambda s: s.selection == "dual_end" and s.num_longest >= s.num_generations,
             "leaves no row for the shortest answers: {num_longest} must be less than {num_generations}"),
    Conflict("max_num_generations", lambda s: s.max_num_generations < s.num_generations,
             "must be at least {num_generations}", "Raise it, or leave it unset for 2 × `num_generations`."),
    Conflict("target_redundancy", lambda s: not 1 <= s.target_redundancy <= s.max_num_generations / s.num_generations,
             "must be between 1 and {max_num_generations} / {num_generations}"),
    Conflict("min_num_generations", lambda s: not s.num_generations <= s.min_num_generations <= s.max_num_generations,
             "must be between {num_generations} and {max_num_generations}"),
    Conflict("min_num_generations",
             lambda s: s.redundancy_cost_weight is None and s.min_num_generations > s.affordable,
             "must be at most {target_redundancy} × {num_generations}, the average per prompt"),
    Conflict("long_end_every", lambda s: s.long_end_patience is None,
             "has no effect with {long_end_patience}, with which every rollout waits for the long end"),
    # Expected lengths
    Conflict("length_ema", lambda s: not s.reads_lengths,
             "has no effect with {schedule} and {submit_order}, which do not depend on lengths"),
    Conflict("tail_share", lambda s: not s.ranks,
             "needs expected lengths, which {submit_order} does not use, unlike 'longest'"),
    # Rollouts ahead of time
    Conflict("max_staleness kv_after_update", lambda s: not s.is_continuous,
             "has no effect with {rollout_ahead}, only with 'continuous'"),
    Conflict("max_staleness", lambda s: s.max_staleness < s.steps_per_batch,
             "must be at least {steps_per_batch}, the optimizer steps of one batch: the next is sampled meanwhile",
             "Raise it, or set `rollout_ahead=0`."),
    Conflict("schedule", lambda s: s.is_continuous and s.schedule not in PLAIN,
             "does not run with {rollout_ahead}, which has 'darts' and 'grpo' alone: it carries tokens over"),
    Conflict("drop_uniform_groups defer_unsettled_groups audit_share long_end_every", lambda s: s.is_continuous,
             "does not run with {rollout_ahead}, whose rollout never ends and samples no prompt again"),
    # Deferral
    Conflict("defer_unsettled_groups audit_share", lambda s: s.cannot_defer, "does not run with {cannot_defer}"),
    Conflict("audit_share", lambda s: s.selection == "uniform",
             "does not run with {selection}: audits compare rows selected by length with plain sampling"),
)
# fmt: on
