"""Candidates that are added while a rollout runs."""

import pytest

from trl_darts.engines import StubEngine
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import BubbleFilling, GroupPlan, SchedulePolicies, Scheduler, ScheduleSettings, make_policies


CALM = [10, 11, 12, 13]


def run(lengths, num_slots=6, max_num_generations=8):
    stop = make_policies("darts", 4, max_num_generations, 1, long_end_patience="auto").group_stop
    scheduler = Scheduler(SchedulePolicies(stop, refill=BubbleFilling(num_slots, max_num_generations)), 4)
    lengths = {group: [*own, *[10] * max_num_generations] for group, own in lengths.items()}  # for what is added
    return StubEngine(lengths).run(scheduler, [GroupPlan(group, 4) for group in lengths])


def test_widest_first_and_in_time():
    """Two groups wait for their last one; the wider is given the first candidates, which end long before."""
    result = run({0: [10, 11, 12, 60, 10, 10], 1: [*CALM, 10], 2: [8, 11, 12, 900, 9, 9, 9]}, num_slots=3)
    assert [len(group.candidates) for group in result.groups][1] == 4  # it was complete
    added = [len(group.candidates) - 4 for group in result.groups]
    assert added[2] >= 1
    assert result.timeline.times[-1] < 60  # neither straggler is waited for
    assert all(len(group.selected) == 4 for group in result.groups)


def test_nothing_is_added_while_engines_are_full():
    lengths = {group: [*CALM[:3], 40, 10, 10] for group in range(4)}
    assert sum(len(group.candidates) for group in run(lengths, num_slots=1).groups) == 16


def test_no_more_than_the_bound():
    result = run({0: [8, 11, 12, 900, *[800] * 20], 1: CALM, 2: CALM}, num_slots=16, max_num_generations=6)
    assert max(len(group.candidates) for group in result.groups) <= 6


def test_nothing_is_known_before_some_are_complete():
    filling = BubbleFilling(100, 8)
    assert filling.extra([], 0) == ()
    scheduler = Scheduler(SchedulePolicies(refill=filling), 4)
    assert scheduler.needs_progress
    assert len(scheduler.start([GroupPlan(0, 4)], [], 0.0)) == 0


def test_settings_need_a_curve_and_a_bounded_wait():
    with pytest.raises(ConfigurationError, match=r"`fill_bubbles` \(True\) needs a bounded wait"):
        ScheduleSettings(fill_bubbles=True, long_end_patience=None)
    settings = ScheduleSettings(fill_bubbles=True)
    with pytest.raises(ConfigurationError, match="needs `latency_curve`"):
        settings.refill(None)
    curve = LatencyCurve([1, 64, 256], [0.010, 0.0125, 0.04])
    assert settings.refill(curve, num_engines=2).num_slots == 2 * curve.knee() == 128


def test_knee():
    assert LatencyCurve([1, 100], [0.01, 0.01]).knee() > 10_000
    assert LatencyCurve([1, 2], [0.01, 0.02]).knee() == 1
    assert LatencyCurve([1, 10, 11], [0.01, 0.012, 0.02]).knee() == 10
