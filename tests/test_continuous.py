"""
Tests `rollout_ahead="continuous"` on a real server: which weights sampled which token, order, bound, and losses. The
policies' invariants are in `tests/scheduling/test_continuous.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from tests.builders import LETTERS, letters_dataset, make_trainer, record_ages, record_batches
from tests.test_rollout_ahead import logprobs_under
from tests.test_trainer_server import server_args
from trl_darts.engines.pool import Member, State
from trl_darts.engines.vllm_api import CompletionRequest, ServerPrompt, VLLMServer, new_session
from trl_darts.errors import WeightSyncError
from trl_darts.telemetry.traces import read_traces
from trl_darts.weights import calls


pytestmark = pytest.mark.vllm
# Answers that outlive a step, and steps that change them visibly.
FIELDS = {"rollout_ahead": "continuous", "learning_rate": 3e-3, "max_completion_length": 240}
FIELDS |= {"generation_kwargs": {"ignore_eos": True}}
LORA = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")


class Notes(TrainerCallback):
    """Records parameters by step. Stops after step `last`."""

    def __init__(self, model: Any, last: int = 100) -> None:
        self.model, self.last, self.weights = model, last, {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = {name: value.clone() for name, value in self.model.state_dict().items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.last
        self.on_train_begin(args, state, control)


def token_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Differs between answers of one length."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class WaitsForServers(TrainerCallback):
    """No step begins without all servers, so that a busy machine misses no weight sync."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while set(self.engine.states().values()) != {State.UP}:
            time.sleep(0.3)


def recorded(trainer: Any, last: int = 100) -> tuple[Notes, list[Any], list[Any]]:
    """Returns what is recorded of the training: weights by step, ages of the rows' tokens, and batches."""
    notes = Notes(trainer.model, last)
    trainer.add_callback(notes)
    return notes, record_ages(trainer), record_batches(trainer)


def check_versions(
    trainer: Any, notes: Notes, ages: list[Any], batches: list[Any], first_step: int = 0, num_runs: int = 1000
) -> int:
    """
    Asserts that each token has the log-prob of the weights that it is said to be of, and that none is too old. Returns
    the number of rows with tokens of several versions. Log-probs after the first `num_runs` versions are not compared.
    """
    num_mixed, args = 0, trainer.args
    batches = [batch for batch in batches if len(batch["advantages"]) == args.generation_batch_size]
    assert len(batches) == len(ages)
    for place, (batch, rows) in enumerate(zip(batches, ages, strict=True)):
        step = first_step + place * args.steps_per_batch
        known = {age for runs in rows for age, _ in runs}
        assert max(known) <= args.max_staleness
        logprobs = {age: logprobs_under(trainer, notes.weights[step - age], batch) for age in known}
        for row, runs in enumerate(rows):
            start, num_mixed = 0, num_mixed + (len(runs) > 1)
            for number, (age, count) in enumerate(runs):
                part = slice(start, start := start + count)
                gaps = logprobs[age][row, part] - batch["sampling_per_token_logps"][row, part]
                assert number >= num_runs or gaps.abs().max() < 1e-3
            assert start == batch["completion_mask"][row].sum()
    return num_mixed


def prompts_of(batches: list[Any], trainer: Any) -> Counter[str]:
    rows = trainer.args.generation_batch_size
    return Counter(row["prompt"] for batch in batches if len(batch["advantages"]) == rows for row in batch["inputs"])


