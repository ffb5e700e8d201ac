"""Tests the policies of settings, and the errors for invalid ones."""

import copy
import pickle
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import assert_refused
from trl_darts.buffer.rounds import PartialRollout, Sorted, TailBatching, round_policy
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve, LengthTracker
from trl_darts.scheduling import (
    AssignedPlacement,
    DualEnd,
    FirstGroups,
    GroupPlan,
    LengthOrder,
    PromptInfo,
    ScheduleSettings,
    TailServers,
    UniformPool,
)
from trl_darts.scheduling.policies import AllGroups, LeastLoaded, WaitForAll
from trl_darts.scheduling.rules import unmarked


def test_every_setting_says_what_it_means():
    assert all(len(field.metadata["help"]) > 20 for field in fields(ScheduleSettings))


@pytest.mark.parametrize(
    ("schedule", "stop", "rounds"),
    [
        ("grpo", WaitForAll, type(None)),
        ("darts", DualEnd, type(None)),
        ("tail_batching", WaitForAll, TailBatching),
        ("partial_rollout", WaitForAll, PartialRollout),
        ("sorted", WaitForAll, Sorted),
    ],
)
def test_rows_of_the_table(schedule, stop, rounds):
    settings = ScheduleSettings(schedule)
    assert type(settings.policies().group_stop) is stop
    assert type(round_policy(settings, 4)) is rounds
    assert settings.buffers_prompts == (rounds is not type(None))
    assert settings.over_provisions == (schedule == "darts")
    order = {"grpo": "arrival", "sorted": "shortest"}.get(schedule, "longest")
    assert settings.submit_order == order


def test_the_policies_of_a_rollout_are_complete():
    plans = [GroupPlan(7, 1, expected_length=10.0), GroupPlan(9, 1, expected_length=90.0)]
    ready, assigned = FirstGroups(1), AssignedPlacement({7: ["0"], 9: ["1"]})
    policies = ScheduleSettings(tail_share=0.5).policies(plans, ready, tail=TailServers())
    assert policies.tail.long_groups == {9}
    assert ScheduleSettings().policies(plans, ready).tail is None
    assert policies.batch_stop is ready
    assert type(ScheduleSettings().policies(plans).placement) is LengthOrder
    assert type(ScheduleSettings().policies(plans).batch_stop) is AllGroups
    assert ScheduleSettings().policies(plans, placement=assigned).placement is assigned
    assert type(ScheduleSettings().policies().placement) is LeastLoaded  # without expected lengths
    assert ScheduleSettings().policies(plans).placement.longest_first
    assert not ScheduleSettings("sorted").policies(plans).placement.longest_first
    assert type(ScheduleSettings(submit_order="arrival").policies(plans).placement) is LeastLoaded
    assert type(ScheduleSettings("tail_batching", selection="dual_end").policies().group_stop) is DualEnd
    assert type(ScheduleSettings(selection="uniform").policies().group_stop) is UniformPool


@pytest.mark.parametrize(("text", "value"), [("2.5", 2.5), ("auto", "auto"), ("none", None)])
def test_values_of_a_command_line(text, value):
    assert ScheduleSettings(long_end_patience=text).long_end_patience == value


@pytest.mark.parametrize("schedule", ["darts", "grpo", "tail_batching", "partial_rollout", "sorted"])
def test_the_wait_is_bounded_unless_told_otherwise(schedule):
    """Also if all candidates are kept: a default without an effect is accepted."""
    assert ScheduleSettings(schedule).long_end_patience == "auto"
    assert ScheduleSettings().policies().group_stop.follows_batch
    assert not ScheduleSettings(long_end_patience=None).policies().group_stop.follows_batch


