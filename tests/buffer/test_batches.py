"""Schedules whose batches are not the loader's, against a real server: what is trained on, and what a resume keeps."""

from collections import Counter

import pytest
import torch

from tests.builders import letter_of, letters_dataset, make_trainer, record_ages, record_batches, rollout_logs
from tests.test_trainer_server import server_args


pytestmark = pytest.mark.vllm

SCHEDULES = {
    "tail_batching": {"schedule": "tail_batching"},
    "tail_batching, dual-end": {
        "schedule": "tail_batching",
        "selection": "dual_end",
        "long_end_patience": "auto",
    },
    "partial_rollout": {"schedule": "partial_rollout", "max_partial_age": 2},
    "sorted": {"schedule": "sorted", "sorted_group_batches": 2},
    "sorted, partial": {"schedule": "sorted", "sorted_group_batches": 2, "sorted_mode": "partial"},
}


PROMPTS = letters_dataset(16)
STEPS = 4  # of an epoch, with 4 prompts each


def epoch_args(tmp_path, server, name, **fields):
    """Two epochs."""
    return server_args(tmp_path, server, **{"max_steps": 2 * STEPS, **SCHEDULES[name], **fields})


def trained_prompts(batches) -> list[list[str]]:
    return [[row["prompt"] for row in batch["inputs"]] for batch in batches]


def assert_an_epoch(prompts) -> None:
    """Each prompt's rows, once."""
    assert Counter(prompt for batch in prompts for prompt in batch) == dict.fromkeys(PROMPTS["prompt"], 4)


@pytest.mark.parametrize("name", ["tail_batching, dual-end", "partial_rollout", "sorted"])
def test_each_prompt_is_trained_on_once_per_epoch(server, model_dir, tmp_path, name):
    args = epoch_args(tmp_path, server, name)
    matches = []

    def reward(prompts, completion_ids, **kwargs):
        matches.extend(prompt[-1] == letter_of(ids[0]) for prompt, ids in zip(prompts, completion_ids, strict=True))
        return [float(len(ids) % 5) for ids in completion_ids]

    trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=PROMPTS)
    batches = record_batches(trainer)
    trainer.train()
    prompts = trained_prompts(batches)
    assert_an_epoch(prompts[:STEPS])
    assert_an_epoch(prompts[STEPS:])
    for batch in prompts:
        assert all(len(set(batch[start : start + 4])) == 1 for start in range(0, 16, 4))
    assert all(matches)  # each completion answers its own prompt
    logs = [entry for entry in trainer.state.log_history if "darts/staleness/off_policy_share" in entry]
    assert len(logs) == 2 * STEPS
    shares = [entry["darts/staleness/off_policy_share"] for entry in logs]
    if name == "partial_rollout":  # the others begin anew
        assert max(shares) > 0
    else:
        assert max(shares) == 0
        assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)
    num_deferred = sum(entry.get("darts/rollout/deferred_groups", 0) for entry in logs)
    assert num_deferred > 0


def test_resumed_tokens_keep_the_logprobs_of_their_policy(server, model_dir, tmp_path):
    """Without learning, all policies are the same: the ratio of every token is 1, whichever step sampled it."""
    args = epoch_args(tmp_path, server, "partial_rollout", learning_rate=0.0, reuse_logprobs=False)
    trainer = make_trainer(model_dir, args, train_dataset=PROMPTS)
    batches = record_batches(trainer)
    trainer.train()
    logs = rollout_logs(trainer)
    assert sum(entry["darts/staleness/off_policy_share"] > 0 for entry in logs) >= 3
    for batch in batches:
        mask = batch["completion_mask"].bool()
        gap = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].abs()
        assert gap.max() < 1e-4


def test_resumed_tokens_of_a_policy_that_learns(server, model_dir, tmp_path):
    """New tokens have a ratio of 1, and old ones have not: each was sampled where the record says."""
    args = epoch_args(tmp_path, server, "partial_rollout", learning_rate=3e-3, reuse_logprobs=False)
    trainer = make_trainer(model_dir, args, train_dataset=PROMPTS)
    ages, batches = record_ages(trainer), record_batches(trainer)
    trainer.train()
    old_gaps = []
    for batch, rows in zip(batches, ages, strict=True):
        gaps = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
        for gap, runs in zip(gaps, rows, strict=True):
            start = 0
            for age, count in runs:
                part = gap[start : start + count]
                if age == 0:
                    assert part.max() < 1e-3
                else:
                    old_gaps.append(part.max().item())
                start += count
    assert max(old_gaps) > 1e-2


