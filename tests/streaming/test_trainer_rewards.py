"""Reward functions that are called while a real server still decodes."""

import threading
import time

import pytest

from tests.builders import compare_with_trl, length_reward, letters_dataset, make_trainer, record_batches
from tests.test_trainer_server import rollout_logs, server_args
from trl_darts.errors import ConfigurationError
from trl_darts.streaming.setup import make_streams


pytestmark = pytest.mark.vllm
REWARDS = {"stream_rewards": True, "stream_reward_timeout_s": 20.0}


def test_same_training_with_and_without(server, model_dir, tmp_path):
    """Same rows, and so the same advantages."""
    advantages = []
    for fields in ({}, REWARDS):
        args = server_args(tmp_path, server, schedule="grpo", generation_kwargs={"seed": 5}, max_steps=3, **fields)
        trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(10))
        batches = record_batches(trainer)
        trainer.train()
        advantages.append([batch["advantages"].tolist() for batch in batches])
    assert advantages[0] == advantages[1]
    assert any(any(step) for step in advantages[0])


def test_groups_are_scored_as_they_complete(server, model_dir, tmp_path):
    """DARTS keeps other rows than the first ones: they are what is scored, each group by itself, before the end."""
    calls = []

    def reward(prompts, completion_ids, **kwargs):
        calls.append((time.perf_counter(), list(prompts), list(completion_ids)))
        return length_reward(prompts, completion_ids)

    args = server_args(tmp_path, server, max_steps=3, target_redundancy=2.0, **REWARDS)
    trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=letters_dataset(10))
    batches = record_batches(trainer)
    trainer.train()
    assert len(calls) == 3 * 4  # none again at the end
    assert all(len(set(prompts)) == 1 and len(prompts) == 4 for _, prompts, _ in calls)
    for step, batch in enumerate(batches):
        scored = sorted(ids for _, _, rows in calls[4 * step : 4 * step + 4] for ids in rows)
        ids = [
            row[mask.bool()].tolist()
            for row, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        ]
        assert scored == sorted(ids)
    assert all(entry["darts/stream/reward_timeouts"] == 0 for entry in rollout_logs(trainer))


def test_a_slow_function_is_hidden(server, model_dir, tmp_path):
    def reward(completion_ids, **kwargs):
        time.sleep(0.05 * len(completion_ids) / 4)
        return [float(len(ids)) for ids in completion_ids]

    # One answer is much longer than the others: meanwhile, the other groups are scored.
    fields = {"schedule": "grpo", "max_completion_length": 400, "max_steps": 3, **REWARDS}
    trainer = make_trainer(
        model_dir, server_args(tmp_path, server, **fields), reward_funcs=reward, train_dataset=letters_dataset(10)
    )
    trainer._conductor.overrides = lambda command: {
        "ignore_eos": True,
        "max_tokens": 400 if (command.group_id, command.index) == (3, 0) else 20,
    }
    trainer.train()
    for entry in rollout_logs(trainer):
        assert entry["darts/stream/reward_hidden_seconds"] > 0.1  # of 0.2


def test_hanging_function_ends(server, model_dir, tmp_path, caplog):
    def reward(prompts, completion_ids, **kwargs):
        while prompts[0].endswith("A"):
            pass
        return length_reward(prompts, completion_ids)

    args = server_args(tmp_path, server, max_steps=1, stream_rewards=True, stream_reward_timeout_s=1.0)
    functions = [reward, length_reward]
    trainer = make_trainer(model_dir, args, reward_funcs=functions, train_dataset=letters_dataset(4))
    trainer.train()
    (entry,) = rollout_logs(trainer)
    assert entry["darts/stream/reward_timeouts"] == 1
    assert sum("stream_reward_timeout_s" in line for line in caplog.messages) == 1


def test_both_streams(server, model_dir, tmp_path):
    fields = {"stream_logprobs": True, "stream_chunk_tokens": 16, **REWARDS}
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=2, **fields))
    trainer.train()
    for entry in rollout_logs(trainer):
        assert entry["darts/stream/chunks"] >= 16
        assert entry["darts/stream/missed_rows"] == 0
        assert entry["darts/stream/reward_exposed_seconds"] >= 0


def test_evaluation_is_left_to_trl(server, model_dir, tmp_path):
    """There is nothing to hide behind, and no deadline."""
    threads = []

    def reward(prompts, completion_ids, **kwargs):
        threads.append(threading.current_thread())
        return length_reward(prompts, completion_ids)

    args = server_args(tmp_path, server, per_device_eval_batch_size=8, num_generations_eval=2, **REWARDS)
    trainer = make_trainer(model_dir, args, reward_funcs=reward, eval_dataset=letters_dataset(4))
    assert "eval_reward" in trainer.evaluate()
    assert set(threads) == {threading.main_thread()}


def test_dropped_group(server, model_dir, tmp_path):
    """Its rows are another one's, with the prompt of the group that was dropped: TRL computes what it asks for."""
    fields = {"stream_logprobs": True, "stream_chunk_tokens": 16, "on_generation_error": "drop_group", **REWARDS}
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=2, **fields))
    trainer._conductor.overrides = lambda command: {"top_p": 7.0} if command.group_id == 1 else {}
    differences = compare_with_trl(trainer)
    batches = record_batches(trainer)
    trainer.train()
    assert [missed for _, _, missed in differences] == [4, 4]
    assert max(difference for _, difference, _ in differences) < 1e-5
    for batch in batches:
        assert batch["advantages"][4:8].tolist() == [0.0] * 4
        assert batch["advantages"].any()


def test_what_cannot_work(server, model_dir, tmp_path):
    args = server_args(tmp_path, server, stream_rewards=True)
    trainer = make_trainer(model_dir, args)
    trainer.tools = [print]
    with pytest.raises(ConfigurationError, match=r"`stream_rewards`.*does not run with tools"):
        make_streams(trainer)
    trainer.tools, trainer._is_vlm = None, True
    with pytest.raises(ConfigurationError, match=r"`stream_rewards`.*does not run with a vision-language model"):
        make_streams(trainer)
    with pytest.raises(ConfigurationError, match=r"`stream_reward_timeout_s` \(0.0\) must be positive"):
        server_args(tmp_path, server, stream_rewards=True, stream_reward_timeout_s=0.0)
