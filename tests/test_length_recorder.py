"""`record_lengths` with TRL's own trainer: its traces agree with TRL's log, and the training stays the same."""

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from trl import GRPOTrainer
from typer.testing import CliRunner

from tests.builders import letters_dataset, make_args, make_trainer
from tests.test_equivalence import assert_equal_parameters, trained
from trl_darts import record_lengths
from trl_darts.analysis.report import read_run
from trl_darts.analysis.report.tables import time_split
from trl_darts.cli import app
from trl_darts.errors import ConfigurationError
from trl_darts.scheduling import prompt_key


def check_traces(run_dir: Path, model_dir: Path, num_steps: int) -> None:
    """Compares the traces of a run on `letters_dataset` with TRL's log. Also used after a launch of two processes."""
    run = read_run(run_dir)
    assert run.settings["num_generations"] == 4
    by_step = run.traces.groupby("step")
    lengths = by_step["length"].agg(["mean", "min", "max"]).add_suffix("_length").add_prefix("completions/")
    cut_off = run.traces["finish_reason"].eq("length").groupby(run.traces["step"]).mean()
    shown = lengths.assign(**{"completions/clipped_ratio": cut_off})
    assert len(shown) == num_steps
    assert shown.to_numpy() == pytest.approx(run.log[[*shown]].to_numpy())
    assert 0 < cut_off.mean() < 1
    encode = AutoTokenizer.from_pretrained(model_dir).encode
    known = {prompt_key(encode(row["prompt"])): len(encode(row["prompt"])) for row in letters_dataset()}
    groups = run.traces.groupby(["step", "group", "prompt_key", "num_prompt_tokens"]).size()
    assert set(groups) == {4}
    assert len(groups) == len(run.traces) / 4  # a group has one prompt
    assert all(known[key] == tokens for _, _, key, tokens in groups.index)
    assert (time_split(run)[["generate", "score", "train"]] > 0).all(axis=None)


def test_traces_of_trls_trainer(model_dir, tmp_path):
    settings = {"per_device_train_batch_size": 16, "eval_strategy": "steps", "eval_steps": 2}
    recorded = trained(model_dir, tmp_path / "run", None, prepare=record_lengths, **settings)
    assert type(recorded) is GRPOTrainer
    check_traces(tmp_path / "run", model_dir, 3)
    assert not any(name.startswith("darts/") for entry in recorded.state.log_history for name in entry)
    assert_equal_parameters(recorded, trained(model_dir, tmp_path / "alone", None, **settings))
    result = CliRunner().invoke(app, ["simulate", "--trace", str(tmp_path / "run"), "--steps", "2", "--seeds", "1"])
    assert result.exit_code == 0, result.output
    assert "of 4 prompts" in result.stdout


def test_several_rollouts_of_a_step(model_dir, tmp_path):
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    trained(model_dir, tmp_path, None, prepare=record_lengths, **batches)
    files = Counter(path.name[:13] for path in (tmp_path / "rollouts").glob("*.parquet"))
    assert files == {f"rollout_0000{step}": 2 for step in range(3)}
    log = read_run(tmp_path).log
    assert (log["step_time"] > 2 * log["darts/rollout/seconds"]).all()


def test_our_trainer_records_by_itself(model_dir, tmp_path):
    trainer = make_trainer(model_dir, make_args(tmp_path))
    with pytest.raises(ConfigurationError, match=r"`trainer` \(DARTSGRPOTrainer\) must be TRL's .*save_rollout_trace"):
        record_lengths(trainer)
