"""Tests runs on scripted completions without a server, as users would do."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.models import EOS_ID
from tests.builders import length_reward, letters_dataset, make_args, make_trainer, record_batches, rollout_logs
from trl_darts.scheduling import Scheduler
from trl_darts.testing import stub_servers


LENGTHS = (3, 30, 4, 5, 6, 7, 8, 9)
LIMIT = 20


def write(prompt_ids: list[int], index: int) -> list[int]:
    """The second candidate of each prompt is longer than the limit."""
    return [prompt_ids[0]] * (LENGTHS[index] - 1) + [EOS_ID]


SELECTED, ALL = {3: 4, 4: 4, 5: 4, 6: 4}, {3: 4, 4: 4, 5: 4, 20: 4}  # rows by length
SCHEDULES = {
    "darts": ({}, ALL),  # waits for all while more than 3 % of the answers have no end
    "unguarded": ({"defer_unsettled_groups": False}, SELECTED),
    "grpo": ({"schedule": "grpo"}, ALL),
    "tail_batching": ({"schedule": "tail_batching"}, ALL),
    "partial_rollout": ({"schedule": "partial_rollout"}, ALL),
    "sorted": ({"schedule": "sorted"}, ALL),
    "rollout_ahead": ({"rollout_ahead": 1, "defer_unsettled_groups": False}, SELECTED),
    "continuous": ({"rollout_ahead": "continuous"}, SELECTED),
    "drop_uniform_groups": ({"drop_uniform_groups": True}, SELECTED),
    "stream_rewards": ({"stream_rewards": True}, ALL),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_on_what_was_written(model_dir, tmp_path, name):
    fields, expected = SCHEDULES[name]
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=3, **server, **fields)
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, eval_dataset=letters_dataset(4))
    batches = record_batches(trainer)
    trainer.train()
    assert len(rollout_logs(trainer)) == len(batches) == 3
    for batch in batches:
        lengths: Counter[int] = Counter()
        for prompt, row, mask in zip(
            batch["prompt_ids"], batch["completion_ids"], batch["completion_mask"], strict=True
        ):
            tokens = row[mask.bool()].tolist()
            first = next(token for token in prompt.tolist() if token != trainer.processing_class.pad_token_id)
            assert set(tokens) <= {first, EOS_ID}
            lengths[len(tokens)] += 1
        assert lengths == expected
    assert trainer.evaluate()["eval_completions/mean_length"] == 8  # 3, 4, 5 and 20


def test_a_batch_whose_groups_were_all_dropped_trains_on_filler_rows(model_dir, tmp_path, monkeypatch):
    """Of a rollout without an end, it is the second batch. The run goes on with the third."""
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
    fields = {"rollout_ahead": "continuous", "on_generation_error": "drop_group", "save_rollout_trace": True}
    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=3, learning_rate=1e-3, **server, **fields)
    with stub_servers(write):
        trainer = make_trainer(model_dir, args)
    batches, plain, taken = record_batches(trainer), Scheduler.take, []

    def take(self, group_ids, now):
        result = plain(self, group_ids, now)
        taken.append(result)
        if len(taken) == 2:
            return replace(result, groups=[], dropped={group.plan.group_id: "too long" for group in result.groups})
        return result

    monkeypatch.setattr(Scheduler, "take", take)
    trainer.train()
    assert [bool(batch["completion_mask"].any()) for batch in batches] == [True, False, True]
    logs = rollout_logs(trainer)
    assert [entry["darts/rollout/dropped_groups"] for entry in logs] == [0.0, 4.0, 0.0]
    assert ["darts/pool/length_mean" in entry for entry in logs] == [True, False, True]


def test_the_example_runs_as_printed(model_dir, tmp_path, tokenizer, monkeypatch):
    """It trains: log-probs of scripted answers are unknown, so TRL's correction leaves them their gradient."""
    (code,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(stub_servers), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {
        "tokenizer": tokenizer,
        "model": str(model_dir),
        "my_reward": length_reward,
        "prompts": letters_dataset(40),
    }
    exec(code, names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    (entry,) = rollout_logs(trainer)
    assert (entry["completions/min_length"], entry["completions/max_length"]) == (21, 201)
    assert entry["sampling/importance_sampling_ratio/min"] == 1
    assert abs(entry["train_loss"]) > 0.1
