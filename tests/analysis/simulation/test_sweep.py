"""Which settings a comparison runs over."""

from dataclasses import fields

import pytest

from trl_darts import DARTSGRPOConfig
from trl_darts.analysis.simulation import parse_sweep, settings_of
from trl_darts.analysis.simulation.sweep import KINDS, UNSWEPT
from trl_darts.errors import ConfigurationError
from trl_darts.scheduling import ScheduleSettings


def test_sweeps():
    sweep = parse_sweep(["max_num_generations=6,8", "long_end_patience=none,1.5", "tail_pruning=true"])
    assert sweep == {"max_num_generations": [6, 8], "long_end_patience": [None, 1.5], "tail_pruning": [True]}
    settings = settings_of(["grpo", "darts"], 4, sweep)
    assert next(iter(settings)) == "grpo"
    assert len(settings) == 5
    label = "darts, max_num_generations=8, long_end_patience=1.5, tail_pruning=True, long_end_every=4"
    assert settings[label] == ScheduleSettings(
        *("darts", 4, 8), long_end_patience=1.5, tail_pruning=True, long_end_every=4
    )
    assert "darts, max_num_generations=8, long_end_patience=None, tail_pruning=True" in settings  # waits for all
    assert set(settings_of(["grpo"], 4, {"num_generations": [2, 3]})) == {
        "grpo, num_generations=2",
        "grpo, num_generations=3",
    }


def test_every_setting_that_a_simulation_depends_on_can_be_swept():
    known = {field.name for field in fields(ScheduleSettings)}
    assert known - set(KINDS) == {*UNSWEPT}  # what is learned
    sweep = parse_sweep(
        ["long_end_patience=auto,none,2", "selection=uniform", "sorted_mode=partial", "prompt_oversampling=1.5,2"]
    )
    assert sweep == {
        "long_end_patience": ["auto", None, 2.0],
        "selection": ["uniform"],
        "sorted_mode": ["partial"],
        "prompt_oversampling": [1.5, 2.0],
    }


def test_each_schedule_takes_what_means_something_to_it():
    sweep = parse_sweep(["prompt_oversampling=1.5,2", "sorted_mode=partial", "long_end_patience=auto,2"])
    assert list(settings_of(["grpo", "darts", "tail_batching", "sorted"], 4, sweep)) == [
        "grpo",
        "darts, long_end_patience=auto, long_end_every=4",
        "darts, long_end_patience=2.0, long_end_every=4",
        "tail_batching, prompt_oversampling=1.5",
        "tail_batching, prompt_oversampling=2.0",
        "sorted, sorted_mode=partial",
    ]
    sweep = parse_sweep(["selection=all,dual_end", "long_end_patience=auto,2"])
    assert list(settings_of(["grpo", "darts", "partial_rollout"], 4, sweep)) == [
        "grpo",
        "darts, selection=dual_end, long_end_patience=auto, long_end_every=4",
        "darts, selection=dual_end, long_end_patience=2.0, long_end_every=4",
        "partial_rollout, selection=all",
        "partial_rollout, selection=dual_end, long_end_patience=auto",
        "partial_rollout, selection=dual_end, long_end_patience=2.0",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_generations": 12},
        {"drop_uniform_groups": True},
        {"rollout_ahead": "continuous"},
        {"long_end_patience": None},
        {"long_end_every": 2},
        {"selection": "uniform"},
    ],
)
def test_what_is_simulated_is_what_the_trainer_runs(fields):
    """The guard of a trainer with an engine in its process, resolved by the same function."""
    config = DARTSGRPOConfig("out", use_cpu=True, bf16=False, **fields)
    (made,) = settings_of(["darts"], 8, {name: [value] for name, value in fields.items()}).values()
    assert {name: getattr(made, name) for name in KINDS} == {name: getattr(config, name) for name in KINDS}


def test_without_a_guard_on_demand():
    assert {
        name: own.long_end_every for name, own in settings_of(["darts"], 8, {"long_end_every": [None, 4]}).items()
    } == {
        "darts, long_end_every=None": None,
        "darts, long_end_every=4": 4,
    }


@pytest.mark.parametrize(
    ("schedules", "option", "words"),
    [
        (["grpo", "darts"], "sorted_mode=partial", r"\(sorted_mode=partial\) has no effect.*or add 'sorted'"),
        (["darts"], "max_partial_age=2", r"\(max_partial_age=2\) has no effect.*or add 'partial_rollout'"),
        (["grpo"], "num_longest=1", r"\(num_longest=1\) has no effect with `--schedule` \(grpo\)"),
        (["grpo", "sorted"], "long_end_patience=2", r"\(long_end_patience=2.0\) has no effect"),
        (["grpo", "darts"], "selection=dual_end,all", r"\(selection=all\) has no effect"),
    ],
)
def test_what_means_nothing_to_any_schedule_is_refused(schedules, option, words):
    with pytest.raises(ConfigurationError, match=words):
        settings_of(schedules, 4, parse_sweep([option]))


@pytest.mark.parametrize(
    "options", [["selection=uniform", "num_longest=2"], ["submit_order=arrival", "selection=all", "length_ema=0.2"]]
)
def test_what_other_values_leave_unread_is_refused(options):
    (name, value) = options[-1].split("=")
    with pytest.raises(ConfigurationError, match=rf"\({name}={value}\) has no effect"):
        settings_of(["tail_batching"], 4, parse_sweep(options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["num_longest"], "must be NAME=VALUE"),
        (["max_num_generation=10,12"], r"Did you mean `max_num_generations`"),
        (["num_longest=1", "num_longest=2"], "each NAME once"),
        (["num_longest=1.5"], r"'1.5'\) must be a whole number"),
        (["tail_pruning=1"], r"'1'\) must be true or false"),
    ],
)
def test_sweeps_that_can_not_be(options, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_sweep(options)