@given(st.integers(1, 64), st.integers(0, 64), st.floats(0, 1), st.sampled_from(["auto", 2.0, None]))
def test_each_prompt_can_spare_a_candidate_where_the_wait_is_bounded(rows, room, share, patience):
    most = rows + room
    settings = ScheduleSettings(
        num_generations=rows,
        max_num_generations=most,
        num_longest=0,
        target_redundancy=1 + share * (most / rows - 1),
        long_end_patience=patience,
    )
    affordable = settings.target_redundancy * rows + 1e-6
    assert rows <= settings.min_num_generations <= min(most, affordable)
    if patience != "auto":
        assert settings.min_num_generations == rows
    elif rows + 2 <= min(most, affordable):
        assert settings.min_num_generations == rows + 2


def test_fewest_candidates_by_default_and_by_choice():
    assert ScheduleSettings().min_num_generations == 10
    assert ScheduleSettings("grpo").min_num_generations == 8
    assert ScheduleSettings("tail_batching", selection="dual_end").min_num_generations == 10
    prompts = [PromptInfo(key, 4) for key in range(6)]
    tracker = LengthTracker()
    for key in range(6):
        tracker.update(key, [100, 100 + key * key])
    tracker.end_step()
    for least in (8, 11):
        plan = ScheduleSettings(min_num_generations=least).admission(tracker).plan(prompts)
        assert (min(plan.num_candidates), sum(plan.num_candidates)) == (least, 6 * 12)
    priced = ScheduleSettings(redundancy_cost_weight=1e9, min_num_generations=14)  # λ, not a target
    admission = priced.admission(tracker, LatencyCurve([1, 2], [0.01, 0.02]))
    admission.observe([])
    assert admission.plan(prompts).num_candidates == [14] * 6


@pytest.mark.parametrize("schedule", ["grpo", "tail_batching", "partial_rollout", "sorted"])
def test_what_a_schedule_does_anyhow_may_be_said(schedule):
    said = {"max_num_generations": 4, "target_redundancy": 1.0, "long_end_patience": None, "tail_pruning": False}
    settings = ScheduleSettings(schedule, 4, **said)
    assert type(settings.policies().group_stop) is WaitForAll
    chosen = ScheduleSettings(max_num_generations=12, num_longest=2)
    with pytest.raises(ConfigurationError, match="has no effect"):
        replace(chosen, schedule=schedule)
    assert replace(ScheduleSettings(), schedule=schedule).over_provisions is False


def test_settings_that_are_read_are_taken():
    assert ScheduleSettings("grpo", submit_order="longest", length_ema=0.3).length_ema == 0.3
    assert ScheduleSettings("tail_batching", selection="uniform", submit_order="arrival", length_ema=0.3).reads_lengths
    assert ScheduleSettings(selection="uniform", num_generations=1).num_longest == 1  # the default has no effect
    assert type(ScheduleSettings("grpo", 1).policies().group_stop) is WaitForAll
    with pytest.raises(ConfigurationError, match="`length_ema`"):
        replace(ScheduleSettings(length_ema=0.3), schedule="grpo")


def test_numbers_of_numpy_become_plain():
    """They can be computed with, and are replaced by Python's numbers for config files."""
    settings = ScheduleSettings(
        num_longest=np.int64(2), target_redundancy=np.float32(1.25), tail_pruning=np.bool_(False), long_end_patience=2
    )
    assert settings == ScheduleSettings(num_longest=2, target_redundancy=1.25, tail_pruning=False, long_end_patience=2)
    assert {type(value) for value in asdict(settings).values()}.isdisjoint({np.int64, np.float32, np.bool_})


SCHEDULES = ["darts", "grpo", "tail_batching", "partial_rollout", "sorted"]


