"""Tests `rollout_ahead`: the next batch is sampled during training, all with the weights of its launch."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.builders import letters_dataset, make_args, make_trainer, record_ages, record_batches
from tests.model_server import model_server
from trl_darts import DARTSGRPOConfig
from trl_darts.errors import WeightsLostError


pytestmark = pytest.mark.vllm  # only imported by TRL


class Notes(TrainerCallback):
    """Records parameters by step, and steps among the server's events. Stops after step `last`."""

    def __init__(self, model: Any, events: list[str], last: int = 100) -> None:
        self.model, self.events, self.last, self.weights = model, events, last, []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append({name: value.detach().clone() for name, value in self.model.state_dict().items()})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("step")
        control.should_training_stop |= state.global_step >= self.last
        self.on_train_begin()


def logprobs_under(trainer: Any, weights: dict[str, torch.Tensor], batch: dict[str, Any]) -> torch.Tensor:
    """Returns the log-probs of a batch's completions with these weights."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    own = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(weights)
    with torch.no_grad():
        values, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
    trainer.model.load_state_dict(own)
    return values


@pytest.mark.parametrize("schedule", ["darts", "partial_rollout"])
def test_each_token_is_of_the_version_that_it_is_said_to_be_of(model_dir, tmp_path, monkeypatch, schedule):
    """Two optimizer steps of two micro-steps share a batch, with an evaluation between them."""
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    fields |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    fields |= {"max_completion_length": 10, "max_steps": 6, "learning_rate": 3e-3}
    with model_server(model_dir, monkeypatch) as (server, settings):
        args = make_args(tmp_path, schedule=schedule, rollout_ahead=1, **settings, **fields)
        data = {"train_dataset": letters_dataset(20), "eval_dataset": letters_dataset(2)}
        trainer = make_trainer(model_dir, args, **data)
        notes = Notes(trainer.model, server.events)
        trainer.add_callback(notes)
        ages, batches = record_ages(trainer), record_batches(trainer)
        trainer.train()
    batches = [batch for batch in batches if len(batch["advantages"]) == 16]
    assert len(batches) == len(ages) == 3
    for number, (batch, rows) in enumerate(zip(batches, ages, strict=True)):
        known = {age for runs in rows for age, _ in runs}
        assert known == ({0} if number == 0 else {2}) or (schedule == "partial_rollout" and min(known) == 2)
        versions = {age: logprobs_under(trainer, notes.weights[2 * number - age], batch) for age in known}
        for row, runs in enumerate(rows):
            start = 0
            for age, count in runs:
                part = slice(start, start := start + count)
                gaps = versions[age][row, part] - batch["sampling_per_token_logps"][row, part]
                assert gaps.abs().max() < 1e-4
    old, new = (logprobs_under(trainer, weights, batches[1]) for weights in (notes.weights[0], notes.weights[2]))
    assert (old - new).abs().max() > 1e-2  # otherwise, the weights are not distinguishable
    logs = [entry for entry in trainer.state.log_history if "darts/staleness/chi_square" in entry]
    assert logs[0]["darts/staleness/effective_sample_share"] == pytest.approx(1)
    assert max(entry["darts/staleness/effective_sample_share"] for entry in logs[1:]) < 0.999


def test_interrupted_and_resumed_with_a_rollout_under_way(model_dir, tmp_path, monkeypatch):
    """The running batch is sampled again, without lost or repeated prompts. An epoch's first batch is ahead too."""
    numbers, prompts, again = (
        [],
        [],
        {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "max_completion_length": 4},
    )
    policies = DARTSGRPOConfig.policies

    def numbered(self: Any, *rest: Any, rollout: int = 0, **fields: Any) -> Any:
        numbers.append(rollout)
        return policies(self, *rest, rollout=rollout, **fields)

    monkeypatch.setattr(DARTSGRPOConfig, "policies", numbered)
    with model_server(model_dir, monkeypatch) as (server, settings):
        for part in ("first", "second"):
            args = make_args(tmp_path, rollout_ahead=1, defer_unsettled_groups=False, **settings, **again)
            trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(24))
            notes, batches = (
                Notes(trainer.model, server.events, last=4 if part == "first" else 8),
                record_batches(trainer),
            )
            trainer.add_callback(notes)
            launch = trainer._engine.launch
            trainer._engine.launch = lambda *args, launch=launch: server.events.append("launch") or launch(*args)
            trainer.train(resume_from_checkpoint=None if part == "first" else str(tmp_path / "checkpoint-4"))
            prompts += [[row["prompt"] for row in batch["inputs"]] for batch in batches]
            deadline = time.monotonic() + 10
            while server.open:  # requests of the obsolete rollout
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert len(prompts) == 8
    # The fifth twice, because it was running and is sampled again. None after the last.
    assert numbers == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert Counter(prompt for batch in prompts[:6] for prompt in batch) == dict.fromkeys(
        letters_dataset(24)["prompt"], 4
    )
    order = [event for event in server.events if event != "rollout"]
    ahead = ["sync", "launch", "step"]
    assert order == [*ahead * 7, "step"]


def test_a_rollout_whose_weights_are_lost_begins_anew(model_dir, tmp_path, monkeypatch):
    """All servers restart during a step. They get the new weights, and no prompt is lost."""
    fields = {"max_steps": 4, "max_completion_length": 4}
    with model_server(model_dir, monkeypatch) as (server, settings):
        args = make_args(tmp_path, rollout_ahead=1, **settings, **fields)
        trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(16))
        trainer.add_callback(Notes(trainer.model, server.events))
        ages, batches = record_ages(trainer), record_batches(trainer)
        wait, waits = trainer._engine._wait_launched, []

        def lost_once(plan: Any, rollout: Any, *rest: Any) -> Any:
            waits.append(rollout)
            if len(waits) == 2:
                rollout.cancel()
                while server.open:  # they end with their servers
                    time.sleep(0.005)
                raise WeightsLostError("They were started again.")
            return wait(plan, rollout, *rest)

        monkeypatch.setattr(trainer._engine, "_wait_launched", lost_once)
        trainer.train()
    prompts = [row["prompt"] for batch in batches for row in batch["inputs"]]
    assert Counter(prompts) == dict.fromkeys(letters_dataset(16)["prompt"], 4)
    assert [{age for runs in rows for age, _ in runs} for rows in ages] == [{0}, {1}, {0}, {1}]
    order = [event for event in server.events if event != "rollout"]
    assert order == ["sync", "step", "sync", "step", "sync", "step", "step"]  # the third one for the restarted rollout
