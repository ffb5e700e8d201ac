"""Comparisons over seeds, sweeps, and the command."""

import csv
import math

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from trl_darts.cli import app
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings
from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, RecordedLengths, Workload, recorded_rollouts
from trl_darts.analysis.simulation import Estimate, compare
from trl_darts.analysis.simulation import recorded_workload
from trl_darts.simulation.verdict import verdict


FLAT = ClusterSpec(LatencyCurve([1], [0.01]))
STEEP = ClusterSpec(LatencyCurve([1, 512], [0.001, 0.512]))  # a candidate costs as much as the first


def compare_two(lengths, cluster, num_seeds=3, **fields):
    settings = {
        "grpo": ScheduleSettings("grpo", num_generations=4),
        "darts": ScheduleSettings("darts", num_generations=4, **fields),
    }
    return compare(Workload(lengths, 16, 4096), settings, cluster, num_steps=20, num_seeds=num_seeds)


def test_interval_is_students():
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.half_width) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert math.isinf(Estimate.of([1.0]).half_width)
    rng = np.random.default_rng(0)
    hits = [abs(Estimate.of(x).mean) <= Estimate.of(x).half_width for x in rng.standard_normal((2000, 5))]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.02)


def test_heavy_tails_on_flat_latency_gain_and_the_verdict_says_so():
    lengths = LogNormalLengths(64, median=200.0, intra_prompt_std=1.0)
    grpo, darts = outcomes = compare_two(lengths, FLAT, num_seeds=8, max_num_generations=6)
    assert grpo.speedup == Estimate(1.0, 0.0)
    assert darts.speedup.low > 1.2
    assert darts.wasted_share.mean > 0.1
    assert verdict(outcomes).startswith("darts is the fastest")


def test_a_sure_gain_on_short_rows_is_doubted():
    lengths = LogNormalLengths(64, median=200.0, intra_prompt_std=1.5)
    outcomes = compare_two(lengths, FLAT, num_seeds=8, max_num_generations=12, target_redundancy=3.0)
    assert "looked at the reward" in verdict(outcomes)


def test_where_candidates_cost_and_nobody_is_late_it_says_stay():
    lengths = RecordedLengths([[100, 101]] * 32, [[False, False]] * 32)
    outcomes = compare_two(lengths, STEEP)
    assert outcomes[1].speedup.high < 1
    assert verdict(outcomes).startswith("Stay with grpo: nothing is faster.")


def test_verdict_gives_no_reason_that_does_not_hold():
    lengths = RecordedLengths([[100, 101]] * 32, [[False, False]] * 32)
    darts, grpo = (ScheduleSettings(name, num_generations=4, max_num_generations=8) for name in ("darts", "grpo"))
    slow = {"grpo": grpo, "darts": darts}
    workload = Workload(lengths, 16, 4096)
    assert "Stay with grpo" in verdict(compare(workload, slow, STEEP, num_steps=5, num_seeds=1))
    fewer = {"grpo": grpo, "grpo, 2 rows": ScheduleSettings("grpo", num_generations=2)}
    words = verdict(compare(workload, fewer, STEEP, num_steps=5, num_seeds=3))
    assert "trains on 2 rows per prompt, and grpo on 4" in words


def test_few_seeds_are_no_evidence():
    lengths = LogNormalLengths(64, median=200.0, intra_prompt_std=1.0)
    assert "Simulate several seeds" in verdict(compare_two(lengths, FLAT, num_seeds=1, max_num_generations=6))


def test_verdict_names_old_tokens_and_batches_of_one_length():
    lengths = LogNormalLengths(128, median=200.0, intra_prompt_std=0.6)
    settings = {
        "grpo": ScheduleSettings("grpo", num_generations=4),
        "partial": ScheduleSettings("partial_rollout", num_generations=4),
        "sorted": ScheduleSettings("sorted", num_generations=4, sorted_mode="partial", sorted_grouped=False),
    }
    grpo, partial, starving = compare(Workload(lengths, 16, 4096), settings, FLAT, num_steps=16, num_seeds=3)
    words = verdict([grpo, partial])
    assert f"an older policy sampled {100 * partial.off_policy_share.mean:.0f} % of its tokens" in words
    assert "overtake" not in words
    words = verdict([grpo, starving])
    assert f"here for up to {starving.longest_wait:.0f} steps" in words
    assert "its batches are of short or of long answers, their mean lengths differ by ±" in words
    assert starving.batch_length_spread.mean > 3 * grpo.batch_length_spread.mean
    assert "older policy" not in verdict([grpo, *compare_two(lengths, FLAT)[1:]])


def test_tokens_that_wait_are_not_wasted():
    lengths = LogNormalLengths(128, median=200.0)
    settings = {"partial": ScheduleSettings("partial_rollout", num_generations=4)}
    (partial,) = compare(Workload(lengths, 16, 4096), settings, FLAT, num_steps=3, num_seeds=2)
    assert all(run.buffered_tokens[-1] > 0 for run in partial.runs)
    assert partial.wasted_share.mean == pytest.approx(0.0, abs=1e-12)
    assert partial.row()["buffered_tokens"] > 0


