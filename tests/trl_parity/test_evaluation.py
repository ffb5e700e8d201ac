"""Evaluation: as many generations as it is told, never more, on one data set or several."""

import pytest
from datasets import DatasetDict

from tests.trl_parity.common import chats, make_args, make_trainer, step_logs, texts, train, train_all, variety


def counting_reward(sizes):
    def reward(prompts, completions, **kwargs):
        sizes.append((len(prompts), len({str(prompt) for prompt in prompts})))
        return variety(completions)

    return reward


@pytest.mark.parametrize("data", [texts, chats])
@pytest.mark.parametrize(
    ("fields", "evaluation"),
    [
        ({}, [(8, 2), (8, 2), (4, 1)]),
        ({"num_generations_eval": 1}, [(5, 5)]),
        ({"num_generations_eval": 2}, [(8, 4), (2, 1)]),
        ({"num_generations_eval": 8}, [(8, 1)] * 5),
    ],
)
def test_evaluation_between_steps(lm, tmp_path, data, fields, evaluation):
    sizes = []
    trainer = make_trainer(
        lm,
        make_args(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, **fields),
        eval_dataset=data(5),
        train_dataset=data(8),
        reward_funcs=counting_reward(sizes),
    )
    train_all(trainer)
    assert sizes == [(8, 2), *evaluation, (8, 2), *evaluation]
    for name in ("loss", "reward", "rewards/reward/mean", "completions/mean_length", "entropy", "num_tokens"):
        assert len(step_logs(trainer, f"eval_{name}")) == 2, name
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("eval_darts")]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_evaluation_before_the_first_step(lm, tmp_path, loss_type):
    args = make_args(tmp_path, eval_strategy="steps", eval_steps=2, eval_on_start=True, loss_type=loss_type)
    trainer = make_trainer(lm, args, eval_dataset=texts(2))
    train_all(trainer)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [0, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("container", [dict, DatasetDict])
def test_several_data_sets(lm, tmp_path, container, stream):
    parts = {"easy": texts(2), "hard": chats(4)}
    if stream:
        container, parts = dict, {name: part.to_iterable_dataset() for name, part in parts.items()}
    sizes = []
    args = make_args(tmp_path, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
    trainer = make_trainer(lm, args, eval_dataset=container(parts), reward_funcs=counting_reward(sizes))
    train_all(trainer)
    assert sizes == [(8, 2)] * 5
    for name in ("eval_easy_loss", "eval_hard_loss"):
        assert len(step_logs(trainer, name)) == 1


def test_evaluation_leaves_the_training_alone(lm, tmp_path, curve):
    """Generation draws from torch's generator, so only sizes and order can be compared, not tokens."""
    sizes = []
    args = make_args(tmp_path, latency_curve=curve, max_steps=4)
    trainer = make_trainer(lm, args, eval_dataset=texts(4), reward_funcs=counting_reward(sizes))
    before = trainer.evaluate()
    tracked = len(trainer.length_tracker)
    train(trainer)
    after = trainer.evaluate()
    assert tracked == 0
    assert len(trainer.length_tracker) == 8
    assert before.keys() == after.keys() >= {"eval_loss", "eval_reward", "eval_rewards/reward/mean"}
    assert sizes == [(8, 2)] * 8
    assert len(step_logs(trainer, "darts/rollout/seconds")) == 4


def test_evaluation_gives_rewards_the_columns_of_its_rows(lm, tmp_path):
    seen = []

    def reward(prompts, completions, answer, **kwargs):
        seen.append([prompt.split()[0] == str(value) for prompt, value in zip(prompts, answer, strict=True)])
        return variety(completions)

    dataset = texts(4).add_column("answer", [0, 1, 2, 3])
    trainer = make_trainer(lm, make_args(tmp_path), train_dataset=dataset, eval_dataset=dataset, reward_funcs=reward)
    trainer.evaluate()
    assert seen == [[True] * 8] * 2


def test_evaluation_needs_a_data_set(lm, tmp_path):
    with pytest.raises(ValueError, match="eval_dataset"):
        make_trainer(lm, make_args(tmp_path)).evaluate()
