"""When the trainer says that over-provisioning can't pay."""

import logging
from types import SimpleNamespace

import pytest
from accelerate import PartialState

from trl_darts.metrics import RolloutRecord
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import Admission, GroupSummary, Occupancy
from trl_darts.worth import NUM_ROLLOUTS, WorthCheck, warn_of_other_model


FLAT, STEEP = LatencyCurve([1, 1000], [1.0, 1.0]), LatencyCurve([1, 1000], [1.0, 1000.0])
CALM = ([10, 10, 10, 10, 10, 10], "stop stop stop stop stop stop")
# The default's way to end a rollout: what is still being written when all prompts have four is called off.
ABORTED = ([8, 9, 10, 11, 11, 11], "stop stop stop stop abort abort")
PLAIN = ([10, 10, 10, 10], "stop stop stop stop")


@pytest.fixture(autouse=True)
def state():
    """Accelerate's loggers ask it whether this process is the first one."""
    PartialState()


def words(caplog, curve, lengths, reasons) -> list[str]:
    check = WorthCheck(curve, num_engines=1, max_completion_length=64)
    summary = GroupSummary(0, 0, lengths, reasons.split(), [0, 1, 2, 3])
    record = RolloutRecord(Admission([len(lengths)] * 8), [summary] * 8, Occupancy(1, 1.0, 1.0), num_generations=4)
    with caplog.at_level(logging.WARNING, logger="trl_darts"):
        for _ in range(NUM_ROLLOUTS - 1):
            check.observe(record)
        assert not caplog.records
        for _ in range(NUM_ROLLOUTS):
            check.observe(record)
    return [entry.getMessage() for entry in caplog.records]


@pytest.mark.parametrize(("lengths", "reasons"), [CALM, ABORTED], ids=["none aborted", "the last ones aborted"])
def test_where_each_candidate_costs_as_much_as_the_first(caplog, lengths, reasons):
    (message,) = words(caplog, STEEP, lengths, reasons)
    assert "times as fast as one with `num_generations` candidates (median of the first 8)" in message


@pytest.mark.parametrize("pool", [CALM, ABORTED], ids=["none aborted", "the last ones aborted"])
def test_where_further_candidates_are_free(caplog, pool):
    assert not words(caplog, FLAT, *pool)


def test_a_tail_that_was_cut_off_is_not_taken_for_short(caplog):
    """Each costs as much as the first, and still it pays to call off what is far longer than the others."""
    assert not words(caplog, STEEP, [4, 4, 16, 16, 4, 4], "stop stop abort abort stop stop")


def test_without_over_provisioning_there_is_nothing_to_say(caplog):
    assert not words(caplog, STEEP, *PLAIN)


@pytest.mark.parametrize(
    ("measured", "trained", "warns"),
    [
        ("some/Other-7B", "some/Tiny-1B", True),
        ("/models/tiny-1b/", "some/Tiny-1B", False),
        (None, "some/Tiny-1B", False),
        ("some/Tiny-1B", None, False),
    ],
)
def test_a_curve_of_another_model(caplog, measured, trained, warns):
    curve = LatencyCurve([1], [1.0], {"model": measured} if measured else {})
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path=trained))
    with caplog.at_level(logging.WARNING, logger="trl_darts"):
        warn_of_other_model(curve, "latency.json", model)
        warn_of_other_model(None, None, model)
    words = "`latency_curve` ('latency.json') was measured with 'some/Other-7B', and the model is 'some/Tiny-1B'"
    assert [words in entry.getMessage() for entry in caplog.records] == [True] * warns
