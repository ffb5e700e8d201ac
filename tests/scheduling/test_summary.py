"""Compares occupancy and bubble ratio with values computed by hand."""

import pytest

from tests.stub_engine import StubEngine
from trl_darts.scheduling import GroupPlan, Occupancy, Scheduler, ScheduleSettings, bubble_ratio


def occupancy(lengths: list[int]) -> Occupancy:
    scheduler = Scheduler(ScheduleSettings("grpo", len(lengths)).policies(), len(lengths))
    return Occupancy.of(StubEngine({0: lengths}).run(scheduler, [GroupPlan(0, len(lengths))]))


def test_bubble_ratio_is_equation_4():
    # Four slots, 10 seconds: (4 − 4)·2 + (4 − 3)·3 + (4 − 1)·5 = 18 idle of 40.
    busy = occupancy([2, 5, 5, 10])
    assert (busy.peak, busy.area, busy.seconds) == (4, 22.0, 10.0)
    assert bubble_ratio(busy) == pytest.approx(18 / 40)
    assert bubble_ratio(occupancy([7, 7, 7])) == 0.0
    assert bubble_ratio(Occupancy(0, 0.0, 0.0)) == 0.0
