"""Rewards: functions of all kinds, models with their own tokenizers, and how advantages come of them."""

import asyncio
import logging

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.builders import record_batches
from tests.trl_parity.common import (
    chats,
    make_args,
    make_trainer,
    step_logs,
    text_of,
    texts,
    train,
    train_all,
    variety,
)


def length(completions, **kwargs):
    return [float(len(text_of(completion))) for completion in completions]


async def async_length(completions, **kwargs):
    await asyncio.sleep(0)
    return length(completions)


def nothing(completions, **kwargs):
    return [None] * len(completions)


def some(completions, **kwargs):
    """Not applicable to every other row."""
    return [value if index % 2 else None for index, value in enumerate(length(completions))]


class Judge:
    """A callable object."""

    def __call__(self, completions, **kwargs):
        return variety(completions)


@pytest.mark.parametrize("data", [texts, chats])
@pytest.mark.parametrize(
    ("reward_funcs", "names"),
    [
        (length, ["length"]),
        (async_length, ["async_length"]),
        ([length, variety], ["length", "variety"]),
        ([variety, async_length, async_length], ["variety", "async_length"]),
        ([variety, nothing], ["variety"]),
        ([variety, some], ["variety", "some"]),
        (Judge(), ["Judge"]),
    ],
)
def test_reward_functions(lm, tmp_path, reward_funcs, names, data):
    trainer = make_trainer(lm, make_args(tmp_path), reward_funcs=reward_funcs, train_dataset=data())
    train_all(trainer)
    for name in names:
        assert all(value > 0 for value in step_logs(trainer, f"rewards/{name}/mean"))
        assert len(step_logs(trainer, f"rewards/{name}/std")) == 2


def test_rows_that_no_function_can_score_have_no_advantage(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path), reward_funcs=some)
    batches = record_batches(trainer)
    train_all(trainer)
    for batch in batches:
        assert batch["advantages"][::2].tolist() == [0] * 4
        assert batch["advantages"].any()
        assert batch["advantages"].view(2, 4).sum(1).tolist() == pytest.approx([0, 0], abs=1e-4)


def test_nothing_is_learnt_and_a_warning_said_where_no_function_scores(lm, tmp_path, caplog):
    trainer = make_trainer(lm, make_args(tmp_path), reward_funcs=nothing)
    with caplog.at_level(logging.WARNING, logger="trl.trainer.grpo_trainer"):
        assert train(trainer) == set()
    assert "All reward functions returned None" in caplog.text
    assert step_logs(trainer, "reward") == [None, None]


def test_function_is_given_columns_state_and_places_to_log(lm, tmp_path):
    seen = []

    def reward(prompts, completions, completion_ids, target, trainer_state, log_extra, log_metric, **kwargs):
        seen.append((trainer_state.global_step, prompts, target))
        log_extra("target", target)
        log_metric("mean_target", sum(target) / len(target))
        return variety(completions)

    dataset = texts().add_column("target", list(range(8)))
    trainer = make_trainer(lm, make_args(tmp_path), reward_funcs=reward, train_dataset=dataset)
    train_all(trainer)
    assert [step for step, _, _ in seen] == [0, 1]
    for _, prompts, target in seen:
        assert [int(prompt[0]) for prompt in prompts] == target == [t for t in target[::4] for _ in range(4)]
    assert step_logs(trainer, "mean_target") == [sum(target) / 8 for _, _, target in seen]
    assert list(trainer._logs["extra"]["target"]) == seen[-1][2]


def as_function(is_async, reward):
    """A reward function, or a coroutine function that does the same."""

    async def later(**kwargs):
        return reward(**kwargs)

    return later if is_async else reward


@pytest.mark.parametrize("is_async", [False, True])
def test_function_that_returns_too_few_rewards_is_named(lm, tmp_path, is_async):
    reward = as_function(is_async, lambda completions, **kwargs: [1.0])
    with pytest.raises(ValueError, match="returned 1 rewards, but 8 were expected"):
        make_trainer(lm, make_args(tmp_path), reward_funcs=reward).train()


@pytest.mark.parametrize("is_async", [False, True])
def test_error_of_a_function_is_raised(lm, tmp_path, is_async):
    def broken(**kwargs):
        raise ZeroDivisionError("of the reward")

    with pytest.raises(ZeroDivisionError, match="of the reward"):
        make_trainer(lm, make_args(tmp_path), reward_funcs=as_function(is_async, broken)).train()


# Reward models


def reward_model(model_dir):
    return AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1)


def scores(model_dir, texts):
    """What a reward model gives to whole texts, one at a time."""
    model, tokenizer = reward_model(model_dir), AutoTokenizer.from_pretrained(model_dir)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]


