"""Tests `skip_uniform_prompts`: what taught nothing is sampled less and less, and everything else as before."""

from collections import Counter

import pytest

from tests.builders import letters_dataset, make_args, make_trainer, record_batches
from tests.model_server import model_server
from tests.test_drop_uniform import Reward, logged
from tests.test_trainer_server import server_args


pytestmark = pytest.mark.vllm  # TRL imports it

FIELDS = {"max_completion_length": 10, "skip_uniform_prompts": True}
UNIFORM = "AC"
PROMPTS = letters_dataset(20)  # five batches in a pass


def groups_by_letter(batches) -> list[Counter]:
    return [Counter(row["prompt"][-1] for row in batch["inputs"][::4]) for batch in batches]


def assert_skipped(trainer, groups, num_steps):
    """The first pass has every prompt; the later ones few of those that taught nothing."""
    assert len(groups) == num_steps
    first, later = sum(groups[:5], Counter()), sum(groups[8:], Counter())
    share = sum(later[letter] for letter in UNIFORM) / later.total()
    assert share < 0.3 < sum(first[letter] for letter in UNIFORM) / first.total()
    ratios = logged(trainer, "darts/skip/skipped_ratio")
    assert not any(ratios[:4])
    assert max(ratios) > 0.2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"schedule": "grpo"},
        {"schedule": "grpo", "rollout_ahead": 1, "stream_rewards": True},
        {"schedule": "sorted", "sorted_group_batches": 2},
        {
            "schedule": "grpo",
            "stream_training": True,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
        },
    ],
    ids=str,
)
def test_what_taught_nothing_is_sampled_less(model_dir, tmp_path, monkeypatch, fields):
    with model_server(model_dir, monkeypatch) as (_, settings):
        args = make_args(tmp_path, max_steps=16, **{**settings, **FIELDS, **fields})
        trainer = make_trainer(model_dir, args, reward_funcs=Reward(UNIFORM), train_dataset=PROMPTS)
        batches = record_batches(trainer)
        trainer.train()
    waves = 2 if args.stream_training else 1
    groups = groups_by_letter(batches)
    assert_skipped(trainer, [sum(groups[i : i + waves], Counter()) for i in range(0, len(groups), waves)], 16)


def test_replaced_groups_are_skipped_the_next_time(server, model_dir, tmp_path):
    """On a real server, with dynamic sampling, which drops what teaches nothing after it was decoded."""
    args = server_args(tmp_path, server, max_steps=12, drop_uniform_groups=True, **FIELDS)
    reward = Reward(UNIFORM)
    trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=PROMPTS)
    trainer.train()
    assert max(logged(trainer, "darts/skip/skipped_ratio")) > 0.2
    dropped = logged(trainer, "darts/uniform/dropped")
    assert sum(dropped[6:]) < sum(dropped[:6])


def test_a_rollout_without_an_end(server, model_dir, tmp_path):
    fields = {"schedule": "grpo", "rollout_ahead": "continuous"}
    args = server_args(tmp_path, server, max_steps=16, **FIELDS, **fields)
    trainer = make_trainer(model_dir, args, reward_funcs=Reward(UNIFORM), train_dataset=PROMPTS)
    batches = record_batches(trainer)
    trainer.train()
    groups = groups_by_letter(batches)
    share = sum(own[letter] for own in groups[8:] for letter in UNIFORM) / 32
    assert share < 0.35  # two batches of prompts have entered before the rewards of the ones before are known
    assert max(logged(trainer, "darts/skip/skipped_ratio")) > 0.2


def test_a_resumed_run_skips_what_it_would_have_skipped(model_dir, tmp_path, monkeypatch):
    def trained(steps, **fields):
        with model_server(model_dir, monkeypatch) as (_, settings):
            args = make_args(
                tmp_path / "run", max_steps=16, schedule="grpo", save_steps=10, **settings, **FIELDS, **fields
            )
            trainer = make_trainer(model_dir, args, reward_funcs=Reward(UNIFORM), train_dataset=PROMPTS)
            batches = record_batches(trainer)
            trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10") if steps else None)
        return [[row["prompt"] for row in batch["inputs"]] for batch in batches]

    whole = trained(0, save_strategy="steps")
    assert trained(10) == whole[10:]
