"""
Weights as LoRA adapters, on a real server.

Invariants: a server's log-probs are the trainer's after each sync, and what began before it ends with the weights with
which it began. No server is paused. Versions that no request names are unloaded.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from benchmarks.vllm_server import free_port, start_vllm_server
from tests.builders import letters_dataset, make_trainer, record_batches, rollout_logs
from tests.test_continuous import check_versions, recorded, token_reward
from tests.test_trainer_server import server_args
from tests.weights.probes import MAX_ERROR, PROBE, load_model, model_logprobs, server_logprobs
from trl_darts.engines.pool import Member
from trl_darts.engines.vllm_api import VLLMServer
from trl_darts.errors import ConfigurationError
from trl_darts.serving.command import ADAPTERS
from trl_darts.weights import calls
from trl_darts.weights.adapter import Adapter
from trl_darts.weights.files import WeightDirectory


pytestmark = pytest.mark.vllm
LORA = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
MAX_DIFFERENCE = 1e-5
OPTIONS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 5, "max_model_len": 512, "middleware": ADAPTERS}
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_API_KEY": "secret"}


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """Sets the server's key, and frees the trainers of earlier tests, whose adapters would count as another run's."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    gc.collect()


@pytest.fixture(scope="module")
def lora_server(model_dir, log_of):
    """A server that loads LoRA adapters, five at once."""
    with start_vllm_server(model_dir, log_path=log_of("lora"), env=ENVIRONMENT, **OPTIONS) as server:
        yield server


args_of = partial(server_args, reuse_logprobs=False)  # batches have the log-probs that are compared


def loaded(server):
    return {model["id"] for model in server.request("/v1/models")["data"]} - {server.model}


def loaded_by(server, trainer):
    return {name for name in loaded(server) if name.startswith(trainer.vllm_generation.settings.adapters.name)}


def max_gap(batches):
    """Returns the largest difference of the log-probs as sampled from the trainer's own, before its step."""
    gaps = []
    for batch in batches:
        mask = batch["completion_mask"].bool()
        gaps.append((batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].abs().max().item())
    return max(gaps)


def served_run(server, model_dir, out, **fields):
    """Trains three steps. Returns the trainer and its batches."""
    fields = {"learning_rate": 3e-3, "max_completion_length": 48, **fields}
    trainer = make_trainer(model_dir, args_of(out, server, **fields), peft_config=LORA)
    batches = record_batches(trainer)
    trainer.train()
    return trainer, batches


def test_log_probs_are_the_trainers_own(lora_server, model_dir, tmp_path, caplog):
    """By "auto" too. The server's own weights never change, and the adapters of earlier runs don't matter."""
    trainer, batches = served_run(lora_server, model_dir, tmp_path)
    assert len(batches) == 3
    assert max_gap(batches) < MAX_DIFFERENCE
    first, *others = rollout_logs(trainer)
    assert first["darts/sync/logp_difference"] < MAX_DIFFERENCE
    assert all(entry["darts/sync/bytes"] < 100_000 for entry in (first, *others))
    assert loaded_by(lora_server, trainer) == set()
    assert lora_server.request("/weight_info") == {"weight_version": "default"}
    torch.testing.assert_close(
        server_logprobs(lora_server, PROBE), model_logprobs(load_model(model_dir), PROBE), atol=MAX_ERROR, rtol=0
    )
    assert "is merged" not in caplog.text
    trainer.vllm_generation.sync_weights()
    assert loaded_by(lora_server, trainer) == {f"{trainer.vllm_generation.settings.adapters.name}-v4"}
    own = trainer.vllm_generation.vllm_client.generate([PROBE], max_tokens=8)  # for a user's `rollout_func`
    expected = model_logprobs(trainer.model.eval(), PROBE + own["completion_ids"][0])[len(PROBE) - 1 :]
    torch.testing.assert_close(torch.tensor(own["logprobs"][0])[:, 0], expected, atol=MAX_DIFFERENCE, rtol=0)


def test_adapters_of_runs_that_ended_are_unloaded(lora_server, model_dir, tmp_path):
    """Also those of a run that was killed, whose files are gone."""
    trainer, _ = served_run(lora_server, model_dir, tmp_path, max_steps=1)
    trainer.vllm_generation.sync_weights()
    ended = trainer.vllm_generation.settings.adapters
    assert f"{ended.name}-v2" in loaded(lora_server)
    ended.close()
    other, _ = served_run(lora_server, model_dir, tmp_path, max_steps=1)
    other.vllm_generation.sync_weights()
    assert loaded_by(lora_server, other)
    assert not loaded_by(lora_server, trainer)


