"""Tests the trainer with the transformers engine: real TRL, real model, no server."""

import json
import logging
import math
from functools import partialmethod

import pandas as pd
import pytest
import torch
from trl import GRPOConfig

from tests.builders import (
    length_reward,
    letters_dataset,
    make_args,
    make_trainer,
    rollout_logs,
)
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer, VarianceTrackerCallback
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve, LengthTracker


SECONDS = ["start_seconds", "end_seconds"]  # columns of the trace that differ between equal runs


@pytest.fixture
def curve(tmp_path):
    path = tmp_path / "latency.json"
    LatencyCurve.fit([1, 2, 4, 8, 16, 32, 64], [1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0]).save(path)
    return str(path)


def test_metrics_are_logged_and_add_up(model_dir, tmp_path):
    args = make_args(tmp_path, max_steps=4, save_rollout_trace=True)
    trainer = make_trainer(model_dir, args)
    trainer.train()
    logs = rollout_logs(trainer)
    assert len(logs) == 4
    for step, entry in enumerate(logs):
        trace = pd.read_parquet(tmp_path / "rollouts" / f"rollout_{step:05d}_00.parquet")
        assert entry["darts/budget/total"] == len(trace) == trace.groupby("group").num_candidates.first().sum()
        assert entry["darts/rollout/generated_tokens"] == trace.length.sum()
        assert entry["darts/rollout/kept_tokens"] == trace[trace.selected].length.sum()
        assert entry["completions/mean_length"] == pytest.approx(trace[trace.selected].length.mean())
        assert entry["darts/rollout/aborted_candidates"] == (trace.finish_reason == "abort").sum()
        assert (trace.groupby("group").selected.sum() == 4).all()
        assert trace.start_seconds.min() == 0
        assert trace.end_seconds.max() == pytest.approx(entry["darts/rollout/seconds"])
        assert (trace.end_seconds > trace.start_seconds).all()
        assert trace.num_prompt_tokens.isin([2, 3]).all()
        assert 0 <= entry["darts/rollout/bubble_ratio"] < 1
        assert 1 <= entry["darts/budget/redundancy"] <= 2
    assert any(entry["darts/rollout/aborted_candidates"] for entry in logs) or all(
        entry["darts/budget/saturated_ratio"] == 0 for entry in logs
    )
    header, *entries = map(json.loads, (tmp_path / "rollouts" / "log.jsonl").read_text().splitlines())
    assert header["run"]["schedule"] == "darts"
    assert header["run"]["max_num_generations"] == 8
    assert entries[:4] == logs


def test_wild_prompts_get_more_candidates_than_calm_ones(model_dir, tmp_path):
    args = make_args(
        tmp_path,
        max_steps=10,
        min_num_generations=4,
        per_device_train_batch_size=40,
        learning_rate=0.0,
        save_rollout_trace=True,
    )
    trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(10))
    trainer.train()
    traces = pd.concat(pd.read_parquet(p) for p in sorted((tmp_path / "rollouts").glob("*.parquet")))
    later = traces[traces.step >= 4]
    by_prompt = later.groupby("prompt_key").agg(budget=("num_candidates", "mean"), length=("length", "mean"))
    assert len(by_prompt) == 10
    calm, wild = by_prompt.nsmallest(4, "length"), by_prompt.nlargest(4, "length")
    assert wild.budget.mean() > calm.budget.mean() + 1
    assert len(trainer.length_tracker) == 10


