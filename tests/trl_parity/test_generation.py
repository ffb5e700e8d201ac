"""Completions: whose they are, how they are sampled, where they end, and those of a `rollout_func`."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from testing.models import EOS_ID
from tests.builders import length_reward, record_batches
from tests.trl_parity.common import (
    WORDS,
    chats,
    make_args,
    make_trainer,
    record_losses,
    step_logs,
    text_of,
    train,
    train_all,
    variety,
)
from tests.zoo import FIRST_WORD_ID, make_chain, make_chat_tokenizer
from trl_darts.errors import ConfigurationError


SMALL_CACHE = {"num_blocks": 64, "max_batch_tokens": 256}  # by default it takes half of the machine's memory


def rows_of(batch, kind):
    """Token IDs of a batch's prompts or completions, without padding."""
    masks = batch[f"{kind}_mask"].bool()
    return [ids[mask].tolist() for ids, mask in zip(batch[f"{kind}_ids"], masks, strict=True)]


def completions_of(trainer):
    """The completions of each generation batch of a training."""
    batches = record_batches(trainer)
    train(trainer)
    return [rows_of(batch, "completion") for batch in batches]


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """A model that answers a prompt that ends in a digit with a word of that digit, the more often the higher."""
    words = [f"<{digit}>" for digit in range(10)]
    tokenizer = make_chat_tokenizer(words)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    after = {"": {"x": 1.0}}
    for digit, word in enumerate(words):
        after |= {str(digit): {word: 1.0}, word: {word: digit + 1, "<eos>": 1.0}}
    return make_chain(tmp_path_factory.mktemp("counter"), tokenizer, after)


def numbers(num_prompts):
    """Prompts that end in each digit in turn."""
    return [f"{WORDS[i % len(WORDS)]} {i // 10}{i % 10}" for i in range(num_prompts)]


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tail_pruning": False, "max_num_generations": 12, "target_redundancy": 3.0},
        {"num_longest": 0, "long_end_patience": 1.0},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
        {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 16},
        {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": SMALL_CACHE},
    ],
)
def test_prompt_completion_reward_and_advantage_belong_together(counter, tmp_path, conversational, fields):
    prompts = numbers(32)
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    dataset = Dataset.from_dict({"prompt": prompts, "index": range(32)})
    scored = []

    def reward(prompts, completions, completion_ids, index, **kwargs):
        rows = []
        for prompt, completion, ids, i in zip(prompts, completions, completion_ids, index, strict=True):
            assert text_of(prompt) == numbers(32)[i]
            assert text_of(completion) == tokenizer.decode(ids, skip_special_tokens=True)
            assert set(ids) <= {FIRST_WORD_ID + i % 10, EOS_ID}
            rows.append(float(i + len(ids)))
        groups = torch.tensor(rows).view(-1, 4)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten().tolist()
        scored.append(sorted(zip(index, map(tuple, completion_ids), [round(a, 2) for a in advantages], strict=True)))
        return rows

    defaults = {"max_steps": 4, "learning_rate": 1e-6, "max_completion_length": 20, "scale_rewards": False}
    args = make_args(tmp_path, **{**defaults, **fields})
    trainer = make_trainer(counter, args, train_dataset=dataset, reward_funcs=reward)
    tokenizer = trainer.processing_class
    records = record_losses(trainer)
    train_all(trainer)
    for generation, rows in enumerate(scored):
        start = generation * args.steps_per_generation * args.num_iterations
        seen = []
        for inputs, _, _ in records[start : start + args.steps_per_generation]:
            prompts, completions = rows_of(inputs, "prompt"), rows_of(inputs, "completion")
            for prompt, completion, advantage in zip(prompts, completions, inputs["advantages"], strict=True):
                index = int(tokenizer.decode(prompt)[-2:])
                seen.append((index, tuple(completion), round(advantage.item(), 2)))
        assert sorted(seen) == rows
    assert len(records) == len(scored) * args.steps_per_generation * args.num_iterations


def test_completions_are_what_the_model_says_to_this_prompt(zoo, tmp_path):
    path = zoo.lm("llama", mean_length=10_000)  # else all say nothing
    trainer = make_trainer(path, make_args(tmp_path, temperature=1e-4, learning_rate=0.0, max_steps=4))
    model = AutoModelForCausalLM.from_pretrained(path)
    batches = record_batches(trainer)
    assert train(trainer) == set()
    said = []
    for batch in batches:
        for prompt, completion in zip(rows_of(batch, "prompt"), rows_of(batch, "completion"), strict=True):
            own = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
            assert own[0, len(prompt) :].tolist() == completion
            said.append(tuple(completion))
    assert len(set(said)) > 4


def greedy(group):
    return len(set(map(tuple, group))) == 1


