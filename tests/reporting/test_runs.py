"""
Reading runs.

Invariants: what is missing is noted; what can't be used ends in one line that names the argument, its value, the rule
and the remedy.
"""

import json

import pandas as pd
import pytest

from trl_darts.errors import ConfigurationError
from trl_darts.logs import LOG_FILE
from trl_darts.reporting import read_run, read_runs

from .builders import SETTINGS, make_entry, make_trace, write_run


def header(**settings):
    return {"run": {**SETTINGS, **settings}}


def test_log_and_traces_count_steps_from_one(tmp_path):
    run = read_run(write_run(tmp_path / "run", traces=3, log=3))
    assert run.name == "run"
    assert run.settings == SETTINGS
    assert list(run.log.index) == [1, 2, 3]
    assert sorted(set(run.traces["step"])) == [1, 2, 3]
    assert run.num_steps == 3
    assert list(run.log["num_steps"]) == list(run.log["num_rollouts"]) == [1, 1, 1]
    assert run.notes == ()


def test_name_of_the_log_is_the_trainers():
    from trl_darts import callbacks

    assert LOG_FILE == callbacks.LOG_FILE


def test_last_attempt_counts(tmp_path):
    first = [header(), *(make_entry(step, reward=0.0) for step in range(1, 7))]
    lines = [*first, header(num_longest=2), *(make_entry(step, reward=1.0) for step in (4, 5))]
    run = read_run(write_run(tmp_path, traces=6, log=lines, settings=None))
    assert list(run.log["reward"]) == [0, 0, 0, 1, 1]
    assert run.settings["num_longest"] == 2
    assert sorted(set(run.traces["step"])) == [1, 2, 3, 4, 5]
    assert "steps 6 to 6 are left out" in run.notes[1]
    assert "other settings" in run.notes[0]


def test_of_two_entries_of_a_step_the_later_counts(tmp_path):
    run = read_run(write_run(tmp_path, log=[make_entry(1, reward=0.0), make_entry(1, reward=1.0)]))
    assert list(run.log["reward"]) == [1.0]


def test_entries_of_evaluation_and_end_are_no_steps(tmp_path):
    lines = [make_entry(2), {"step": 2, "eval_reward": 9.0}, {"step": 2, "train_runtime": 3.0}]
    run = read_run(write_run(tmp_path, log=lines))
    assert len(run.log) == 1
    assert "eval_reward" not in run.log


def test_an_entry_stands_for_the_steps_since_the_one_before(tmp_path):
    run = read_run(write_run(tmp_path, log=[make_entry(1), make_entry(10), make_entry(20)]))
    assert list(run.log["num_steps"]) == [1, 9, 10]
    resumed = read_run(write_run(tmp_path / "resumed", log=[make_entry(30), make_entry(40)]))
    assert list(resumed.log["num_steps"]) == [10, 10]


def test_rollouts_per_entry_are_counted_in_traces(tmp_path):
    names = ["rollout_00000_00", "rollout_00000_01", "rollout_00001_00"]
    traces = {f"{name}.parquet": make_trace(step=int(name[8:13])) for name in names}
    lines = [make_entry(1), make_entry(2), {"step": 3, "step_time": 5.0, "reward": 0.0}]
    run = read_run(write_run(tmp_path, traces=traces, log=lines))
    assert list(run.log["num_rollouts"]) == [2, 1, 0]  # the third step reuses a rollout
    assert list(run.traces.drop_duplicates(["step", "micro"])["micro"]) == [0, 1, 0]


def test_newest_checkpoint_stands_in_for_the_log(tmp_path):
    write_run(tmp_path, traces=2)
    for step in (9, 10):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        state.write_text(json.dumps({"log_history": [make_entry(i) for i in range(1, step + 1)]}))
    run = read_run(tmp_path)
    assert len(run.log) == 10
    assert run.settings == {}
    assert "checkpoint-10" in run.notes[0]


@pytest.mark.parametrize(("kwargs", "note"), [({"traces": 1}, "No log"), ({"log": 1}, "No traces")])
def test_what_is_missing_is_noted(tmp_path, kwargs, note):
    (found,) = read_run(write_run(tmp_path, **kwargs)).notes
    assert note in found


def test_what_can_not_be_read_is_noted(tmp_path):
    write_run(tmp_path, traces=2, log=2)
    (tmp_path / "rollouts" / "rollout_00002_00.parquet").write_bytes(b"PAR1 half a file")
    with (tmp_path / "rollouts" / LOG_FILE).open("a") as file:
        file.write('{"step": 3, "rew')
    make_trace(step=3).iloc[:0].to_parquet(tmp_path / "rollouts" / "rollout_00003_00.parquet")
    run = read_run(tmp_path)
    assert len(run.log) == 2
    assert "rollout_00003_00.parquet is left out. It has no candidates." in run.notes
    assert any("numbers 4" in note for note in run.notes)
    assert any("rollout_00002_00.parquet is left out" in note for note in run.notes)


def break_trace(directory):
    path = write_run(directory, traces=1) / "rollouts" / "rollout_00000_00.parquet"
    pd.read_parquet(path).drop(columns=["start_seconds", "end_seconds"]).to_parquet(path)


def break_parquet(directory):
    (write_run(directory) / "rollouts" / "rollout_00000_00.parquet").write_bytes(b"nothing")


def break_log(directory):
    (write_run(directory) / "rollouts" / LOG_FILE).write_text("not json\n")


def break_state(directory):
    (directory / "checkpoint-1").mkdir(parents=True)
    (directory / "checkpoint-1" / "trainer_state.json").write_text("{}")


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda path: None, "does not exist. Check the path."),
        (lambda path: path.write_text(""), "is a file. Check the path."),
        (lambda path: path.mkdir(), "has neither rollouts/log.jsonl.*Train with `save_rollout_trace=True`"),
        (lambda path: write_run(path / "inner", traces=1), "Did you mean .*inner'"),
        (lambda path: write_run(path, log=[{"run": {}}], settings=None), "without a single finished step"),
        (break_trace, "lacks the columns start_seconds, end_seconds.*Train again"),
        (break_parquet, "must be a Parquet file.*Remove it"),
        (break_log, "one JSON object per line, and line 1 has none.*Remove the file"),
        (break_state, "a trainer's state.*Remove this checkpoint"),
    ],
)
def test_what_is_no_run(tmp_path, build, rule):
    build(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=rule) as raised:
        read_runs([tmp_path / "run"])
    message = str(raised.value)
    assert message.startswith("`run_dir`")
    assert str(tmp_path / "run") in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("directories", "names", "rule"),
    [
        (["a"] * 7, [], r"`run_dir` \(7 directories\)"),
        (["a", "a"], [], r"`run_dir` \('.*a'\) is there twice"),
        (["a", "b"], ["x"], r"`name` \(1 given\) must be given once per run \(2\)"),
        (["a", "b"], ["x", "x"], r"`name` \('x'\) is there twice"),
    ],
)
def test_names(tmp_path, directories, names, rule):
    for name in directories:
        write_run(tmp_path / name, log=1)
    with pytest.raises(ConfigurationError, match=rule):
        read_runs([tmp_path / name for name in directories], names)


def test_names_are_as_long_as_it_takes(tmp_path):
    paths = [write_run(tmp_path / parent / "out", log=1) for parent in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["a/out", "b/out"]
    assert [run.name for run in read_runs(paths, ["x", "y"])] == ["x", "y"]
