"""Lengths approximated from TRL's logged completions, of its own trainer and of files written by hand."""

import json
import logging
import shutil

import pandas as pd
import pytest

from tests.builders import letters_dataset
from tests.test_equivalence import trained
from trl_darts import record_lengths
from trl_darts.analysis.simulation import RecordedRun
from trl_darts.telemetry.traces import read_traces
from trl_darts.telemetry.trl_completions import read_lengths


def write_completions(directory, completions, step=1, prompts=None):
    (directory / "completions").mkdir(parents=True, exist_ok=True)
    rows = {"step": step, "prompt": prompts or ["a"] * len(completions), "completion": completions}
    pd.DataFrame(rows).to_parquet(directory / "completions" / f"completions_{step:05d}.parquet")


def write_log(directory, **metrics):
    checkpoint = directory / "checkpoint-1"
    checkpoint.mkdir()
    history = {"log_history": [{"step": 1, "reward": 0.0, **metrics}]}
    (checkpoint / "trainer_state.json").write_text(json.dumps(history))


def test_the_mean_and_the_cut_off_rows_are_those_of_the_log(tmp_path):
    write_completions(tmp_path, ["x" * 10, "x" * 20, "x" * 60, "x" * 30], prompts=["a", "a", "b", "b"])
    write_log(tmp_path, **{"completions/mean_length": 12.0, "completions/clipped_ratio": 0.25})
    traces, notes = read_lengths(tmp_path)
    assert traces["length"].tolist() == [4, 8, 24, 12]
    assert traces["finish_reason"].tolist() == ["stop", "stop", "length", "stop"]
    assert traces["group"].tolist() == [0, 0, 1, 1]
    assert traces["candidate"].tolist() == [0, 1, 0, 1]
    assert traces["prompt_key"].nunique() == 2
    assert notes[-1] == "Lengths are approximated from the text of 4 logged completions and the means in the log."


def test_without_a_log_a_token_has_four_characters(tmp_path, caplog):
    conversation = [{"role": "assistant", "content": "x" * 40}]
    write_completions(tmp_path, [conversation, [{"role": "assistant", "content": ""}]])
    with caplog.at_level(logging.WARNING):
        workload, rows = RecordedRun(tmp_path).workload()
    assert workload.lengths.lengths == [[10, 1]]
    assert (workload.prompts_per_step, rows) == (1, 2)
    assert "4 characters per token, without a log" in caplog.text


def test_rows_that_were_chosen_are_no_lengths(tmp_path):
    write_completions(tmp_path, ["x"])
    write_log(tmp_path, **{"darts/budget/total": 9.0})
    traces, notes = read_lengths(tmp_path)
    assert traces.empty
    assert notes[-1] == "Logged completions are not used: they are the rows that were kept."


def test_files_of_trls_trainer(model_dir, tmp_path, tokenizer):
    """Against the lengths that were recorded. All tokens of this model have about as many characters."""
    settings = {"log_completions": True, "num_completions_to_print": 0, "save_strategy": "steps", "save_steps": 3}
    trained(model_dir, tmp_path, None, prepare=record_lengths, train_dataset=letters_dataset(), **settings)
    recorded, _ = read_traces(tmp_path)
    shutil.rmtree(tmp_path / "rollouts")
    found, _ = read_lengths(tmp_path)
    same = ["step", "group", "candidate"]
    assert found[same].equals(recorded[same])
    assert found.groupby("prompt_key").ngroups == recorded.groupby("prompt_key").ngroups
    steps = recorded.groupby("step")
    error = (found["length"] - recorded["length"]).abs()
    assert error.mean() < 0.2 * recorded["length"].mean()
    assert found.groupby("step")["length"].mean().tolist() == pytest.approx(steps["length"].mean().tolist(), rel=0.05)
