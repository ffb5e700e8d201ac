"""Tests `drop_uniform_groups`: no uniform groups, and every prompt once per pass over the data."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from tests.builders import letters_dataset, make_args, make_trainer, record_batches
from tests.model_server import model_server
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.training.rows import is_uniform


pytestmark = pytest.mark.vllm  # TRL imports it; a real server: `tests/launches/test_two_processes.py`

FIELDS = {"max_completion_length": 10, "drop_uniform_groups": True}


class Reward:
    """Rewards all answers to some letters with 1, and other rows with distinct values."""

    __name__ = "reward"

    def __init__(self, uniform: str = "AC", seconds: float = 0.0) -> None:
        self.uniform, self.seconds = uniform, seconds
        self.calls: list[list[str]] = []  # prompts

    def __call__(self, prompts: list[str], completion_ids: Any, log_extra: Any, log_metric: Any, **kwargs: Any) -> Any:
        self.calls.append(list(prompts))
        time.sleep(self.seconds)
        log_extra("letter", [prompt[-1] for prompt in prompts])
        log_metric("rows", len(prompts))
        return [1.0 if prompt[-1] in self.uniform else i / 100 for i, prompt in enumerate(prompts)]

    @property
    def prompts(self) -> Counter:
        """Returns the number of scored rows of each prompt."""
        return Counter(prompt for call in self.calls for prompt in call)


def groups_of(batch: dict[str, Any]) -> list[tuple[str, list[float]]]:
    rows = [
        (row["prompt"], advantage)
        for row, advantage in zip(batch["inputs"], batch["advantages"].tolist(), strict=True)
    ]
    groups = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    assert all(len({prompt for prompt, _ in group}) == 1 for group in groups)
    return [(group[0][0], [advantage for _, advantage in group]) for group in groups]


def logged(trainer: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rollout_ahead": 1},
        {"schedule": "grpo", "gradient_accumulation_steps": 2, "stream_rewards": True},
    ],
)
def test_every_group_teaches_something(model_dir, tmp_path, monkeypatch, fields):
    reward = Reward()
    with model_server(model_dir, monkeypatch) as (_, settings):
        args = make_args(tmp_path, max_steps=4, log_completions=True, **settings, **FIELDS, **fields)
        trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=letters_dataset(80))
        batches = record_batches(trainer)
        trainer.train()
    num_batches = 4 * args.gradient_accumulation_steps // args.steps_per_generation
    assert len(batches) == num_batches
    trained = [prompt for batch in batches for prompt, _ in groups_of(batch)]
    assert {prompt[-1] for prompt in trained} == {"B", "D", "E"}
    assert len(set(trained)) == len(trained)
    assert all(any(advantages) for batch in batches for _, advantages in groups_of(batch))
    assert logged(trainer, "frac_reward_zero_std") == [0.0] * 4
    assert not any(logged(trainer, "darts/uniform/missing"))
    # TRL gets the cached rewards, and functions are not called twice. Groups beyond the batch are sampled again.
    assert sum(reward.prompts.values()) == 4 * sum(logged(trainer, "darts/uniform/sampled"))
    uniform = {prompt: count for prompt, count in reward.prompts.items() if prompt[-1] in "AC"}
    assert set(uniform.values()) == {4}
    assert sum(logged(trainer, "darts/uniform/dropped")) == len(uniform) > 0
    assert list(trainer._logs["extra"]["letter"]) == [prompt[-1] for prompt in trainer._logs["prompt"]]
    rounds = logged(trainer, "darts/uniform/rounds")
    assert rounds[0] > 1
    assert rounds[-1] < 3  # it has learned how many prompts to start
    totals = [
        float(entry["darts/budget/total"]) for entry in trainer.state.log_history if "darts/rollout/seconds" in entry
    ]
    assert all(total >= 16 for total in totals)  # of all rounds together


def test_groups_that_are_missing_have_no_weight(model_dir, tmp_path, monkeypatch):
    with model_server(model_dir, monkeypatch) as (_, settings):
        args = make_args(tmp_path, max_steps=1, max_prompt_oversampling=1.5, **settings, **FIELDS)
        reward = Reward("ABCD", seconds=0.1)
        trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=letters_dataset(20))
        batches = record_batches(trainer)
        trainer.train()
    (batch,) = batches
    assert len(reward.prompts) == 6
    informative = sum(prompt[-1] == "E" for prompt in reward.prompts)
    weights = batch["completion_mask"].sum(dim=1).view(4, 4).sum(dim=1)
    assert (weights > 0).tolist() == [True] * informative + [False] * (4 - informative)
    assert logged(trainer, "darts/uniform/missing") == [4.0 - informative]
    assert logged(trainer, "darts/score/seconds")[0] > 0.1 * len(reward.calls)


def test_a_reward_that_teaches_nothing_ends_the_training(model_dir, tmp_path, monkeypatch):
    with model_server(model_dir, monkeypatch) as (_, settings):
        args = make_args(tmp_path, max_prompt_oversampling=2, **settings, **FIELDS)
        trainer = make_trainer(model_dir, args, reward_funcs=Reward("ABCDE"))
        with pytest.raises(GenerationError, match=r"`drop_uniform_groups` .* of 8 prompts .* none has rewards with a"):
            trainer.train()


def test_the_data_is_passed_over_again_and_resumed(model_dir, tmp_path, monkeypatch):
    """Six steps of four groups are two passes, because 12 of 20 prompts are not uniform. Interrupts the second."""
    fields = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, **FIELDS}
    with model_server(model_dir, monkeypatch) as (_, settings):
        whole = None
        for part, start in (("whole", None), ("again", "checkpoint-4")):
            args = make_args(tmp_path / part, **settings, **fields)
            trainer = make_trainer(model_dir, args, reward_funcs=Reward(), train_dataset=letters_dataset(20))
            batches = record_batches(trainer)
            trainer.train(resume_from_checkpoint=start and str(tmp_path / "whole" / start))
            prompts = [[prompt for prompt, _ in groups_of(batch)] for batch in batches]
            whole = whole or prompts
    assert len(whole) == 6
    first = [prompt for batch in whole[:3] for prompt in batch]
    assert len(set(first)) == 12  # each once, before any comes again
    second = [prompt for batch in whole[3:] for prompt in batch]
    assert len(set(second)) == 12
    assert prompts[0] == whole[4]
    assert len(prompts) == 2


@pytest.mark.parametrize(
    ("rewards", "mode", "expected"),
    [
        ([[1.0, 0.5], [1.0, 0.5]], "sum_then_normalize", True),
        ([[1.0, 0.0], [0.0, 1.0]], "sum_then_normalize", True),  # the sum is constant
        ([[1.0, 0.0], [0.0, 1.0]], "normalize_then_sum", False),
        ([[1.0, 0.0], [0.0, 0.0]], "sum_then_normalize", False),
        ([[1.0, None], [1.0, None]], "sum_then_normalize", True),
        ([[1.0, 0.0], [None, None]], "sum_then_normalize", True),  # TRL gives such a row no advantage
    ],
)
def test_what_has_no_spread(rewards, mode, expected):
    class Trainer:
        reward_weights = torch.ones(2)
        multi_objective_aggregation = mode

    values = torch.tensor([[float("nan") if value is None else value for value in row] for row in rewards])
    assert is_uniform(values, Trainer()) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "sorted"}, r"`drop_uniform_groups` \(True\) does not run with `schedule` \('sorted'\)"),
        ({"max_prompt_oversampling": 1.0}, r"`max_prompt_oversampling` \(1.0\) must be greater than 1"),
        ({"drop_uniform_groups": False, "max_prompt_oversampling": 2.0}, r"has no effect without `drop_uniform"),
        ({"stream_logprobs": True}, r"`stream_logprobs` \(True\) does not run with `drop_uniform_groups`"),
    ],
)
def test_settings_that_can_not_work(tmp_path, fields, words):
    server = {"use_vllm": True, "vllm_mode": "server"}
    with pytest.raises(ConfigurationError, match=words):
        make_args(tmp_path, **{**server, "drop_uniform_groups": True, **fields})


def test_without_servers_it_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`drop_uniform_groups` \(True\) .* or leave it unset"):
        make_args(tmp_path, drop_uniform_groups=True).check_start()
