"""The benchmarks of SmolLM2 without its servers: what they store, where they go on, and their tables."""

import pytest

from benchmarks import smollm2, smollm2_rollouts
from benchmarks.harness import parse, run_missing, store
from benchmarks.lines import read
from benchmarks.smollm2_rollouts import GROUPS, MACHINES, ROWS, Recorded
from trl_darts import DARTSGRPOConfig


@pytest.fixture
def lines(rng):
    drawn = rng.lognormal(3, 1, (MACHINES["cpu"].num_prompts, 16)).astype(int) + 1
    return [
        {"prompt": place, "family": "gcd", "lengths": own.tolist(), "cut": (own > 200).tolist(), "rewards": [0.0] * 16}
        for place, own in enumerate(drawn)
    ]


def test_every_row_is_in_one_group_beside_grpo():
    names = [row.name for row in GROUPS["main"] + GROUPS["others"]]
    assert sorted(names) == sorted(["grpo", *(row.name for row in ROWS)])


def test_a_later_call_runs_the_missing_repeats_alone(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2_rollouts, "recorded_lengths", lambda machine: lines)
    benchmark = smollm2_rollouts.BENCHMARK
    options = parse(benchmark, ["--paces", "bare, simulated,paced, simulated", "--repeats", "0"])
    run_missing(benchmark, options, tmp_path)
    stored = read(tmp_path / smollm2_rollouts.ROLLOUTS)
    assert len(stored) == 4  # two paces, two groups
    monkeypatch.setattr(smollm2_rollouts, "train", None)
    run_missing(benchmark, options, tmp_path)
    assert read(tmp_path / smollm2_rollouts.ROLLOUTS) == stored
    assert all(len(row["seconds"]) == 4 and min(row["seconds"]) > 0 for row in stored[0]["rows"].values())
    caption, table = smollm2_rollouts.rollouts_table(stored, "paced").split("\n\n")
    assert caption.startswith("0 repeats on the server and 1 simulated")
    assert table.splitlines()[2] == "| grpo | – | – | 1 | 1 |"
    assert len(table.splitlines()) == 2 + len(ROWS)


def test_prompts_recur_after_all_were_used(lines):
    first, fifth = Recorded.of(lines, 0, MACHINES["cpu"]), Recorded.of(lines, 4, MACHINES["cpu"])
    assert [line["prompt"] for line in first.lines] == [*range(16)] == [line["prompt"] for line in fifth.lines]
    assert Recorded.of(lines, 3, MACHINES["cpu"]).lines[-1]["prompt"] == MACHINES["cpu"].num_prompts - 1


def test_lengths_by_family(lines):
    lines[0]["rewards"] = [1.0] + [0.0] * 15
    assert smollm2_rollouts.lengths_table(lines).splitlines()[-1].startswith("| all | 0% | 2% | ")


def leave_run(results, arm, seconds, num_steps=24):
    ends = {"accuracy": 0.25, "tokens": 40.0, "p99": 250.0, "cut": 0.1}
    held_out = {} if arm == smollm2.TRL else {"0": ends, "24": ends | {"accuracy": 0.5}}
    steps = [{"step_seconds": seconds, "darts/rollout/seconds": seconds / 2}] * num_steps
    path = results / smollm2.file_of({"machine": "cpu", "arm": arm, "seed": 0})
    store(path, {"arm": arm, "seed": 0, "settings": smollm2.ARMS[arm], "steps": steps, "held_out": held_out})


def test_an_arm_is_compared_over_as_many_steps_with_grpo_of_its_seed(tmp_path):
    leave_run(tmp_path, "default", 10.0)
    assert "| default (1) | 24 | 10 | – | – |" in smollm2.speed_table(tmp_path, "cpu")
    leave_run(tmp_path, "grpo", 20.0, num_steps=8)
    leave_run(tmp_path, "trl", 40.0, num_steps=3)
    table = smollm2.speed_table(tmp_path, "cpu")
    assert "| default (1) | 24 | 10 | 2.00 | 2.00 |" in table
    assert "| trl (1) | 3 | 40 | 0.50 | 0.50 |" in table
    assert "| default (1) | 0.25 | 0.5 | 40 | 0.1 |" in smollm2.learned_table(tmp_path, "cpu")


def test_a_finished_run_is_left_alone(tmp_path):
    leave_run(tmp_path, "grpo", 20.0)
    runs = smollm2.BENCHMARK.runs(parse(smollm2.BENCHMARK, ["--arms", "grpo,default", "--seeds", "0"]))
    missing = [run["arm"] for run in runs if smollm2.BENCHMARK.stored(tmp_path, run) is None]
    assert missing == ["default"]


def test_arms_are_settings():
    server = {"use_vllm": True, "vllm_mode": "server", "use_cpu": True, "bf16": False}
    assert all(DARTSGRPOConfig(**server, **settings) for settings in smollm2.ARMS.values())
