"""What settings of a schedule mean, and which are refused."""

import pytest

from trl_darts.errors import ConfigurationError
from trl_darts.scheduling import (
    DualEnd,
    PartialRollout,
    ScheduleSettings,
    Sorted,
    TailBatching,
    UniformPool,
    WaitForAll,
)


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
    assert type(settings.policies.group_stop) is stop
    assert type(settings.rounds(4)) is rounds
    assert settings.over_provisions == (schedule == "darts")
    assert (settings.policies.ranking is None) == (schedule == "grpo")


def test_selection_is_a_decision_of_its_own():
    settings = ScheduleSettings("tail_batching", selection="dual_end", long_end_patience="auto")
    assert type(settings.policies.group_stop) is DualEnd
    assert settings.policies.group_stop.follows_batch
    assert settings.over_provisions
    assert type(ScheduleSettings(selection="uniform").policies.group_stop) is UniformPool


@pytest.mark.parametrize(("word", "value"), [("2.5", 2.5), ("auto", "auto"), ("none", None)])
def test_words_of_a_command_line(word, value):
    assert ScheduleSettings(long_end_patience=word).long_end_patience == value


@pytest.mark.parametrize("schedule", ["darts", "grpo", "tail_batching", "partial_rollout", "sorted"])
def test_the_wait_is_bounded_unless_told_otherwise(schedule):
    """Also where all is kept, and the bound has no effect: it is a default, and not refused."""
    settings = ScheduleSettings(schedule)
    assert settings.long_end_patience == "auto"
    if schedule == "darts":
        assert settings.policies.group_stop.follows_batch
        assert not ScheduleSettings(long_end_patience=None).policies.group_stop.follows_batch


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"schedule": "grpo", "selection": "dual_end"},
            r"`selection` \('dual_end'\) does not go with .*`schedule='darts'`",
        ),
        ({"selection": "all"}, r"`selection` \('all'\) does not go with .*`schedule='grpo'`"),
        ({"selection": "best"}, r"`selection` \('best'\) must be one of 'dual_end', 'uniform', 'all'"),
        ({"long_end_patience": "soon"}, r"`long_end_patience` \('soon'\) must be a number, 'auto' or None"),
        ({"long_end_patience": "0.5"}, r"`long_end_patience` \(0.5\) must be at least 1"),
        ({"prompt_oversampling": 1.5}, r"`prompt_oversampling` \(1.5\) has no effect with `schedule` \('darts'\)"),
        ({"schedule": "tail_batching", "prompt_oversampling": 1.0}, "must be greater than 1"),
        ({"schedule": "tail_batching", "max_partial_age": 2}, r"`max_partial_age` \(2\) has no effect"),
        ({"schedule": "partial_rollout", "max_partial_age": 0}, r"`max_partial_age` \(0\) must be at least 1"),
        ({"schedule": "sorted", "sorted_mode": "later"}, r"`sorted_mode` \('later'\) must be one of"),
        ({"schedule": "sorted", "sorted_order": "size"}, r"`sorted_order` \('size'\) must be one of"),
        ({"schedule": "sorted", "sorted_group_batches": 1}, r"`sorted_group_batches` \(1\) must be at least 2"),
        ({"schedule": "sorted", "sorted_mode": "post_hoc", "sorted_grouped": False}, "does not go with `sorted_mode`"),
        ({"schedule": "sorted", "mask_stale_after": 1}, r"`mask_stale_after` \(1\) has no effect with `sorted_mode`"),
        ({"schedule": "sorted", "sorted_mode": "post_hoc", "mask_stale_after": 2}, "does not go with `sorted_mode`"),
        ({"schedule": "partial_rollout", "mask_stale_after": -1}, r"`mask_stale_after` \(-1\) must be at least 0"),
        (
            {"fill_bubbles": True, "long_end_patience": "auto", "schedule": "sorted", "selection": "dual_end"},
            "`fill_bubbles` .* does not go with",
        ),
        (
            {"schedule": "sorted", "long_end_patience": 2.0},
            r"`long_end_patience` \(2.0\) has no effect with `selection`",
        ),
        ({"num_long_servers": -1}, "must not be negative"),
        ({"num_long_servers": 1, "length_ranked": False}, "needs `length_ranked=True`"),
        ({"schedule": "grpo", "num_long_servers": 1}, "needs `length_ranked=True`"),
        ({"long_share": 1.0}, "must be between 0 and 1"),
    ],
)
def test_refused(kwargs, words):
    with pytest.raises(ConfigurationError, match=words):
        ScheduleSettings(**kwargs)
