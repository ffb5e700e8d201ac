"""A run that streams from a real server has TRL's log-probs and rewards."""

import threading

import pytest
import torch
from peft import LoraConfig

from tests.builders import (
    compare_with_trl,
    length_reward,
    letters_dataset,
    make_trainer,
    record_batches,
    rollout_logs,
)
from tests.test_trainer_server import server_args


pytestmark = pytest.mark.vllm
LOG_PROBS = {"stream_logprobs": True, "stream_chunk_tokens": 16, "stream_batch_tokens": 256, "learning_rate": 3e-3}
REWARDS = {"stream_rewards": True, "stream_reward_timeout_s": 20.0}


def distinct_reward(completion_ids, **kwargs):
    """Returns different rewards for all rows, so that every group has advantages."""
    return [float(row) for row in range(len(completion_ids))]


def train(server, model_dir, out, peft_config=None, overrides=None, **fields):
    """Returns the differences from TRL, the logs and the batches of three steps with streamed log-probs."""
    args = server_args(out, server, **{**LOG_PROBS, **fields})
    trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(10), peft_config=peft_config)
    if overrides is not None:
        trainer._engine.overrides = overrides
    differences, batches = compare_with_trl(trainer), record_batches(trainer)
    trainer.train()
    assert max(difference for _, difference, _ in differences) < 1e-5
    assert not any(scorer.complete for scorer in trainer._streams.log_probs.scorers.values())  # of old weights
    logs = rollout_logs(trainer)
    assert len(logs) == 3
    return differences, logs, batches


def test_policy(server, model_dir, tmp_path):
    # Seconds of decoding, so that some of it is seen before the end also on a busy machine.
    fields = {"generation_kwargs": {"ignore_eos": True}, "max_completion_length": 256}
    differences, logs, _ = train(server, model_dir, tmp_path, **fields)
    assert [name for name, _, _ in differences] == ["policy"] * 3
    for entry in logs:
        assert entry["darts/stream/missed_rows"] == 0
        assert entry["darts/stream/chunks"] > 16  # of 16 rows: some came in several
        assert entry["darts/stream/hidden_seconds"] > 0
        assert entry["darts/stream/cache_bytes"] > 0
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3


@pytest.mark.parametrize("reference", ["model", "base of an adapter"])
def test_reference(server, model_dir, tmp_path, reference):
    lora, fields = None, {}
    if reference == "model":
        # About half of the answers are truncated. With 24 tokens, all of two batches can be, which teaches nothing.
        fields = {"mask_truncated_completions": True, "max_completion_length": 64, "gradient_checkpointing": True}
    else:  # with a larger learning rate, logits grow until float32 can't give them within 1e-5
        lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    differences, logs, batches = train(server, model_dir, tmp_path, peft_config=lora, beta=0.1, **fields)
    assert [name for name, _, _ in differences] == ["policy", "reference"] * 3
    assert all(entry["darts/stream/missed_rows"] == 0 for entry in logs)
    gaps = (batches[-1]["old_per_token_logps"] - batches[-1]["ref_per_token_logps"]).abs()
    assert gaps.max() > 1e-2  # the two models are not the same any more, also where all rows are masked as truncated


def test_without_room_trl_computes(server, model_dir, tmp_path):
    """A third of the cache is room, for 34 tokens: long candidates are closed, and TRL computes their rows."""

    def half_are_long(command):
        return {"ignore_eos": True, "max_tokens": 96 if command.index % 2 else 3}

    fields = {"stream_cache_gib": 5e-5, "schedule": "grpo"}
    _, logs, _ = train(server, model_dir, tmp_path, overrides=half_are_long, **fields)
    assert [entry["darts/stream/missed_rows"] for entry in logs] == [8] * 3
    assert all(0 < entry["darts/stream/cache_bytes"] <= 5e-5 * 2**30 for entry in logs)