def test_resumed_run_decides_like_an_uninterrupted_one(model_dir, tmp_path, curve):
    fields = {
        "max_steps": 12,
        "min_num_generations": 4,
        "long_end_every": 3,
        "save_strategy": "steps",
        "save_steps": 6,
        "save_rollout_trace": True,
        "latency_curve": curve,
    }
    # One epoch with recurring prompts, because TRL 1.16 repeats the first epoch's order if it resumes in a later one.
    dataset = letters_dataset(10, repeats=6)
    whole = make_trainer(model_dir, make_args(tmp_path / "whole", **fields), train_dataset=dataset)
    whole.train()
    resumed = make_trainer(model_dir, make_args(tmp_path / "resumed", **fields), train_dataset=dataset)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    for step in range(6, 12):
        expected, actual = (
            pd.read_parquet(tmp_path / name / "rollouts" / f"rollout_{step:05d}_00.parquet").drop(columns=SECONDS)
            for name in ("whole", "resumed")
        )
        pd.testing.assert_frame_equal(expected, actual)
    budgets = [[e["darts/budget/total"] for e in rollout_logs(t)][-6:] for t in (whole, resumed)]
    assert budgets[0] == budgets[1]
    assert len(set(budgets[0])) > 1  # they change
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name
    assert {"trl", "grpo", "darts"} <= set(resumed.model.model_tags)
    assert not (tmp_path / "resumed" / "rollouts" / "rollout_00005_00.parquet").exists()


def test_checkpoint_of_another_schedule_loses_its_budget(model_dir, tmp_path, caplog):
    args = make_args(tmp_path / "darts", max_steps=1, save_strategy="steps", save_steps=1)
    make_trainer(model_dir, args).train()
    other = make_trainer(model_dir, make_args(tmp_path / "grpo", schedule="grpo", max_steps=2))
    other.train(resume_from_checkpoint=str(tmp_path / "darts" / "checkpoint-1"))
    assert other.state.global_step == 2
    assert "`schedule` was another one before" in caplog.text


def test_checkpoint_of_trl_is_accepted_with_a_warning(model_dir, tmp_path, caplog):
    args = make_args(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    make_trainer(model_dir, args).train()
    for name in ("darts_lengths.npz", "darts_admission.json"):
        (tmp_path / "checkpoint-1" / name).unlink()
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(model_dir, make_args(tmp_path, max_steps=2))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "lengths start empty" in caplog.text
    assert trainer.state.global_step == 2


def test_own_tracker_is_used(model_dir, tmp_path):
    tracker = LengthTracker(0.5)
    trainer = make_trainer(model_dir, make_args(tmp_path, max_steps=1), callbacks=[VarianceTrackerCallback(tracker)])
    trainer.train()
    assert trainer.length_tracker is tracker
    assert len(tracker) == 4
    assert 0 < tracker.rho < math.inf


def test_several_rollouts_per_optimizer_step(model_dir, tmp_path):
    args = make_args(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        save_rollout_trace=True,
    )
    numbers, policies = [], args.policies
    args.policies = lambda *given, rollout, **named: numbers.append(rollout) or policies(*given, **named)
    make_trainer(model_dir, args).train()
    assert numbers == [0, 1, 2, 3]  # for `long_end_every`
    names = sorted(path.name for path in (tmp_path / "rollouts").glob("*.parquet"))
    assert names == [f"rollout_{step:05d}_{micro:02d}.parquet" for step in range(2) for micro in range(2)]


def test_config_of_trl_is_refused(model_dir, tmp_path):
    with pytest.raises(ConfigurationError, match=r"`args` \(GRPOConfig\) must be a `DARTSGRPOConfig`"):
        make_trainer(model_dir, GRPOConfig(str(tmp_path), use_cpu=True, report_to=[]))


def test_no_config_makes_one_with_the_models_name(model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's default config requires a GPU.
    monkeypatch.setattr(
        DARTSGRPOConfig, "__init__", partialmethod(DARTSGRPOConfig.__init__, use_cpu=True, report_to=[])
    )
    trainer = DARTSGRPOTrainer(str(model_dir), length_reward, train_dataset=letters_dataset())
    assert isinstance(trainer.args, DARTSGRPOConfig)
    assert trainer.args.output_dir == "letters-DARTS"


def test_rollout_func_would_have_no_effect(model_dir, tmp_path):
    with pytest.raises(ConfigurationError, match=r"Set `schedule='grpo'`"):
        make_trainer(model_dir, make_args(tmp_path), rollout_func=lambda prompts, trainer: {})
