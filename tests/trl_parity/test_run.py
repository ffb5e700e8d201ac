"""A run as a whole: defaults, metrics, logs of completions, callbacks, checkpoints."""

from functools import partialmethod

import pandas as pd
import pytest
import torch
from transformers import TrainerCallback

from tests.builders import record_batches
from tests.trl_parity.common import (
    changed,
    chats,
    make_args,
    make_trainer,
    params_of,
    step_logs,
    text_of,
    texts,
    train,
    train_all,
    variety,
)
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer


TRL_METRICS = [
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "rewards/variety/mean",
    "rewards/variety/std",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "step_time",
]


def test_model_reward_and_data_are_enough(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(  # TRL's default config wants a GPU
        DARTSGRPOConfig, "__init__", partialmethod(DARTSGRPOConfig.__init__, use_cpu=True, report_to=[])
    )
    trainer = DARTSGRPOTrainer(model=str(zoo.lm()), reward_funcs=str(zoo.reward()), train_dataset=texts())
    assert trainer.args.num_generations == 8
    assert trainer.args.max_num_generations == 16
    assert trainer.processing_class.padding_side == "left"


def test_metrics_of_trl_speak_of_the_kept_rows(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path))
    batches = record_batches(trainer)
    train_all(trainer)
    num_tokens = 0
    for step, batch in enumerate(batches):
        entry = trainer.state.log_history[step]
        assert not [name for name in TRL_METRICS if name not in entry]
        lengths = batch["completion_mask"].sum(1).float()
        ended = lengths[(batch["completion_ids"] == trainer.processing_class.eos_token_id).any(1)]
        num_tokens += (lengths.sum() + batch["prompt_mask"].sum()).item()
        assert entry["num_tokens"] == num_tokens
        assert entry["completions/mean_length"] == pytest.approx(lengths.mean().item())
        assert entry["completions/min_length"] == lengths.min()
        assert entry["completions/max_length"] == lengths.max()
        assert entry["completions/clipped_ratio"] == pytest.approx(1 - len(ended) / 8)
        assert entry["completions/mean_terminated_length"] == pytest.approx(ended.mean().item())


def trained(trainer):
    train_all(trainer)
    return trainer


def test_metrics_are_averaged_between_logs(lm, tmp_path, curve):
    each, pairs = (
        trained(make_trainer(lm, make_args(tmp_path, max_steps=4, latency_curve=curve, logging_steps=steps)))
        for steps in (1, 2)
    )
    for name in ("reward", "completions/mean_length", "entropy"):
        first, second, third, fourth = step_logs(each, name)
        assert step_logs(pairs, name) == pytest.approx([(first + second) / 2, (third + fourth) / 2])
    assert len(step_logs(pairs, "darts/pool/length_mean")) == 2


@pytest.mark.parametrize("data", [texts, chats])
def test_completions_are_logged_row_by_row(lm, tmp_path, data, capsys):
    trainer = make_trainer(
        lm, make_args(tmp_path, log_completions=True, num_completions_to_print=2), train_dataset=data()
    )
    batches = record_batches(trainer)
    train_all(trainer)
    assert "Completion" in capsys.readouterr().out
    for step, batch in enumerate(batches, 1):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert table.columns.tolist() == ["step", "prompt", "completion", "variety", "advantage"]
        assert [text_of(list(prompt) if data is chats else prompt) for prompt in table.prompt] == [
            text_of(example["prompt"]) for example in batch["inputs"]
        ]
        said = [text_of(list(completion) if data is chats else completion) for completion in table.completion]
        own = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
        assert said == own
        assert table.variety.tolist() == pytest.approx(variety(said))
        assert table.advantage.tolist() == pytest.approx(batch["advantages"].tolist())


class Recorder(TrainerCallback):
    """Remembers what happened."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        control.should_training_stop = state.global_step == 3

    def on_log(self, args, state, control, logs, **kwargs):
        self.events.append("darts" if "darts/budget/total" in logs else "log")


def test_callbacks_see_steps_and_stop_the_training(lm, tmp_path):
    recorder = Recorder()
    trainer = make_trainer(lm, make_args(tmp_path, max_steps=9), callbacks=[recorder])
    train_all(trainer)
    assert recorder.events == ["begin", 1, "darts", 2, "darts", 3, "darts", "log"]


def test_own_optimizer_is_used(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path))
    optimizer = torch.optim.SGD([trainer.model.lm_head.weight], lr=1.0)
    trainer = make_trainer(trainer.model, make_args(tmp_path), optimizers=(optimizer, None))
    assert train(trainer) == {"lm_head.weight"}


@pytest.mark.parametrize("fields", [{}, {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}])
def test_resumed_training_is_the_uninterrupted_one(lm, tmp_path, curve, fields):
    # 4 steps are whole generations in both cases; one epoch, for TRL starts over with the first epoch's order.
    args = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "latency_curve": curve, **fields}
    whole = make_trainer(lm, make_args(tmp_path / "whole", **args), train_dataset=texts(32))
    train_all(whole)
    resumed = make_trainer(lm, make_args(tmp_path / "resumed", **args), train_dataset=texts(32))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for name in ("reward", "completions/mean_length", "darts/budget/total"):
        assert step_logs(resumed, name)[-4:] == pytest.approx(step_logs(whole, name)[-4:])
    assert not changed(resumed, params_of(whole.model))


def test_saved_model_loads_again(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path, save_strategy="steps", save_steps=2))
    train_all(trainer)
    again = make_trainer(tmp_path / "checkpoint-2", make_args(tmp_path / "again"))
    assert not changed(again, params_of(trainer.model))
    assert again.processing_class.chat_template == trainer.processing_class.chat_template
    assert "DARTS" in (tmp_path / "README.md").read_text()
    assert {"trl", "grpo", "darts"} <= set(trainer.model.model_tags)