@pytest.mark.parametrize("own_tokenizer", [False, True])
@pytest.mark.parametrize("data", [texts, chats])
def test_reward_model_scores_prompt_and_completion_in_its_own_words(zoo, tmp_path, data, own_tokenizer):
    path = zoo.reward(reverse=own_tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(path)
    read = []

    def reader(prompts, completions, **kwargs):
        for prompt, completion in zip(prompts, completions, strict=True):
            whole = prompt + completion
            read.append(whole if isinstance(whole, str) else tokenizer.apply_chat_template(whole, tokenize=False))
        return [0.0] * len(prompts)

    trainer = make_trainer(
        zoo.lm(),
        make_args(tmp_path),
        reward_funcs=[reward_model(path), reader],
        reward_processing_classes=[tokenizer, None] if own_tokenizer else None,
        train_dataset=data(),
    )
    given, calculate = [], trainer._calculate_rewards

    def recorded(*args):
        given.append(calculate(*args))
        return given[-1]

    trainer._calculate_rewards = recorded
    train_all(trainer)
    assert torch.cat(given)[:, 0].tolist() == pytest.approx(scores(path, read), abs=1e-4)
    assert len(set(scores(path, read))) > 8


def test_models_and_functions_mix(zoo, tmp_path):
    paths = [str(zoo.reward()), str(zoo.reward("llama", seed=2))]
    trainer = make_trainer(zoo.lm(), make_args(tmp_path), reward_funcs=[paths[0], variety, paths[1], async_length])
    assert len(trainer.reward_processing_classes) == 4
    train_all(trainer)
    for name in (*(path.split("/")[-1] for path in paths), "variety", "async_length"):
        assert len(step_logs(trainer, f"rewards/{name}/mean")) == 2


def test_reward_model_without_padding_token_gets_one(zoo, tmp_path):
    path = zoo.reward()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = None
    trainer = make_trainer(zoo.lm(), make_args(tmp_path), reward_funcs=str(path), reward_processing_classes=tokenizer)
    assert trainer.reward_processing_classes == [tokenizer]
    assert tokenizer.pad_token == tokenizer.eos_token
    assert trainer.reward_funcs[0].config.pad_token_id == tokenizer.eos_token_id
    train_all(trainer)


def test_reward_model_is_not_trained(zoo, tmp_path):
    trainer = make_trainer(zoo.lm(), make_args(tmp_path), reward_funcs=str(zoo.reward()))
    before = {name: param.clone() for name, param in trainer.reward_funcs[0].named_parameters()}
    train_all(trainer)
    assert all(torch.equal(param, before[name]) for name, param in trainer.reward_funcs[0].named_parameters())


# Advantages


def expected_advantages(rewards, scale, aggregation, weights):
    """`rewards` of shape (N·M, functions), in groups of four."""
    groups = rewards.view(2, 4, -1)
    if aggregation == "normalize_then_sum":
        normal = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        total = (normal * weights).sum(-1).view(-1)
        return (total - total.mean()) / (total.std() + 1e-4)
    total = (groups * weights).sum(-1)
    advantages = total - total.mean(1, keepdim=True)
    if scale in (True, "group"):
        advantages = advantages / (total.std(1, keepdim=True) + 1e-4)
    elif scale == "batch":
        advantages = advantages / (total.std() + 1e-4)
    return advantages.view(-1)


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
@pytest.mark.parametrize(
    ("scale", "aggregation"),
    [(scale, "sum_then_normalize") for scale in (True, "group", "batch", False, "none")]
    + [("group", "normalize_then_sum")],
)
def test_advantages(lm, tmp_path, scale, aggregation, weights):
    args = make_args(tmp_path, scale_rewards=scale, multi_objective_aggregation=aggregation, reward_weights=weights)
    rewarded = []

    def reward(completions, **kwargs):
        rewarded.append(torch.tensor([length(completions), variety(completions)]).T)
        return rewarded[-1][:, 0].tolist()

    trainer = make_trainer(lm, args, reward_funcs=[reward, variety])
    batches = record_batches(trainer)
    train_all(trainer)
    factors = torch.tensor(weights or [1.0, 1.0])
    for batch, values in zip(batches, rewarded, strict=True):
        expected = expected_advantages(values, scale, aggregation, factors)
        torch.testing.assert_close(batch["advantages"], expected, atol=1e-4, rtol=1e-4)
    logged = step_logs(trainer, "reward")
    assert logged == pytest.approx([(values @ factors).mean().item() for values in rewarded], abs=1e-4)