def test_rows_that_come_from_a_buffer(server, model_dir, tmp_path):
    """TRL computes rows that were sampled under other weights."""
    differences, _, _ = train(server, model_dir, tmp_path, schedule="partial_rollout")
    assert differences[0][2] == 0  # nothing was older in the first batch


def test_same_training_with_and_without(server, model_dir, tmp_path):
    """Compares the weights after three steps on the same rows."""
    weights = []
    for streams in ({}, {**LOG_PROBS, **REWARDS}):
        fields = {"generation_kwargs": {"seed": 3}, "schedule": "grpo", "learning_rate": 3e-3, "max_steps": 3}
        args = server_args(tmp_path, server, **{**fields, **streams})
        trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(10))
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert all(entry["darts/stream/chunks"] >= 16 for entry in rollout_logs(trainer))
    assert all(entry["darts/stream/missed_rows"] == 0 for entry in rollout_logs(trainer))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)


def test_groups_are_scored_as_they_complete(server, model_dir, tmp_path, caplog):
    """The rows that DARTS keeps are scored, group by group, and not the first ones. One call hangs."""
    calls, released = [], threading.Event()

    def reward(prompts, completion_ids, **kwargs):
        calls.append((list(prompts), list(completion_ids)))
        if len(calls) == 12:
            released.wait(20)
        return length_reward(prompts, completion_ids)

    fields = {**REWARDS, "stream_reward_timeout_s": 2.0, "max_steps": 3, "target_redundancy": 2.0}
    fields |= {"defer_unsettled_groups": False}  # each rollout's groups are a batch
    args = server_args(tmp_path, server, **fields)
    functions = [reward, length_reward]
    trainer = make_trainer(model_dir, args, reward_funcs=functions, train_dataset=letters_dataset(10))
    batches = record_batches(trainer)
    trainer.train()
    released.set()
    assert len(calls) == 3 * 4  # none again at the end
    assert all(len(set(prompts)) == 1 and len(prompts) == 4 for prompts, _ in calls)
    for step, batch in enumerate(batches):
        scored = sorted(ids for _, rows in calls[4 * step : 4 * step + 4] for ids in rows)
        masks = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        assert scored == sorted(row[mask.bool()].tolist() for row, mask in masks)
    assert [entry["darts/stream/reward_timeouts"] for entry in rollout_logs(trainer)] == [0, 0, 1]
    assert sum("stream_reward_timeout_s" in line for line in caplog.messages) == 1


def test_evaluation_is_left_to_trl(server, model_dir, tmp_path):
    """Evaluation has no decoding to overlap with, and no deadline."""
    threads = []

    def reward(prompts, completion_ids, **kwargs):
        threads.append(threading.current_thread())
        return length_reward(prompts, completion_ids)

    args = server_args(tmp_path, server, per_device_eval_batch_size=8, num_generations_eval=2, **REWARDS)
    trainer = make_trainer(model_dir, args, reward_funcs=reward, eval_dataset=letters_dataset(4))
    assert "eval_reward" in trainer.evaluate()
    assert set(threads) == {threading.main_thread()}


def test_dropped_group(server, model_dir, tmp_path):
    """Its rows repeat another group's with its own prompt, so TRL computes them."""
    fields = {**LOG_PROBS, **REWARDS, "on_generation_error": "drop_group", "max_steps": 2}
    trainer = make_trainer(model_dir, server_args(tmp_path, server, **fields), reward_funcs=distinct_reward)
    trainer._engine.overrides = lambda command: {"top_p": 7.0} if command.group_id == 1 else {}
    differences = compare_with_trl(trainer)
    batches = record_batches(trainer)
    trainer.train()
    assert [missed for _, _, missed in differences] == [4, 4]
    assert max(difference for _, difference, _ in differences) < 1e-5
    for batch in batches:
        assert batch["advantages"][4:8].tolist() == [0.0] * 4
        assert all(group.abs().max() > 1 for i, group in enumerate(batch["advantages"].split(4)) if i != 1)
