"""Runs whose truth is known, read back: as a workload, replayed, and reported."""

import pytest

from tests.simulation.recording import record
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve
from trl_darts.reporting import read_run
from trl_darts.reporting.compare import compare_settings
from trl_darts.reporting.panels import rollouts
from trl_darts.scheduling import ScheduleSettings
from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, Workload, recorded_rollouts
from trl_darts.analysis.simulation import recorded_workload


CURVE = LatencyCurve([1, 256], [0.01, 0.02])
QUEUED = ClusterSpec(CURVE, max_num_seqs=32)  # the order of submission shows where candidates wait
WORKLOAD = Workload(LogNormalLengths(64, 200.0, 0.6, 0.5), 16, 2048, redraws=True)
LOOK_AHEAD = ("tail_batching", "partial_rollout", "sorted")


@pytest.mark.parametrize(
    "settings",
    [
        ScheduleSettings("grpo", num_generations=4),
        ScheduleSettings("darts", num_generations=4),
        ScheduleSettings("darts", num_generations=4, length_ranked=False),
        ScheduleSettings("darts", num_generations=4, long_end_patience=None),
        ScheduleSettings("darts", num_generations=4, long_end_patience=2.0),
    ],
    ids=["grpo", "darts", "unranked", "paper", "patience"],
)
def test_a_replay_is_the_rollout_itself(tmp_path, settings):
    record(tmp_path / "run", settings, WORKLOAD, QUEUED, 12)
    for rollout in recorded_rollouts(tmp_path / "run"):
        result = rollout.replay(settings, QUEUED, WORKLOAD.max_completion_length)
        assert result.timeline.times[-1] == pytest.approx(rollout.seconds)
        assert [group.selected for group in result.groups] == rollout.selected


@pytest.mark.parametrize(
    ("schedule", "fields"), [*((name, {}) for name in LOOK_AHEAD), ("darts", {"fill_bubbles": True})]
)
def test_what_a_trace_does_not_tell_is_not_replayed(tmp_path, schedule, fields):
    settings = ScheduleSettings(schedule, num_generations=4, **fields)
    record(tmp_path / "run", settings, WORKLOAD, QUEUED, 2)
    rollout = next(recorded_rollouts(tmp_path / "run"))
    with pytest.raises(ConfigurationError, match=rf"`schedule` \('{schedule}', .* can't be replayed"):
        rollout.replay(settings, QUEUED, WORKLOAD.max_completion_length)


@pytest.mark.parametrize("schedule", ["grpo", "darts", *LOOK_AHEAD])
def test_batch_and_rows_come_back(tmp_path, schedule):
    record(tmp_path / "run", ScheduleSettings(schedule, num_generations=4), WORKLOAD, QUEUED, 8)
    workload, rows = recorded_workload(tmp_path / "run")
    assert (workload.prompts_per_step, rows) == (16, 4)
    assert workload.max_completion_length == 2048


@pytest.mark.parametrize("schedule", ["grpo", "darts", *LOOK_AHEAD])
def test_tokens_of_a_report_are_those_that_were_decoded(tmp_path, schedule):
    truth = record(tmp_path / "run", ScheduleSettings(schedule, num_generations=4), WORKLOAD, QUEUED, 12)
    table = rollouts(read_run(tmp_path / "run"))
    decoded = table[["kept", "unused", "aborted"]].sum(axis=1)
    assert decoded.tolist() == truth.pool_tokens
    assert table["rows"].tolist() == [16 * 4] * 12
    # Tokens count as kept in the rollout that decoded them; the last ones may still be trained on.
    assert 0 <= sum(truth.kept_tokens) - table["kept"].sum() <= truth.buffered_tokens[-1] + max(truth.kept_tokens)
    if schedule == "partial_rollout":
        assert table["aborted"].sum() == 0
        assert table["unused"].sum() == truth.buffered_tokens[-1]


def test_schedules_that_start_more_prompts_did_the_same_work(tmp_path):
    names = ["grpo", *LOOK_AHEAD]
    for name in names:
        record(tmp_path / name, ScheduleSettings(name, num_generations=4), WORKLOAD, QUEUED, 6)
    settings = {s.name: s for s in compare_settings([read_run(tmp_path / name) for name in names])}
    assert settings["prompts per rollout"].values == [16] * 4
    assert not settings["prompts per rollout"].differs
