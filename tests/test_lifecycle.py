"""Tests that a trainer can train again, or evaluate after an error, without state of the earlier run."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.builders import letter_of, letters_dataset, make_args, make_trainer, record_batches, rollout_logs
from tests.model_server import model_server
from tests.test_trainer_server import server_args


pytestmark = pytest.mark.vllm  # only imported by TRL

PROMPTS = letters_dataset(12)  # three batches


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def spread(completions: list[str], **kwargs: Any) -> list[float]:
    """Returns rewards that differ within every group."""
    return [float(i) for i in range(len(completions))]


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "partial_rollout", "max_completion_length": 24},
        {"rollout_ahead": 1},
        {"drop_uniform_groups": True},
        {"schedule": "partial_rollout", "rollout_ahead": 1},
    ],
)
def test_a_second_training_begins_with_an_empty_buffer(model_dir, tmp_path, monkeypatch, fields):
    """The first run is stopped within its epoch, with prompts in the buffer."""
    fields = {"max_completion_length": 8, **fields}
    with model_server(model_dir, monkeypatch) as (server, settings):
        trainer = make_trainer(
            model_dir, make_args(tmp_path, **settings, **fields), reward_funcs=spread, train_dataset=PROMPTS
        )
        launched: list[int] = []
        launch = trainer._engine.launch
        trainer._engine.launch = lambda *args: launched.append(trainer.state.global_step) or launch(*args)
        stop = StopAt(2)
        trainer.add_callback(stop)
        trainer.train()
        trainer.remove_callback(stop)
        while server.open:  # requests of the cancelled rollout
            time.sleep(0.01)
        batches = record_batches(trainer)
        launched.clear()
        trainer.train()
    trained = [row["prompt"] for batch in batches for row in batch["inputs"]]
    assert Counter(trained) == dict.fromkeys(PROMPTS["prompt"], 4)
    assert launched == ([0, 1] if "rollout_ahead" in fields else [])  # no further batch would be trained on
    assert len(rollout_logs(trainer)) == 3
    assert trainer._rollout_log.totals.num_rollouts == 3


def test_a_training_that_stopped_within_a_batch_is_not_gone_on_with(model_dir, tmp_path, monkeypatch):
    """Two optimizer steps share a batch, and TRL would train on its second half."""
    with model_server(model_dir, monkeypatch) as (_, settings):
        args = make_args(tmp_path, num_iterations=2, max_steps=6, max_completion_length=8, **settings)
        trainer = make_trainer(model_dir, args, train_dataset=PROMPTS)
        stop = StopAt(3)
        trainer.add_callback(stop)
        trainer.train()
        trainer.remove_callback(stop)
        steps, score = [], trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: (
            steps.append(trainer.state.global_step) or score(inputs)
        )
        trainer.train()
    assert steps == [0, 2, 4]


def test_the_first_weights_of_a_second_training_reach_the_servers(model_dir, tmp_path, monkeypatch):
    """Step 0 of the second run differs from that of the first."""
    with model_server(model_dir, monkeypatch) as (server, settings):
        args = make_args(tmp_path, max_steps=1, learning_rate=1e-2, max_completion_length=8, **settings)
        trainer = make_trainer(model_dir, args)
        for _ in range(2):
            trainer.train()
            (entry,) = rollout_logs(trainer)
            assert entry["sampling/sampling_logp_difference/max"] < 1e-4
    assert server.events == ["sync", "rollout"] * 2


def test_an_evaluation_after_an_error_gets_its_own_completions(model_dir, tmp_path, monkeypatch):
    with model_server(model_dir, monkeypatch) as (_, settings):
        fields = {"per_device_eval_batch_size": 8, "max_completion_length": 8}
        args = make_args(tmp_path, schedule="sorted", **fields, **settings)
        answers: list[tuple[str, str | None]] = []

        def reward(prompts: list[str], completion_ids: Any, **kwargs: Any) -> list[float]:
            answers.extend(
                (prompt[-1], letter_of(ids[0])) for prompt, ids in zip(prompts, completion_ids, strict=True)
            )
            return [0.0] * len(prompts)

        trainer = make_trainer(model_dir, args, reward_funcs=reward, eval_dataset=letters_dataset(2))
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "_generate", lambda prompts: 1 / 0)  # after the rollout of the batch
            with pytest.raises(ZeroDivisionError):
                trainer.train()
        trainer.evaluate()
    assert len(answers) == 8
    assert all(letter == own for letter, own in answers)


FREED: dict[str, dict[str, Any]] = {
    "default": {},
    "grpo": {"schedule": "grpo"},
    "tail": {"schedule": "tail_batching"},
    "dynamic": {"drop_uniform_groups": True},
    "ahead": {"rollout_ahead": 1},
    "continuous": {"rollout_ahead": "continuous"},
    "streamed rewards": {"stream_rewards": True},
    "streamed rewards, continuous": {"stream_rewards": True, "rollout_ahead": "continuous"},
    "streamed log-probs": {"stream_logprobs": True, "vllm_importance_sampling_correction": True},
    "in process": {},
    "in process, continuous batching": {"use_transformers_continuous_batching": True},
}


def test_an_engine_ends_with_its_trainer(server, model_dir, tmp_path):
    """Its thread would go on checking the servers, and send old weights to those that return."""
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=1))
    trainer.train()
    engine = weakref.ref(trainer.vllm_generation.engine)
    del trainer
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("name", FREED)
def test_a_deleted_trainer_is_freed(model_dir, tmp_path, monkeypatch, name):
    """At once: in a notebook, the model and its optimizer would stay in memory until a full garbage collection."""
    with model_server(model_dir, monkeypatch) as (_, settings):
        own = {} if name.startswith("in process") else settings
        args = make_args(tmp_path, **{"max_completion_length": 8, "max_steps": 1, **own, **FREED[name]})
        trainer = make_trainer(model_dir, args, reward_funcs=spread)
        trainer.train()
        gc.collect()
        gc.disable()
        try:
            freed = weakref.ref(trainer)
            del trainer
            assert freed() is None
        finally:
            gc.enable()