@given(st.sampled_from(SCHEDULES), st.sampled_from(SCHEDULES), st.integers(2, 16), st.booleans())
def test_what_nobody_set_follows_the_other_fields(first, second, rows, drops):
    drops = drops and second in ("darts", "grpo")
    other = {"schedule": second, "num_generations": rows, "drop_uniform_groups": drops}
    settings = ScheduleSettings(first)
    for twin in (settings, copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        again = replace(twin, **other)
        assert again == ScheduleSettings(**other)
        assert replace(again, **asdict(settings)) == settings


def test_what_was_set_stays():
    chosen = {"max_num_generations": 16, "min_num_generations": 10, "target_redundancy": 1.5, "selection": "dual_end"}
    assert replace(ScheduleSettings(**chosen), num_generations=8) == ScheduleSettings(**chosen)
    settings = ScheduleSettings(max_num_generations=16, min_num_generations=10)
    assert replace(settings, num_generations=4, target_redundancy=3.0).max_num_generations == 16
    # The same number as the computed one, but set by the user.
    assert replace(ScheduleSettings(), num_generations=4, max_num_generations=16).max_num_generations == 16


def test_a_copy_has_the_same_budget():
    """If lengths hardly spread, spare candidates are only used if the user sets them."""
    prompts, tracker = [PromptInfo(key, 4) for key in range(128)], LengthTracker()
    for key in range(128):
        tracker.update(key, [100, 100], num_prompt_tokens=4)
    tracker.end_step()
    settings = ScheduleSettings()
    asked = replace(settings, min_num_generations=10)
    totals = [sum(own.admission(tracker).plan(prompts).num_candidates) for own in (settings, replace(settings), asked)]
    assert totals == [1024, 1024, 1536]


@given(st.integers(2, 10), st.sampled_from(["auto", 2.0]), st.sampled_from(["darts", "tail_batching"]))
def test_one_rollout_in_several_waits_as_in_the_paper(every, patience, schedule):
    settings = ScheduleSettings(schedule, selection="dual_end", long_end_patience=patience, long_end_every=every)
    waits = [settings.policies(rollout=number).group_stop.long_end_patience for number in range(3 * every)]
    assert waits == ([patience] * (every - 1) + [None]) * 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "fastest"}, "must be one of 'grpo', 'darts', 'tail_batching', 'partial_rollout'"),
        ({"schedule": "dart"}, "must be one of 'grpo', 'darts', 'tail_batching' ... Did you mean `darts`?"),
        ({"num_generations": "8"}, "must be of type int. Correct it, or leave it out."),
        ({"tail_pruning": "false"}, "must be of type bool. Correct it, or leave it out."),
        ({"max_num_generations": 12.5}, "must be of type int or None. Correct it, or leave it out."),
        ({"rollout_ahead": True}, "must be of type int or str or None. Correct it, or leave it out."),
        ({"num_longest": None}, "must be of type int. Correct it, or leave it out."),
        ({"target_redundancy": "1.5"}, "must be of type float or None. Correct it, or leave it out."),
        ({"long_end_patience": True}, "must be of type float or str or None. Correct it, or leave it out."),
        ({"num_generations": 0}, "must be at least 1. Correct it, or leave it unset."),
        ({"num_longest": 8}, "leaves no row for the shortest answers: `num_longest` (8) must be less"),
        ({"num_generations": 1}, "leaves no row for the shortest answers: `num_longest` (1) must be less"),
        ({"max_num_generations": 6}, "must be at least `num_generations` (8). Raise it, or leave it unset for 2"),
        ({"min_num_generations": 7}, "must be between `num_generations` (8) and `max_num_generations` (16)."),
        ({"min_num_generations": 17}, "must be between `num_generations` (8) and `max_num_generations` (16)."),
        ({"min_num_generations": 13}, "must be at most `target_redundancy` (1.5) × `num_generations` (8), the"),
        ({"target_redundancy": 0.9}, "must be between 1 and `max_num_generations` (16) / `num_generations` (8)."),
        ({"redundancy_cost_weight": 0.0}, "must be positive and finite. Correct it, or leave it unset."),
        ({"length_ema": 0.0}, "must be greater than 0 and at most 1. Correct it, or leave it unset."),
        ({"schedule": "grpo", "selection": "dual_end"}, "does not go with `schedule` ('grpo'), which keeps all that"),
        ({"selection": "all"}, "does not go with `schedule` ('darts'), which samples more than it keeps"),
        ({"selection": "best"}, "must be one of 'dual_end', 'uniform', 'all'."),
        ({"long_end_patience": "soon"}, "must be 'auto', None, or a number of at least 1, in multiples of the"),
        ({"long_end_patience": "0.5"}, "must be 'auto', None, or a number of at least 1, in multiples of the"),
        ({"schedule": "sorted", "long_end_patience": 2.0}, "has no effect with `schedule` ('sorted') and"),
        ({"schedule": "grpo", "max_num_generations": 16}, "has no effect with `schedule` ('grpo') and `selection`"),
        ({"schedule": "grpo", "long_end_patience": 2.0}, "has no effect with `schedule` ('grpo') and `selection`"),
        ({"schedule": "grpo", "num_longest": 2}, "has no effect with `schedule` ('grpo') and `selection` ('all')"),
        ({"schedule": "tail_batching", "num_longest": 0}, "has no effect with `schedule` ('tail_batching') and"),
        ({"schedule": "sorted", "min_num_generations": 10}, "has no effect with `schedule` ('sorted') and"),
        ({"schedule": "partial_rollout", "target_redundancy": 1.5}, "has no effect with `schedule`"),
        ({"schedule": "grpo", "redundancy_cost_weight": 0.1}, "has no effect with `schedule` ('grpo') and"),
        ({"prompt_oversampling": 1.5}, "has no effect with `schedule` ('darts'). Leave it unset, or set `schedule`"),
        ({"schedule": "tail_batching", "prompt_oversampling": 1.0}, "must be greater than 1 and finite: the prompts"),
        ({"schedule": "partial_rollout", "max_partial_age": 0}, "must be at least 1. Correct it, or leave it unset."),
        ({"schedule": "partial_rollout", "mask_stale_after": -1}, "must be at least 0. Correct it, or leave it"),
        ({"schedule": "sorted", "sorted_mode": "post_hoc"}, "must be one of 'on_policy', 'partial'."),
        ({"schedule": "sorted", "sorted_group_batches": 1}, "must be at least 2. Correct it, or leave it unset."),
        ({"schedule": "sorted", "mask_stale_after": 1}, "has no effect with `schedule` ('sorted') and `sorted_mode`"),
        ({"rollout_ahead": 2}, "must be 0, 1 or 'continuous': at most one batch is sampled ahead, or"),
        ({"tail_switch_at": -1}, "must be at least 1 candidate, or 0 for never. Correct it, or leave it"),
        ({"tail_share": 0.2, "submit_order": "arrival"}, "needs expected lengths, which `submit_order` ('arrival')"),
        ({"tail_share": 0.2, "schedule": "grpo"}, "needs expected lengths, which `submit_order` ('arrival') does"),
        ({"submit_order": "random"}, "must be one of 'longest', 'shortest', 'arrival'."),
        ({"long_end_every": 1}, "must be at least 2. Correct it, or leave it unset."),
        ({"long_end_every": 4, "long_end_patience": None}, "has no effect with `long_end_patience` (None), with"),
        ({"long_end_every": 4, "schedule": "grpo"}, "has no effect with `schedule` ('grpo') and `selection`"),
        ({"tail_share": 1.0}, "must be at least 0 and less than 1. Correct it, or leave it unset."),
        ({"schedule": "grpo", "length_ema": 0.3}, "has no effect with `schedule` ('grpo') and `submit_order`"),
        ({"selection": "uniform", "num_longest": 2}, "has no effect with `selection` ('uniform'), which does not"),
    ],
)
def test_refused(fields, words):
    assert_refused(ScheduleSettings, fields, words)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_saved_values_make_the_same_settings(schedule):
    """Computed defaults are accepted after they were saved as plain values."""
    settings = ScheduleSettings(schedule)
    assert ScheduleSettings(**{name: unmarked(value) for name, value in asdict(settings).items()}) == settings