def complete(group):
    return all(1 <= len(ids) <= 12 and EOS_ID not in ids[:-1] for ids in group) and not greedy(group)


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({}, complete),
        ({"top_k": 1}, greedy),
        ({"top_p": 1e-3}, greedy),
        ({"min_p": 1.0}, greedy),
        ({"temperature": 1e-3}, greedy),
        ({"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1}, complete),
        ({"cache_implementation": "static"}, complete),
        ({"generation_kwargs": {"top_k": 1}}, greedy),
        ({"generation_kwargs": {"suppress_tokens": [EOS_ID]}}, lambda group: {len(ids) for ids in group} == {12}),
        ({"generation_kwargs": {"min_new_tokens": 6}}, lambda group: min(map(len, group)) >= 6),
        ({"generation_kwargs": {"max_new_tokens": 5}}, lambda group: max(map(len, group)) <= 5),
        ({"generation_kwargs": {"top_k": 50, "num_beams": 2, "length_penalty": -0.1}}, complete),
    ],
)
def test_sampling_settings(lm, tmp_path, fields, holds):
    trainer = make_trainer(lm, make_args(tmp_path, **fields))
    batches = completions_of(trainer)
    assert [len(batch) for batch in batches] == [8, 8]
    assert holds(batches[0][:4])
    assert holds(batches[0][4:])


def test_every_end_of_the_model_ends_a_completion(lm, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(lm)
    ends = [EOS_ID, *range(40, 60)]
    model.generation_config.eos_token_id = ends
    trainer = make_trainer(model, make_args(tmp_path, max_completion_length=64), reward_funcs=length_reward)
    rows = [ids for batch in completions_of(trainer) for ids in batch]
    assert all(ids[-1] in ends and not set(ends) & set(ids[:-1]) for ids in rows)
    assert len({ids[-1] for ids in rows}) > 2
    assert step_logs(trainer, "completions/clipped_ratio") == [0, 0]
    assert step_logs(trainer, "darts/pool/truncated_ratio") == [0, 0]


@pytest.mark.parametrize("fields", [{"pad_token": None}, {"padding_side": "right"}])
def test_any_padding_of_the_tokenizer_will_do(lm, lm_tokenizer, tmp_path, fields):
    for name, value in fields.items():
        setattr(lm_tokenizer, name, value)
    trainer = make_trainer(lm, make_args(tmp_path), processing_class=lm_tokenizer)
    batches = record_batches(trainer)
    train_all(trainer)
    assert lm_tokenizer.pad_token == ("<eos>" if "pad_token" in fields else "<pad>")
    for batch in batches:
        assert (batch["prompt_mask"][:, -1] == 1).all()
        for ids in rows_of(batch, "completion"):
            assert EOS_ID not in ids[:-1]


def test_chat_template_kwargs_reach_the_template(lm, tmp_path):
    args = make_args(tmp_path, chat_template_kwargs={"greeting": "good day "})
    trainer = make_trainer(lm, args, train_dataset=chats())
    batches = record_batches(trainer)
    train_all(trainer)
    for prompt in rows_of(batches[0], "prompt"):
        assert trainer.processing_class.decode(prompt).startswith("good day user: ")


# `rollout_func`


def echo(prompts, trainer, **fields):
    """Answers each prompt with its own first characters."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completion_ids = [[*ids[: 2 + row % 4], EOS_ID] for row, ids in enumerate(prompt_ids)]
    logprobs = [[-1.0] * len(ids) for ids in completion_ids]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs, **fields}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_rollout_func_generates(lm, tmp_path):
    def rollout(prompts, trainer):
        return echo(prompts, trainer, place=list(range(len(prompts))), env_mask=[[1, 0, 1, 1, 1]] * len(prompts))

    seen = []

    def reward(completions, place, **kwargs):
        seen.append((completions, place))
        return length_reward(completions, **kwargs)

    args = make_args(tmp_path, schedule="grpo")
    trainer = make_trainer(lm, args, rollout_func=rollout, reward_funcs=reward)
    batches = record_batches(trainer)
    with pytest.raises(RuntimeError):  # masks must be as long as completions
        trainer.train()

    def fitting(prompts, trainer):
        output = rollout(prompts, trainer)
        return {**output, "env_mask": [[0] + [1] * (len(ids) - 1) for ids in output["completion_ids"]]}

    trainer = make_trainer(lm, args, rollout_func=fitting, reward_funcs=reward)
    batches = record_batches(trainer)
    train_all(trainer)
    for batch, (completions, place) in zip(batches, seen[-2:], strict=True):
        prompts = [example["prompt"] for example in batch["inputs"]]
        assert completions == [prompt[: 2 + row % 4] for row, prompt in enumerate(prompts)]
        assert place == list(range(8))
        assert (batch["tool_mask"][:, 0] == 0).all()
        assert (batch["tool_mask"][:, 1:3] == 1).all()


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_rollout_func_must_return_log_probs(lm, tmp_path):
    def rollout(prompts, trainer):
        return {key: value for key, value in echo(prompts, trainer).items() if key != "logprobs"}

    trainer = make_trainer(lm, make_args(tmp_path, schedule="grpo"), rollout_func=rollout)
    with pytest.raises(ValueError, match="logprobs"):
        trainer.train()


def test_rollout_func_is_refused_where_it_would_have_no_effect(lm, tmp_path):
    with pytest.raises(ConfigurationError, match="rollout_func"):
        make_trainer(lm, make_args(tmp_path), rollout_func=echo, reward_funcs=variety)