def test_row_has_what_the_table_shows():
    """Not the means over the steps: those of all tokens, and of the prompt that waited longest."""
    settings = {"partial": ScheduleSettings("partial_rollout", num_generations=4)}
    (partial,) = compare(Workload(LogNormalLengths(128), 16, 4096), settings, FLAT, num_steps=8, num_seeds=2)
    assert partial.off_policy_share.mean != pytest.approx(partial.estimate("off_policy_share").mean, rel=1e-3)
    assert partial.longest_wait > partial.estimate("longest_wait").mean
    row = partial.row()
    assert row["off_policy_share"] == partial.off_policy_share.mean
    assert row["off_policy_share_ci95"] == partial.off_policy_share.half_width
    assert row["longest_wait"] == partial.longest_wait
    assert "longest_wait_ci95" not in row
    assert row["bubble_ratio"] == partial.estimate("bubble_ratio").mean


@pytest.fixture
def run_dir(tmp_path):
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
    return tmp_path


def test_workload_of_a_run(run_dir):
    workload, rows = recorded_workload(run_dir)
    assert rows == 2
    assert (workload.prompts_per_step, workload.max_completion_length, workload.prompt_tokens) == (2, 200, 8)
    assert workload.lengths.lengths == [[100, 200, 101, 200], [50, 60, 40, 50, 60, 40]]
    assert workload.lengths.censored == [[False] * 4, [False, True, True] * 2]
    (run_dir / "rollouts" / "log.jsonl").write_text('{"run": {"max_completion_length": 60}}\n{"step": 1}\n')
    workload, rows = recorded_workload(run_dir, num_generations=5, more={"fixed_seconds": 1.0})
    assert (workload.max_completion_length, workload.fixed_seconds, rows) == (60, 1.0, 5)
    with (run_dir / "rollouts" / "log.jsonl").open("a") as file:  # started again: the last settings count
        file.write('broken\n{"run": {"max_completion_length": 70}}\n{"step": 2}\n')
    assert recorded_workload(run_dir)[0].max_completion_length == 70
    (run_dir / "rollouts" / "log.jsonl").write_text("broken\n")
    with pytest.raises(ConfigurationError, match="must have one JSON object per line"):
        recorded_workload(run_dir)


@pytest.mark.parametrize("read", [recorded_workload, lambda directory: list(recorded_rollouts(directory))])
def test_a_run_without_traces_is_refused(tmp_path, read):
    with pytest.raises(ConfigurationError, match=r"must be the `output_dir` of a run with `save_rollout_trace=True`"):
        read(tmp_path)


SMALL = ["simulate", "--steps", "3", "--seeds", "2", "--prompts-per-step", "8", "--median-length", "50"]


def test_command_prints_a_table_and_writes_both_files(tmp_path):
    result = CliRunner().invoke(
        app, [*SMALL, "--sweep", "max_num_generations=10,12", "--output", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert "max_num_generations=12" in result.output
    assert "assumed latency curve" in result.output
    rows = list(csv.DictReader((tmp_path / "out" / "simulation.csv").open()))
    assert [row["setting"] for row in rows] == [
        "grpo", "darts, max_num_generations=10", "darts, max_num_generations=12"
    ]  # fmt: skip
    assert float(rows[0]["speedup"]) == 1.0
    assert float(rows[1]["step_seconds"]) > 0
    assert (tmp_path / "out" / "simulation.png").stat().st_size > 10_000


def test_command_with_schedules_that_look_ahead():
    names = "grpo,tail_batching,partial_rollout,sorted"
    result = CliRunner().invoke(
        app, [*SMALL, "--schedule", names, "--sweep", "sorted_mode=partial"], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.output
    for word in ("tail_batching", "sorted_mode=partial", "defer-", "policy"):
        assert word in result.output
    plain = CliRunner().invoke(app, [*SMALL], env={"COLUMNS": "120"})
    assert "defer-" not in plain.output


def test_command_on_a_recorded_run(run_dir, tmp_path):
    curve = tmp_path / "latency.json"
    LatencyCurve([1, 8], [0.01, 0.02]).save(curve)
    options = ["simulate", "--trace", str(run_dir), "--latency-curve", str(curve), "--steps", "3", "--seeds", "2"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "of 2 prompts" in result.output
    assert "assumed" not in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "/nowhere"], "`--trace` ('/nowhere') must be the `output_dir` of a run"),
        (["--latency-curve", "/nowhere.json"], "must name a JSON file with a latency curve"),
        (["--schedule", "best"], "`--schedule` ('best') must be one or several of 'grpo', 'darts'"),
        (["--schedule", ","], "`--schedule` (empty)"),
        (["--sweep", "num_longest=9"], "`num_longest` (9) must be at least 0"),
        (["--sweep", "sorted_mode=partial"], "(sorted_mode=partial) has no effect with `--schedule` (grpo, darts)"),
        (["--schedule", "grpo,sorted", "--sweep", "sorted_group_batches=1"], "`sorted_group_batches` (1) must be at"),
        (["--steps", "0"], "`--steps` (0) must be at least 1"),
        (["--seeds", "0"], "`--seeds` (0) must be at least 1"),
        (["--prompts-per-step", "99999"], "`prompts_per_step` (99999)"),
        (["--num-engines", "0"], "`num_engines` (0) must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_code_2(options, words):
    result = CliRunner().invoke(app, ["simulate", "--steps", "2", "--seeds", "1", *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
