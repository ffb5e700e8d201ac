"""Runs whose truth is known, read back: replayed, and as a workload."""

import numpy as np
import pandas as pd
import pytest

from tests.analysis.report.builders import write_run
from tests.analysis.simulation.builders import end_of, record
from trl_darts.analysis.report import read_run
from trl_darts.analysis.report.tables import rollouts
from trl_darts.analysis.simulation import (
    ClusterSpec,
    LogNormalLengths,
    RecordedRun,
    Workload,
)
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings
from trl_darts.telemetry.run_log import append_entry


CURVE = LatencyCurve([1, 256], [0.01, 0.02])
QUEUED = ClusterSpec(CURVE, max_num_seqs=32)  # the order of submission shows where candidates wait
WORKLOAD = Workload(LogNormalLengths(64, 200.0, 0.6, 0.5), 16, 2048, redraws=True)


@pytest.mark.parametrize(
    ("schedule", "fields"),
    [
        ("grpo", {}),
        ("darts", {}),
        ("darts", {"submit_order": "arrival"}),
        ("darts", {"long_end_patience": None}),
        ("darts", {"long_end_patience": 2.0}),
    ],
)
def test_a_replay_is_the_rollout_itself(tmp_path, schedule, fields):
    settings = ScheduleSettings(schedule, num_generations=4, **fields)
    record(tmp_path / "run", settings, WORKLOAD, QUEUED, 12)
    recorded = list(RecordedRun(tmp_path / "run").rollouts())
    assert len(recorded) == 12
    for rollout in recorded:
        result = rollout.replay(settings, QUEUED, WORKLOAD.max_completion_length)
        assert end_of(result) == pytest.approx(rollout.seconds)
        assert [group.selected for group in result.groups] == rollout.selected


@pytest.mark.parametrize("schedule", ["tail_batching", "partial_rollout", "sorted"])
def test_schedules_that_look_ahead_leave_a_workload_but_no_replay(tmp_path, schedule):
    settings = ScheduleSettings(schedule, num_generations=4)
    record(tmp_path / "run", settings, WORKLOAD, QUEUED, 8)
    workload, rows = RecordedRun(tmp_path / "run").workload()
    assert (workload.prompts_per_step, workload.max_completion_length, rows) == (16, 2048, 4)
    with pytest.raises(ConfigurationError, match=rf"`schedule` \('{schedule}'\) can't be replayed"):
        next(RecordedRun(tmp_path / "run").rollouts()).replay(settings, QUEUED, WORKLOAD.max_completion_length)


@pytest.mark.parametrize("schedule", ["grpo", "darts", "tail_batching", "partial_rollout", "sorted"])
def test_tokens_of_a_report_are_those_that_were_decoded(tmp_path, schedule):
    truth = record(tmp_path / "run", ScheduleSettings(schedule, num_generations=4), WORKLOAD, QUEUED, 12)
    table = rollouts(read_run(tmp_path / "run"))
    assert table[["kept", "unused", "aborted"]].sum(axis=1).tolist() == truth.pool_tokens
    assert table["rows"].tolist() == [16 * 4] * 12
    # Tokens count as kept in the rollout that decoded them; the last ones may still be trained on.
    assert 0 <= sum(truth.kept_tokens) - table["kept"].sum() <= truth.buffered_tokens[-1] + max(truth.kept_tokens)
    if schedule == "partial_rollout":
        assert table["aborted"].sum() == 0
        assert table["unused"].sum() == truth.buffered_tokens[-1]


@pytest.mark.parametrize("schedule", ["grpo", "darts", "partial_rollout"])
def test_the_curve_of_a_run_is_that_of_its_engines(tmp_path, schedule):
    spec = ClusterSpec(CURVE, num_engines=2)
    record(tmp_path / "run", ScheduleSettings(schedule, num_generations=4), WORKLOAD, spec, 6)
    append_entry(tmp_path / "run", {"run": {"num_engines": 2}})
    cluster = RecordedRun(tmp_path / "run").fitted_cluster(QUEUED)
    sizes = np.array([1.0, 4, 16, 28])
    assert cluster.latency(sizes) == pytest.approx(CURVE(sizes), rel=0.06)
    assert (cluster.num_engines, cluster.max_num_seqs) == (2, None)
    assert "candidates of the run on 2 engines. It predicts the sec" in cluster.latency.metadata["fitted"]
    assert RecordedRun(tmp_path / "run").fitted_cluster(QUEUED, num_engines=3).num_engines == 3


@pytest.mark.parametrize(
    ("num_rollouts", "settings", "why"),
    [
        (2, {}, "the run's traces have too few candidates, or no times"),
        (9, {"rollout_ahead": "continuous"}, "the run's rollouts overlap (`rollout_ahead`)"),
    ],
)
def test_no_curve_of_a_run(tmp_path, num_rollouts, settings, why):
    write_run(tmp_path, traces=num_rollouts, log=num_rollouts, settings={"name": "out", **settings})
    cluster = RecordedRun(tmp_path).fitted_cluster(QUEUED)
    assert cluster == QUEUED
    assert cluster.latency.metadata == {"not_fitted": why}


def test_workload_of_a_run(tmp_path):
    """Two rollouts of two prompts: 2 rows each, and the second prompt's third candidate was aborted."""
    (tmp_path / "rollouts").mkdir()
    for step in range(2):
        rows = [
            (step, 0, 11, 0, 2, 100 + step, "stop", True, 7, 0.0, 1.0),
            (step, 0, 11, 1, 2, 200, "stop", True, 7, 0.0, 2.0),
            (step, 1, 22, 0, 3, 50, "stop", True, 9, 0.0, 0.5),
            (step, 1, 22, 1, 3, 60, "length", True, 9, 0.0, 0.6),
            (step, 1, 22, 2, 3, 40, "abort", False, 9, 0.0, 0.4),
        ]
        names = ["step", "group", "prompt_key", "candidate", "num_candidates", "length", "finish_reason", "selected"]
        names += ["num_prompt_tokens", "start_seconds", "end_seconds"]
        trace = pd.DataFrame(rows, columns=names).assign(num_carried_tokens=0, carried_over=False)
        trace = trace.assign(expected_length=trace["length"].astype(float))
        trace.to_parquet(tmp_path / "rollouts" / f"rollout_{step:05d}_00.parquet")
    workload, rows = RecordedRun(tmp_path).workload()
    assert rows == 2
    assert (workload.prompts_per_step, workload.max_completion_length, workload.prompt_tokens) == (2, 200, 8)
    assert workload.lengths.lengths == [[100, 200, 101, 200], [50, 60, 40, 50, 60, 40]]
    assert workload.lengths.censored == [[False] * 4, [False, True, True] * 2]
    (tmp_path / "rollouts" / "log.jsonl").write_text('{"run": {"max_completion_length": 60}}\n{"step": 1}\n')
    workload, rows = RecordedRun(tmp_path).workload(fixed_seconds=1.0)
    assert (workload.max_completion_length, workload.fixed_seconds, rows) == (60, 1.0, 2)


def test_a_run_without_traces_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"must be the `output_dir` of a run with `save_rollout_trace=True`"):
        RecordedRun(tmp_path).workload()
