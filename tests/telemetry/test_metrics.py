"""Compares metrics of rollouts with known values."""

from types import SimpleNamespace

import pytest
import torch

from trl_darts.checks import LONG_END_ROLLOUTS
from trl_darts.policy import Forecast
from trl_darts.scheduling import Admission, GroupSummary, Occupancy, RolloutResult, TailSwitch
from trl_darts.scheduling.types import Timeline
from trl_darts.telemetry.metrics import RolloutRecord, TailRecord, ratio_metrics, rollout_metrics
from trl_darts.telemetry.rollout_log import RolloutLog


ONE = SimpleNamespace(gather=lambda values: values)


def output(ratios: list[list[float]], used: list[list[float]], **fields) -> dict:
    logs = torch.tensor(ratios).log()
    return {
        "completion_mask": torch.ones_like(logs, dtype=torch.long),
        "old_per_token_logps": logs - 1,
        "sampling_per_token_logps": torch.full_like(logs, -1.0),
        "importance_sampling_ratio": torch.tensor(used),
        **fields,
    }


def test_on_policy_rows_need_no_correction():
    metrics = ratio_metrics(output([[1.0, 1.0], [1.0, 1.0]], [[1.0], [1.0]]), ONE)
    assert metrics == {
        "darts/staleness/effective_sample_share": pytest.approx(1),
        "darts/staleness/chi_square": pytest.approx(0, abs=1e-6),
        "darts/staleness/altered_share": 0,
    }


def test_rows_count_as_a_whole_where_trl_has_one_ratio_for_each():
    metrics = ratio_metrics(output([[0.5, 1.0], [2.0, 2.0]], [[0.5], [0.0]]), ONE)  # ratios 0.5 and 4, one masked
    assert list(metrics.values()) == pytest.approx([4.5**2 / (2 * 16.25), 16.25 / 2 - 1, 0.5], rel=1e-5)


def test_tokens_without_weight_or_log_prob_are_left_out_or_have_ratio_1():
    mask = torch.tensor([[1, 1, 0]])
    sampling = torch.tensor([[-1.0, float("nan"), -1.0]])
    fields = {"completion_mask": mask, "sampling_per_token_logps": sampling}
    metrics = ratio_metrics(output([[3.0, 7.0, 9.0]], [[2.0, 1.0, 1.0]], **fields), ONE)  # 3 was truncated to 2
    assert list(metrics.values()) == pytest.approx([4**2 / (2 * 10), 10 / 2 - 1, 0.5], rel=1e-5)


def test_nothing_is_said_of_what_is_not_corrected():
    plain = output([[1.0]], [[1.0]])
    assert ratio_metrics({**plain, "completion_mask": torch.zeros(1, 1)}, ONE) == {}
    del plain["importance_sampling_ratio"]
    assert ratio_metrics(plain, ONE) == {}


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


def test_what_tail_servers_brought_beside_what_was_predicted():
    timeline = Timeline()
    timeline.add(0.0, 2)
    timeline.add(50.0, 0)
    switch = TailSwitch(3, Forecast(here=60.0, there=25.0), begun=30.0, num_moved=2, num_tokens=80)
    result = RolloutResult([], [], timeline, tail_switch=switch)
    both = TailRecord.of(result).then(TailRecord.of(RolloutResult([], [], timeline)))
    assert both.metrics() == {
        "darts/tail/switches": 1,
        "darts/tail/moved_candidates": 2,
        "darts/tail/reread_tokens": 80,
        "darts/tail/seconds": 20,
        "darts/tail/predicted_gain_seconds": 35,
        "darts/tail/gain_seconds": 40,
        "darts/tail/prediction_error": pytest.approx(0.2),
    }
    switch.forecast = None
    assert set(TailRecord.of(result).then(both).metrics()) == {
        f"darts/tail/{name}" for name in ("switches", "moved_candidates", "reread_tokens", "seconds")
    }


def test_a_batch_whose_groups_were_all_dropped_has_the_counts_that_are_known():
    """In a rollout without an end, the rows of the last batch take their place."""
    timeline = Timeline()
    timeline.add(0.0, 4)
    timeline.add(50.0, 4)
    result = RolloutResult([], [], timeline, dropped={0: "too long", 1: "too long"})
    record = RolloutRecord(Admission([]), [], Occupancy.of(result), 2, num_dropped=2)
    for combined, dropped in ((record, 2.0), (record.then(record), 4.0)):
        metrics = rollout_metrics(combined)
        assert metrics["darts/rollout/dropped_groups"] == dropped
        assert metrics["darts/rollout/generated_tokens"] == metrics["darts/rollout/kept_tokens"] == 0.0
        assert not [name for name in metrics if not name.startswith("darts/rollout/")]


def test_what_the_log_keeps_does_not_grow_with_the_rollouts(tmp_path):
    args = SimpleNamespace(keeps_long_end=False, save_rollout_trace=False, output_dir=str(tmp_path))
    log = RolloutLog(args, True, None)
    record = RolloutRecord(Admission([3]), [group("sss")], Occupancy(4, 9.0, 9.0), 2, long_end_below=4)
    for step in range(3 * LONG_END_ROLLOUTS):
        log.add(record, step, 0)
    assert log._long_ends == [1.0] * LONG_END_ROLLOUTS
