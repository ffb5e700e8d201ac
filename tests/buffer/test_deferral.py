"""
Unsettled groups wait for a long round. Invariants, each under its name: trained_once, not_starved. The engine writes
scripted answers in virtual time.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.models import EOS_ID
from tests.builders import make_args, make_trainer, record_batches, rollout_logs
from trl_darts.buffer.rounds import MAX_DEFERRALS
from trl_darts.errors import ConfigurationError
from trl_darts.testing import stub_servers


NUM_PROMPTS, LIMIT, NEEDED = 40, 100, 60
SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}


def write(prompt_ids: list[int], index: int) -> list[int]:
    """One candidate of each group is long, another one for each prompt."""
    long = index == sum(prompt_ids) % 4
    return [5] * (NEEDED + 10 if long else 8 + index) + [EOS_ID]


def hard(prompts: list[str], completion_ids: list[list[int]], **kwargs) -> list[float]:
    """For every other prompt an answer is right if, and only if, it is long."""
    needs = [int(prompt[:-1]) % 2 == 1 for prompt in prompts]
    return [
        float(len(ids) >= NEEDED if long else len(ids) % 2) for long, ids in zip(needs, completion_ids, strict=True)
    ]


def deferring_trainer(model_dir, tmp_path, **fields):
    args = make_args(
        tmp_path, max_completion_length=LIMIT, **{**SERVER, "defer_unsettled_groups": True, "max_steps": 10, **fields}
    )
    with stub_servers(write):
        return make_trainer(model_dir, args, reward_funcs=hard)


def test_what_long_answers_teach_is_trained_on(model_dir, tmp_path):
    """A bounded wait aborts every right answer to a hard prompt; deferral trains on half of their groups' prompts."""
    rights = {}
    for defers in (False, True):
        trainer = deferring_trainer(model_dir, tmp_path, max_steps=20, defer_unsettled_groups=defers)
        batches = record_batches(trainer)
        trainer.train()
        rights[defers] = sum(int((b["completion_mask"].sum(1) >= NEEDED).sum()) for b in batches[2:])
    assert rights[False] == 0
    assert rights[True] >= 20


def test_trained_once(model_dir, tmp_path):
    """Of an epoch's prompts each is trained on once, or waits for the next epoch."""
    trainer = deferring_trainer(model_dir, tmp_path)
    batches = record_batches(trainer)
    trainer.train()
    trained = Counter()
    for batch in batches:
        weights = batch["completion_mask"].sum(1)
        trained.update(row["prompt"] for row, weight in zip(batch["inputs"], weights, strict=True) if weight)
    assert set(trained.values()) == {4}
    waiting = [trainer._batches.rows[i]["prompt"] for i in trainer._batches.buffer.entries]
    assert not set(trained) & set(waiting)
    assert len(trained) + len(waiting) == NUM_PROMPTS


def test_not_starved(model_dir, tmp_path):
    """A long round comes after so many batches at most, also for a single deferred prompt."""
    trainer = deferring_trainer(model_dir, tmp_path, max_steps=40)
    waits: list[int] = []
    source = trainer._sources[0]
    next_inputs = source.next_inputs

    def recorded(inputs):
        rows = next_inputs(inputs)
        waits.extend(entry.num_deferrals for entry in trainer._batches.buffer.entries.values())
        return rows

    source.next_inputs = recorded
    trainer.train()
    assert 0 < max(waits) <= MAX_DEFERRALS + 1


def test_logged(model_dir, tmp_path):
    trainer = deferring_trainer(model_dir, tmp_path, max_steps=12)
    trainer.train()
    logs = rollout_logs(trainer)
    assert logs[0]["darts/buffer/long_round"] == 1.0  # nothing is known of answers without an end
    assert sum(log["darts/deferral/deferred"] for log in logs) > 0
    assert np.mean([log["darts/buffer/long_round"] for log in logs]) < 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "grpo"}, "'grpo'"),
        ({"long_end_patience": None}, "waits for all"),
        ({"drop_uniform_groups": True}, "drop_uniform_groups"),
        ({"use_vllm": False}, "vllm_mode='server'"),
    ],
)
def test_what_can_not_defer(tmp_path, model_dir, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        deferring_trainer(model_dir, tmp_path, **fields)