class Fails(TrainerCallback):
    """Raises in the second step, with a rollout ahead."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise ZeroDivisionError


@pytest.mark.parametrize("ahead", [0, 1, "continuous"])
def test_end_of_a_run_unloads_its_adapters(lora_server, model_dir, tmp_path, ahead):
    """Also after an error, and those of a later evaluation when the connections close."""
    args = args_of(tmp_path, lora_server, weight_sync="adapter", rollout_ahead=ahead)
    data = {"train_dataset": letters_dataset(8), "eval_dataset": letters_dataset(2)}
    trainer = make_trainer(model_dir, args, peft_config=LORA, callbacks=[Fails()], **data)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not loaded_by(lora_server, trainer)
    trainer.evaluate()
    assert len(loaded_by(lora_server, trainer)) == 1
    trainer.vllm_generation.engine.close()
    assert not loaded_by(lora_server, trainer)


def test_answers_keep_the_version_that_they_began_with(lora_server, model_dir, tmp_path, monkeypatch):
    """In a rollout without an end, which is never paused. Answers of all versions within the bound decode at once."""
    capacity: Any = Member.capacity
    monkeypatch.setattr(Member, "capacity", property(lambda member: min(8, capacity.fget(member))))
    monkeypatch.setattr(calls, "pause", None)
    most, unload = [], VLLMServer.unload_adapter

    async def counted(server, name):
        most.append(len(await server.adapters()))
        await unload(server, name)

    monkeypatch.setattr(VLLMServer, "unload_adapter", counted)
    fields = {"rollout_ahead": "continuous", "learning_rate": 3e-3, "max_completion_length": 240, "max_steps": 8}
    fields |= {"generation_kwargs": {"ignore_eos": True}, "schedule": "grpo", "weight_sync": "adapter"}
    fields |= {"per_device_train_batch_size": 8, "save_rollout_trace": True}
    fields |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    args = args_of(tmp_path, lora_server, **fields)
    data = {"train_dataset": letters_dataset(8), "eval_dataset": letters_dataset(2), "reward_funcs": token_reward}
    trainer = make_trainer(model_dir, args, peft_config=LORA, **data)
    notes, ages, batches = recorded(trainer)
    trainer.train()
    assert check_versions(trainer, notes, ages, batches) == 0  # no answer is of two versions
    assert max(age for rows in ages for runs in rows for age, _ in runs) > 0
    assert max(most) <= 5


class TrainsInBetween(TrainerCallback):
    """Runs another training after the first step, to its end."""

    def __init__(self, other):
        self.other = other

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.other.train()


def test_two_runs_share_a_server(lora_server, model_dir, tmp_path):
    """Each has its own adapters, which the other one's syncs leave alone."""
    trainers, batches = [], []
    for name, rate in (("a", 3e-3), ("b", 1e-2)):
        args = args_of(tmp_path / name, lora_server, weight_sync="adapter", learning_rate=rate)
        trainers.append(make_trainer(model_dir, args, peft_config=LORA))
        batches.append(record_batches(trainers[-1]))
    first, second = trainers
    first.add_callback(TrainsInBetween(second))
    first.train()
    assert [len(own) for own in batches] == [3, 3]
    assert max(map(max_gap, batches)) < 10 * MAX_DIFFERENCE  # rounding, at this learning rate
    assert not any(loaded_by(lora_server, trainer) for trainer in trainers)


