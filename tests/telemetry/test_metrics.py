"""What a rollout's metrics mean, where a formula is not enough."""

from trl_darts.scheduling import Admission, GroupSummary, Occupancy
from trl_darts.telemetry.metrics import RolloutRecord, rollout_metrics


def group(ends: str) -> GroupSummary:
    reasons = [{"s": "stop", "l": "length", "a": "abort"}[end] for end in ends]
    return GroupSummary(0, 1, list(range(5, 5 + len(ends))), reasons, selected=[0, 1])


def test_the_long_end_is_whole_where_nothing_was_called_off():
    groups = [group("sss"), group("ssl"), group("ssa"), group("ssas"), group("ssaa")]
    metrics = {}
    for below in (0, 4, 5):
        record = RolloutRecord(Admission([3, 3, 3, 4, 4]), groups, Occupancy(4, 9.0, 9.0), 2, long_end_below=below)
        metrics[below] = rollout_metrics(record).get("darts/selection/long_end_ratio")
    assert metrics == {0: None, 4: 2 / 3, 5: 2 / 5}  # saturated groups, with four candidates, keep none
