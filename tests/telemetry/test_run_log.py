"""Tests a run's log: the later of two entries of a step counts, and notes name missing or broken parts."""

import json

import pytest

from tests.analysis.report.builders import SETTINGS, make_entry, write_run
from trl_darts.errors import ConfigurationError
from trl_darts.telemetry.run_log import LOG_FILE, read_evaluations, read_log


def test_last_attempt_counts(tmp_path):
    first = [{"run": SETTINGS}, *(make_entry(step, reward=0.0) for step in range(1, 7))]
    again = [{"run": {**SETTINGS, "num_longest": 2}}, *(make_entry(step, reward=1.0) for step in (4, 5, 5))]
    settings, log, restarted, notes = read_log(write_run(tmp_path, log=[*first, *again], settings=None))
    assert log["reward"].to_dict() == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    assert settings["num_longest"] == 2
    assert restarted
    assert notes == ["The run was restarted with other settings. The last ones are shown."]


def test_entries_of_evaluation_and_end_are_no_steps(tmp_path):
    lines = [make_entry(2), {"step": 2, "eval_reward": 9.0}, {"step": 2, "train_runtime": 3.0}]
    _, log, _, _ = read_log(write_run(tmp_path, log=lines))
    assert len(log) == 1
    assert "eval_reward" not in log


@pytest.mark.parametrize(("steps", "widths"), [([1, 10, 20], [1, 9, 10]), ([30, 40], [10, 10]), ([5], [5])])
def test_an_entry_stands_for_the_steps_since_the_one_before(tmp_path, steps, widths):
    _, log, _, _ = read_log(write_run(tmp_path, log=[make_entry(step) for step in steps]))
    assert log["num_steps"].tolist() == widths  # a run that was resumed from another directory starts later


def test_newest_checkpoint_stands_in_for_the_log(tmp_path):
    for step in (9, 10):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        state.write_text(json.dumps({"log_history": [make_entry(i) for i in range(1, step + 1)]}))
    settings, log, _, notes = read_log(tmp_path)
    assert (settings, len(log)) == ({}, 10)
    assert "checkpoint-10" in notes[0]


def test_lines_that_can_not_be_read_are_noted(tmp_path):
    write_run(tmp_path, log=2)
    with (tmp_path / "rollouts" / LOG_FILE).open("a") as file:
        file.write('{"step": 3, "rew')
    _, log, _, notes = read_log(tmp_path)
    assert len(log) == 2
    assert notes == ["log.jsonl: 1 lines can't be read and are left out, the first is line 4."]


@pytest.mark.parametrize(
    ("file", "content", "rule"),
    [
        (f"rollouts/{LOG_FILE}", "not json\n", "one JSON object per line, and line 1 has none. Remove the file"),
        ("checkpoint-1/trainer_state.json", "{}", "must be a trainer's state.* Remove this checkpoint"),
    ],
)
def test_what_is_no_log(tmp_path, file, content, rule):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigurationError, match=rule) as raised:
        read_log(tmp_path)
    assert str(tmp_path / file) in str(raised.value)


def test_evaluations_are_read_by_step_without_those_that_a_resumed_run_did_again(tmp_path):
    def evaluated(step, reward):
        return {"step": step, "eval_loss": 0.0, "eval_reward": reward}

    first = [{"run": SETTINGS}, evaluated(0, 0.1), make_entry(1), evaluated(2, 0.2), evaluated(4, 0.9)]
    again = [{"run": SETTINGS}, make_entry(3), evaluated(4, 0.3), evaluated(4, 0.5)]  # two data sets
    write_run(tmp_path, log=[*first, *again], settings=None)
    assert read_evaluations(tmp_path).to_dict() == {0: 0.1, 2: 0.2, 4: pytest.approx(0.4)}
    assert read_evaluations(tmp_path / "none").empty