def test_stale_tokens_can_be_masked(server, model_dir, tmp_path):
    args = epoch_args(tmp_path, server, "partial_rollout", mask_stale_after=0)
    trainer = make_trainer(model_dir, args, train_dataset=PROMPTS)
    batches = record_batches(trainer)
    trainer.train()
    # Of all batches: one that was complete before its step comes without a rollout, and may be stale as a whole.
    logs = [entry for entry in trainer.state.log_history if "darts/staleness/masked_share" in entry]
    assert sum(entry["darts/staleness/masked_share"] > 0 for entry in logs) >= 3
    for batch, entry in zip(batches, logs, strict=True):
        weights = batch["completion_mask"] * batch["tool_mask"]
        assert batch["num_items_in_batch"] == weights.sum()
        share = 1 - weights.sum() / batch["completion_mask"].sum()
        assert share.item() == pytest.approx(entry["darts/staleness/masked_share"], abs=1e-6)
        assert entry["darts/staleness/masked_share"] == entry["darts/staleness/off_policy_share"]


@pytest.mark.parametrize(
    ("name", "stop_at"),  # in the first epoch, or in the second
    [("tail_batching", 2), ("partial_rollout", 6), ("sorted, partial", 3)],
)
def test_interrupted_and_resumed(server, model_dir, tmp_path, name, stop_at):
    """The same prompts as without the interruption, none twice and none lost, whatever was in flight."""
    prompts = []
    for part in ("first", "second"):
        args = epoch_args(tmp_path, server, name, save_strategy="steps", save_steps=stop_at)
        trainer = make_trainer(model_dir, args, train_dataset=PROMPTS)
        batches = record_batches(trainer)
        if part == "first":
            trainer.add_callback(_stop_after(stop_at))
            trainer.train()
            assert len(trainer._batches.buffer) > 0
        else:
            trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop_at}"))
        prompts += trained_prompts(batches)
    assert len(prompts) == 2 * STEPS
    assert_an_epoch(prompts[:STEPS])
    assert_an_epoch(prompts[STEPS:])


def test_resumed_within_a_batch(server, model_dir, tmp_path):
    """Two optimizer steps share a batch. The rest of one that was interrupted between them is in the checkpoint."""
    fields = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 5}
    prompts = []
    for part in ("first", "second"):
        args = epoch_args(tmp_path, server, "sorted", **fields)
        trainer = make_trainer(model_dir, args, train_dataset=PROMPTS)
        batches = record_batches(trainer)
        if part == "first":
            trainer.add_callback(_stop_after(5))
            trainer.train()
        else:
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
        prompts += trained_prompts(batches)
    assert len(prompts) == 4
    assert_an_epoch(prompts)


def test_the_same_trainer_can_resume(server, model_dir, tmp_path):
    args = epoch_args(tmp_path, server, "partial_rollout", max_steps=STEPS, save_strategy="steps", save_steps=2)
    trainer = make_trainer(model_dir, args, train_dataset=PROMPTS)
    batches = record_batches(trainer)
    stop = _stop_after(2)
    trainer.add_callback(stop)
    trainer.train()
    trainer.remove_callback(stop)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_an_epoch(trained_prompts(batches))
    trainer.train()  # from the beginning, with an empty buffer
    assert_an_epoch(trained_prompts(batches)[STEPS:])


def _stop_after(steps: int):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= steps

    return Stop()


def test_dropped_prompts_leave_the_buffer(server, model_dir, tmp_path):
    args = epoch_args(tmp_path, server, "tail_batching", max_steps=6, on_generation_error="drop_group")
    trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(24))
    refused = {"top_p": 7.0}
    trainer._engine.overrides = lambda command: refused if command.group_id % 4 == 1 else {}
    batches = record_batches(trainer)
    trainer.train()
    dropped = sum(entry["darts/rollout/dropped_groups"] for entry in rollout_logs(trainer))
    assert dropped >= 5
    weights = torch.stack([batch["completion_mask"].any(dim=1) for batch in batches])
    trained = [p for batch, own in zip(trained_prompts(batches), weights, strict=True)
               for p, weight in zip(batch, own, strict=True) if weight]  # fmt: skip
    assert max(Counter(trained).values()) == 4
    assert len(trained) == 4 * (24 - dropped)
    assert len(trainer._batches.buffer) == 0