def test_server_on_another_machine_gets_the_file(lora_server, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(WeightDirectory, "can_be_read_by", lambda self, url: False)
    trainer, batches = served_run(lora_server, model_dir, tmp_path, weight_sync="adapter")
    assert max_gap(batches) < MAX_DIFFERENCE
    trainer.vllm_generation.sync_weights()
    paths = [m["root"] for m in lora_server.request("/v1/models")["data"] if m["id"] in loaded(lora_server)]
    assert any("trl_darts-adapters-" in path for path in paths)
    for name in loaded(lora_server):  # a server elsewhere does not tell that a run has ended
        with suppress(json.JSONDecodeError):  # the answer is a text
            lora_server.request("/v1/unload_lora_adapter", {"lora_name": name})


def test_server_that_lost_its_adapter_gets_it_again(lora_server, model_dir, tmp_path, caplog):
    """As if it had been restarted: its answer to a request that names the adapter is 404."""
    trainer = make_trainer(model_dir, args_of(tmp_path, lora_server, learning_rate=3e-3), peft_config=LORA)
    batches = record_batches(trainer)
    sync = trainer.vllm_generation.sync_weights

    def sync_and_lose():
        sync()
        if trainer.state.global_step == 1:
            name = f"{trainer.vllm_generation.settings.adapters.name}-v2"
            lora_server._ask("/v1/unload_lora_adapter", json.dumps({"lora_name": name}).encode(), 30)

    trainer.vllm_generation.sync_weights = sync_and_lose
    trainer.train()
    assert "so it was restarted" in caplog.text
    assert trainer.vllm_generation.engine.num_losses >= 1
    assert (len(batches), max_gap(batches) < MAX_DIFFERENCE) == (3, True)


class Restarts(TrainerCallback):
    """Kills a server after the third step, and starts it again at its address."""

    def __init__(self, server, model_dir, log_path, options):
        self.server, self.stack = server, ExitStack()
        self.start = partial(start_vllm_server, model_dir, log_path=log_path, wait=False, **options)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.server.kill()
            self.stack.enter_context(self.start())


@pytest.mark.slow
def test_restart_during_a_rollout_without_an_end(model_dir, tmp_path, log_of, monkeypatch):
    """The server gets the current version. What it had begun continues under it, and each token has its version."""
    capacity: Any = Member.capacity
    monkeypatch.setattr(Member, "capacity", property(lambda member: min(8, capacity.fget(member))))
    options = {**OPTIONS, "env": ENVIRONMENT, "port": free_port()}
    fields = {"rollout_ahead": "continuous", "learning_rate": 3e-3, "max_completion_length": 200, "max_steps": 8}
    fields |= {"generation_kwargs": {"ignore_eos": True}, "schedule": "grpo", "weight_sync": "adapter"}
    fields |= {"per_device_train_batch_size": 8, "vllm_server_timeout": 600.0}
    with start_vllm_server(model_dir, log_path=log_of("lora-killed"), **options) as server:
        args = args_of(tmp_path, server, **fields)
        data = {"train_dataset": letters_dataset(8), "reward_funcs": token_reward}
        trainer = make_trainer(model_dir, args, peft_config=LORA, **data)
        notes, ages, batches = recorded(trainer)
        restarts = Restarts(server, model_dir, log_of("lora-again"), options)
        trainer.add_callback(restarts)
        with restarts.stack:
            trainer.train()
            assert trainer.vllm_generation.engine.num_losses >= 1  # more on a busy machine
    assert len(batches) == 8
    check_versions(trainer, notes, ages, batches)


@pytest.mark.parametrize(
    ("fields", "adapter", "message"),
    [
        ({}, {"use_dora": True}, r"`use_dora` \(True\)"),
        ({}, {"r": 16}, "rank 16, and `--max-lora-rank` is 8"),
        ({"rollout_ahead": "continuous", "max_staleness": 9}, {}, "up to 10 versions .*, and `--max-loras` is 5"),
    ],
)
def test_refused_before_the_first_step(lora_server, model_dir, tmp_path, fields, adapter, message):
    config = dataclasses.replace(LORA, **adapter)
    args = args_of(tmp_path, lora_server, weight_sync="adapter", **fields)
    with pytest.raises(ConfigurationError, match=rf"`weight_sync` \('adapter'\).*{message}"):
        make_trainer(model_dir, args, peft_config=config)


def test_layers_that_a_server_would_not_use(lora_server, model_dir, tmp_path, monkeypatch):
    """vLLM only checks the last part of a layer's name, and leaves out layers that it does not have."""
    zeros = Adapter.zeros
    renamed = {"base_model.model.model.layers.0": "base_model.model.model.visual.blocks.0"}
    ((old, new),) = renamed.items()
    monkeypatch.setattr(Adapter, "zeros", lambda self: {k.replace(old, new): v for k, v in zeros(self).items()})
    args = args_of(tmp_path, lora_server, weight_sync="adapter")
    with pytest.raises(ConfigurationError, match=r"does not use \d+ of the adapter's layers, such as model.visual"):
        make_trainer(model_dir, args, peft_config=LORA)
    assert not any("trial" in name for name in loaded(lora_server))


def test_merged_where_it_is_no_plain_adapter(lora_server, model_dir, tmp_path, caplog):
    """Last, because the server has other weights of its own then."""
    config = dataclasses.replace(LORA, r=16)
    args = args_of(tmp_path, lora_server, learning_rate=3e-3)
    other, _ = served_run(lora_server, model_dir, tmp_path, max_steps=1)  # its files stay as long as it does
    other.vllm_generation.sync_weights()
    with pytest.raises(ConfigurationError, match=r"has the LoRA adapter 'trl_darts-.*' of another run"):
        make_trainer(model_dir, args, peft_config=config)
    del other
    for name in loaded(lora_server):
        lora_server._ask("/v1/unload_lora_adapter", json.dumps({"lora_name": name}).encode(), 30)
    trainer = make_trainer(model_dir, args, peft_config=config)
    batches = record_batches(trainer)
    trainer.train()
    assert "is merged into the model" in caplog.text
    assert "rank 16, and `--max-lora-rank` is 8" in caplog.text
    assert max_gap(batches) < MAX_DIFFERENCE
    args = args_of(tmp_path, lora_server, weight_sync="adapter")
    with pytest.raises(ConfigurationError, match=r"replaced by the weights 'v3' of a run\. Restart it"):
        make_trainer(model_dir, args, peft_config=LORA)
