"""Reward functions may change their arguments in place: TRL has one object per row, so no other row may notice."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from benchmarks.models import EOS_ID
from tests.builders import make_args, make_trainer
from trl_darts.testing import stub_servers


SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
SCHEDULES = {
    "deferral": {},
    "dynamic": {"drop_uniform_groups": True},
    "tail": {"schedule": "tail_batching"},
    "streamed": {"stream_rewards": True},
    "streamed_buffer": {"stream_rewards": True, "schedule": "tail_batching"},
    "streamed_continuous": {"stream_rewards": True, "rollout_ahead": "continuous"},
    "loader": {"defer_unsettled_groups": False},
}


def write(prompt_ids: list[int], index: int) -> list[int]:
    return [5 + sum(prompt_ids) % 9] * (3 + 40 * (index == sum(prompt_ids) % 4) + index) + [EOS_ID]


class Careless:
    """Appends to everything that it is given, and keeps what it saw before."""

    __name__ = "careless"

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, tests: Any, **kwargs: Any) -> list[float]:
        rewards = []
        for prompt, completion, ids, test in zip(prompts, completions, completion_ids, tests, strict=True):
            self.seen.append((len(prompt), len(completion), len(test)))
            rewards.append(float(len(ids)))
            prompt.append({"role": "user", "content": "again"})
            completion.append({"role": "assistant", "content": "again"})
            test.append("again")
            ids.append(7)
        return rewards


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_function_changes_reaches_no_other_row(model_dir, tmp_path, name, tokenizer, monkeypatch):
    """Each row arrives as it is in the data set, and every prompt is decoded and trained on with its own tokens."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}A"}], "tests": ["1"]} for i in range(24)]
    careless, decoded = Careless(), []

    def watch(prompt_ids: list[int], index: int) -> list[int]:
        decoded.append(len(prompt_ids))
        return write(prompt_ids, index)

    args = make_args(tmp_path, max_completion_length=64, max_steps=5, **SERVER, **SCHEDULES[name])
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with stub_servers(watch):
        trainer = make_trainer(
            model_dir, args, reward_funcs=careless, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
    trained: list[int] = []
    generate = trainer._generate

    def recorded(prompts: Any, *rest: Any) -> Any:
        output = generate(prompts, *rest)
        trained.extend(len(ids) for ids in output[0])
        return output

    trainer._generate = recorded
    trainer.train()
    assert set(careless.seen) == {(1, 1, 1)}
    assert max(decoded) <= 3
    assert max(trained) <= 3