def check_rewards(batches: list[Any], trainer: Any) -> None:
    """Asserts that each row has the advantage of its own tokens."""
    for batch in batches:
        if len(batch["advantages"]) == trainer.args.generation_batch_size:
            rows = zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)
            rewards = torch.tensor(token_reward([ids[mask].tolist() for ids, mask in rows])).view(-1, 4)
            spread = rewards.std(dim=1, keepdim=True) + 1e-4
            expected = (rewards - rewards.mean(dim=1, keepdim=True)) / spread
            torch.testing.assert_close(batch["advantages"], expected.flatten(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("schedule", "lora"), [("grpo", LORA), ("darts", None)])
def test_each_token_is_of_the_version_that_it_is_said_to_be_of(
    server, model_dir, tmp_path, monkeypatch, schedule, lora
):
    """
    Two optimizer steps share a batch, with an evaluation between them, while the rollout goes on. Groups are scored
    once they are complete.
    """
    threads = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        threads.append((len(completion_ids), threading.current_thread() is threading.main_thread()))
        return token_reward(completion_ids)

    # The server always has something to decode, also where the trainer is slow.
    capacity: Any = Member.capacity
    monkeypatch.setattr(Member, "capacity", property(lambda member: min(8, capacity.fget(member))))
    fields = {**FIELDS, "schedule": schedule, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    fields |= {"steps_per_generation": 4, "max_steps": 8, "max_staleness": 4, "save_rollout_trace": True}
    fields["stream_rewards"] = True
    fields |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    args = server_args(tmp_path, server, **fields)
    data = {"train_dataset": letters_dataset(8), "eval_dataset": letters_dataset(2), "reward_funcs": reward}
    trainer = make_trainer(model_dir, args, peft_config=lora, **data)
    notes, ages, batches = recorded(trainer)
    trainer.train()
    assert check_versions(trainer, notes, ages, batches) > 0
    assert prompts_of(batches, trainer) == dict.fromkeys(letters_dataset(8)["prompt"], 8)  # 4 batches are two epochs
    check_rewards(batches, trainer)
    num_evaluations = sum("eval_reward" in entry for entry in trainer.state.log_history)
    assert sum(is_main for _, is_main in threads) == num_evaluations > 0
    assert {size for size, is_main in threads if not is_main} == {4}  # group by group, and none again with its batch
    assert sum(not is_main for _, is_main in threads) >= 16
    traces, _ = read_traces(tmp_path)
    counted = [sum(int(run.split(":")[1]) for run in runs.split()) for runs in traces["versions"]]
    assert counted == traces["length"].tolist()
    log = [entry for entry in trainer.state.log_history if "darts/staleness/age_max" in entry]
    assert [entry["darts/staleness/age_max"] for entry in log] == [max(a for r in rows for a, _ in r) for rows in ages]
    assert all(entry["darts/staleness/age_p50"] <= entry["darts/staleness/age_p90"] <= 4 for entry in log)


def test_kept_keys_and_values_are_of_running_answers_alone(server, model_dir, tmp_path, monkeypatch):
    """
    What starts after a weight sync reads none of before, although its prompt exceeds a block of the cache, and also if
    it was on its way to the server during the sync.
    """
    send: Any = VLLMServer.open

    delays = itertools.cycle((0.0, 0.3))

    async def late(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(next(delays))
        return await send(*args, **kwargs)

    monkeypatch.setattr(VLLMServer, "open", late)
    rows = [{"prompt": "0123456789" * 5 + letter} for letter in LETTERS[:4]]
    args = server_args(tmp_path, server, max_steps=8, kv_after_update="keep", **FIELDS)
    trainer = make_trainer(model_dir, args, train_dataset=Dataset.from_list(rows), reward_funcs=token_reward)
    notes, ages, batches = recorded(trainer)
    trainer.train()
    assert check_versions(trainer, notes, ages, batches, num_runs=1) > 0
    with pytest.raises(AssertionError):  # the others' are not those of a forward pass
        check_versions(trainer, notes, ages, batches)


def test_a_prompt_that_is_refused_is_dropped(server, model_dir, tmp_path):
    """Filler rows take its place in the batch that would have had it."""
    fields = {**FIELDS, "max_completion_length": 32, "on_generation_error": "drop_group", "max_steps": 6}
    fields["stream_rewards"] = True
    trainer = make_trainer(model_dir, server_args(tmp_path, server, **fields), train_dataset=letters_dataset(24))
    trainer._engine.overrides = lambda command: {"top_p": 7.0} if command.group_id == 5 else {}
    _, _, batches = recorded(trainer)
    trainer.train()
    masked = [int((batch["completion_mask"].sum(1) == 0).sum()) for batch in batches]
    assert sorted(masked) == [0, 0, 0, 0, 0, 4]
    assert len(prompts_of(batches, trainer)) == 23
    assert not trainer._streams.rewards._calls


def test_a_server_that_is_lost_in_an_update_returns(server, model_dir, tmp_path, monkeypatch):
    """The third update fails halfway. What ran goes on from its tokens, with the weights of the files."""
    load, number = calls.load, []

    async def fails_once(*args: Any) -> None:
        number.append(1)
        await load(*args)
        if len(number) == 3:
            raise WeightSyncError("It broke.")

    monkeypatch.setattr(calls, "load", fails_once)
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=8, **FIELDS), reward_funcs=token_reward)
    trainer.add_callback(WaitsForServers(trainer.vllm_generation.engine))
    notes, ages, batches = recorded(trainer)
    trainer.train()
    assert len(number) in (8, 9)  # one more if it came back before the next sync
    assert trainer.vllm_generation.engine.num_losses == 1
    assert check_versions(trainer, notes, ages, batches) > 0
    assert set(prompts_of(batches, trainer).values()) == {4}


def test_interrupted_and_resumed(server, model_dir, tmp_path):
    """What was under way is sampled again, and no prompt is trained on twice."""
    prompts: Counter[str] = Counter()
    fields = {**FIELDS, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    fields["stream_rewards"] = True
    for last in (5, 8):  # the first run goes beyond its checkpoint
        data = {"train_dataset": letters_dataset(32), "reward_funcs": token_reward}
        trainer = make_trainer(model_dir, server_args(tmp_path, server, **fields), **data)
        notes, ages, batches = recorded(trainer, last)
        trainer.train(resume_from_checkpoint=None if last == 5 else str(tmp_path / "checkpoint-4"))
        check_versions(trainer, notes, ages, batches, first_step=0 if last == 5 else 4)
        check_rewards(batches, trainer)
        prompts += prompts_of(batches[:4], trainer)
        assert not server.num_running()
    assert prompts == dict.fromkeys(letters_dataset(32)["prompt"], 4)


def test_a_paused_server_knows_what_each_request_has(server):
    """
    What our plugin adds to `/collective_rpc`: exact counts of requests that a client has seen less of, which do not
    change while it is paused.
    """

    async def run() -> None:
        session, received = new_session(), 0
        try:
            client = VLLMServer(server.base_url, session)
            options = {"model": server.model, "max_tokens": 500, "logprobs": 0, "ignore_eos": True}
            request = CompletionRequest.of("counted", ServerPrompt([5, 6]), [], options)

            async def read() -> None:
                nonlocal received
                async for chunk in await client.open(request, 16, 60.0):
                    received += len(chunk.tokens)

            reading = asyncio.create_task(read())
            while received < 17:
                await asyncio.sleep(0.01)
            await calls.pause(client)
            first = await client.num_outputs()
            await asyncio.sleep(0.2)
            assert first == await client.num_outputs()
            (name,) = request.internal_ids
            assert set(first) == {name}
            assert received <= first[name] < received + 17
            await calls.resume(client)
            await reading
            assert received == 500
            assert await client.num_outputs() == {}
        finally:
            await session.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps_per_generation": 4, "max_staleness": 3}, r"`max_staleness` \(3\) must be at least 4, the optimizer"),
        ({"stream_logprobs": True}, r"`stream_logprobs` \(True\) does not run with `rollout_ahead` \('continuous'\)"),
        ({"vllm_tail_server_url": "http://127.0.0.1:9", "tail_switch_at": 4}, r"whose rollout has no tail"),
        ({"mask_stale_after": 4}, r"`mask_stale_after` \(4\) has no effect with `max_staleness` \(4\)"),
    ],
)
def test_refused(tmp_path, fields, message):
    settings = {"use_vllm": True, "vllm_mode": "server", "rollout_ahead": "continuous", **fields}
    with pytest.raises(ValueError, match=message):
        server_args(tmp_path, Address(), **settings)


class Address:
    base_url = "http://127.0.0.1:1"


def test_masked_tokens_are_older(server, model_dir, tmp_path):
    """Tokens within the bound, but older than `mask_stale_after`, have no weight in the loss."""
    args = server_args(tmp_path, server, max_steps=6, mask_stale_after=1, **FIELDS)
    trainer = make_trainer(model_dir, args, reward_funcs=token_reward)
    _, ages, batches = recorded(trainer)
    trainer.train()
    masked = 0
    for batch, rows in zip(batches, ages, strict=True):
        for row, runs in enumerate(rows):
            weights = torch.repeat_interleave(
                torch.tensor([a <= 1 for a, _ in runs]), torch.tensor([n for _, n in runs])
            )
            assert batch["tool_mask"][row, : len(weights)].bool().equal(weights)
            masked += int((~weights).sum())
    assert masked > 0
