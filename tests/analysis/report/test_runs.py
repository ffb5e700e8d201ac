"""
Reading runs.

Invariants: what is missing is noted; what can't be used ends in one line that names the argument, its value, the rule
and the remedy.
"""

import pytest

from trl_darts.analysis.report import read_run, read_runs
from trl_darts.errors import ConfigurationError

from .builders import SETTINGS, make_entry, make_trace, write_run


def test_traces_after_the_last_logged_step_of_a_run_that_was_started_again_are_left_out(tmp_path):
    first = [{"run": SETTINGS}, *(make_entry(step) for step in range(1, 7))]
    again = [{"run": SETTINGS}, *(make_entry(step) for step in (4, 5))]
    run = read_run(write_run(tmp_path, traces=6, log=[*first, *again], settings=None))
    assert sorted(set(run.traces["step"])) == [1, 2, 3, 4, 5]
    (note,) = run.notes
    assert "steps 6 to 6 are left out" in note


def test_rollouts_per_entry_are_counted_in_traces(tmp_path):
    names = ["rollout_00000_00", "rollout_00000_01", "rollout_00001_00"]
    traces = {f"{name}.parquet": make_trace(step=int(name[8:13])) for name in names}
    lines = [make_entry(1), make_entry(2), {"step": 3, "step_time": 5.0, "reward": 0.0}, make_entry(4)]
    run = read_run(write_run(tmp_path, traces=traces, log=lines))
    assert list(run.log["num_rollouts"]) == [2, 1, 0, 1]  # the third step reuses a rollout, of the fourth is no trace


def test_what_became_of_a_carried_candidate_is_what_became_of_it_at_last(tmp_path):
    carried = make_trace().assign(carried_over=True, selected=False)
    kept = make_trace(step=1)
    traces = {"rollout_00000_00.parquet": carried, "rollout_00001_00.parquet": kept}
    run = read_run(write_run(tmp_path, traces=traces))
    own = ["kept", "unused", "kept", "kept", "kept", "aborted"]
    assert run.traces["outcome"].tolist() == own * 2
    alone = read_run(write_run(tmp_path / "alone", traces={"rollout_00000_00.parquet": carried}))
    assert set(alone.traces["outcome"]) == {"unused"}  # the run ended first


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda path: None, "does not exist. Check the path."),
        (lambda path: path.mkdir(), "or a folder with some, and has neither rollouts/log.jsonl.*Train with `save_r"),
        (lambda path: write_run(path / "too" / "deep", traces=1), "or a folder with some, and has neither"),
        (lambda path: write_run(path, log=[{"run": {}}], settings=None), "has no finished step"),
    ],
)
def test_what_is_no_run(tmp_path, build, rule):
    build(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=rule) as raised:
        read_runs([tmp_path / "run"])
    message = str(raised.value)
    assert message.startswith(f"`RUN_DIR` ('{tmp_path / 'run'}')")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("directories", "names", "rule"),
    [
        (["a"] * 7, [], r"`RUN_DIR` \(7 directories\)"),
        (["a", "a"], [], r"`RUN_DIR` \('.*a'\) must be given once"),
        (["a", "b"], ["x"], r"`--name` \(1 given\) must be given once per run \(2\)"),
        (["a", "b"], ["x", "x"], r"`--name` \('x'\) must be given once"),
    ],
)
def test_names_that_do_not_fit(tmp_path, directories, names, rule):
    for name in directories:
        write_run(tmp_path / name, log=1)
    with pytest.raises(ConfigurationError, match=rule):
        read_runs([tmp_path / name for name in directories], names)


def test_a_folder_stands_for_its_runs(tmp_path):
    """The baseline comes first: TRL's, whose settings are unknown, and GRPO's."""
    for name, settings in {"darts": SETTINGS, "z": {**SETTINGS, "schedule": "grpo"}, "trl": None}.items():
        write_run(tmp_path / "runs" / name, log=1, settings=settings)
    (tmp_path / "runs" / "picture.png").touch()
    assert [run.name for run in read_runs([tmp_path / "runs"])] == ["trl", "z", "darts"]
    other = write_run(tmp_path / "other", log=1)
    assert [run.name for run in read_runs([other, tmp_path / "runs"])] == ["other", "trl", "z", "darts"]
    assert [run.name for run in read_runs([tmp_path / "runs"], ["x", "y", "w"])] == ["x", "y", "w"]


def test_names(tmp_path):
    paths = [write_run(tmp_path / parent / "out", log=1) for parent in ("a", "b")]
    assert [run.name for run in read_runs(paths[:1])] == ["out"]
    assert [run.name for run in read_runs(paths)] == list(map(str, paths))
    assert [run.name for run in read_runs(paths, ["x", "y"])] == ["x", "y"]
