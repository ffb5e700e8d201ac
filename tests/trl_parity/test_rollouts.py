"""Over-provisioned rollouts under TRL's settings: whose completions they are, where they end, and what is learned."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import EOS_ID
from benchmarks.tool_calls import FIRST_WORD_ID, make_chat_tokenizer
from tests.builders import length_reward, record_batches
from tests.trl_parity.common import (
    WORDS,
    chats,
    make_args,
    make_trainer,
    rows_of,
    step_logs,
    text_of,
    texts,
    train_all,
    variety,
)
from tests.zoo import make_chain


def prompts_of(batch):
    return [example["prompt"] for example in batch["inputs"]]


# Rows


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


NUMBERS = [f"{WORDS[i % len(WORDS)]} {i // 10}{i % 10}" for i in range(32)]  # end in each digit in turn


@pytest.mark.parametrize(
    ("conversational", "fields"),
    [
        (False, {"tail_pruning": False, "max_num_generations": 12, "target_redundancy": 3.0}),
        (True, {"num_longest": 0, "long_end_patience": 1.0}),
        (True, {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 16}),
        (False, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    ],
)
def test_prompt_completion_reward_and_advantage_belong_together(counter, tmp_path, conversational, fields):
    prompts = [[{"role": "user", "content": prompt}] for prompt in NUMBERS] if conversational else NUMBERS
    dataset = Dataset.from_dict({"prompt": prompts, "index": range(32)})
    scored = []

    def reward(prompts, completions, completion_ids, index, **kwargs):
        rows = []
        for prompt, completion, ids, i in zip(prompts, completions, completion_ids, index, strict=True):
            assert text_of(prompt) == NUMBERS[i]
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
    batches, compute = [], trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: batches.append(inputs) or compute(model, inputs)
    train_all(trainer)
    uses = args.steps_per_generation * args.num_iterations
    assert len(batches) == len(scored) * uses
    for generation, rows in enumerate(scored):
        seen = []
        for inputs in batches[generation * uses :][: args.steps_per_generation]:
            columns = (rows_of(inputs, "prompt"), rows_of(inputs, "completion"), inputs["advantages"])
            for prompt, completion, advantage in zip(*columns, strict=True):
                index = int(tokenizer.decode(prompt)[-2:])
                seen.append((index, tuple(completion), round(advantage.item(), 2)))
        assert sorted(seen) == rows


def test_one_prompt_that_stands_twice_in_a_batch_is_two_groups(lm, tmp_path):
    dataset = Dataset.from_dict({"prompt": ["same"] * 4})
    trainer = make_trainer(lm, make_args(tmp_path, scale_rewards=False), train_dataset=dataset)
    batches = record_batches(trainer)
    train_all(trainer)
    for batch in batches:
        assert set(prompts_of(batch)) == {"same"}
        assert batch["advantages"].view(2, 4).sum(1).tolist() == pytest.approx([0, 0], abs=1e-4)


# Completions


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_implementation": "static"},
        {"generation_kwargs": {"max_new_tokens": 12, "num_beams": 2, "length_penalty": -0.1}},
        {"bf16": True, "gradient_checkpointing": True},
    ],
)
def test_ways_to_generate(lm, tmp_path, fields):
    trainer = make_trainer(lm, make_args(tmp_path, **fields))
    batches = record_batches(trainer)
    train_all(trainer)
    for batch in batches:
        rows = rows_of(batch, "completion")
        assert all(1 <= len(ids) <= 12 and EOS_ID not in ids[:-1] for ids in rows)
        assert len(set(map(tuple, rows))) > 2


def test_every_end_of_the_model_ends_a_completion(lm, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(lm)
    ends = [EOS_ID, *range(40, 60)]
    model.generation_config.eos_token_id = ends
    tokenizer = AutoTokenizer.from_pretrained(lm)
    tokenizer.pad_token = None  # TRL takes `<eos>` for it then
    args = make_args(tmp_path, max_completion_length=64)
    trainer = make_trainer(model, args, reward_funcs=length_reward, processing_class=tokenizer)
    batches = record_batches(trainer)
    train_all(trainer)
    assert tokenizer.pad_token_id == EOS_ID
    rows = [ids for batch in batches for ids in rows_of(batch, "completion")]
    assert all(ids[-1] in ends and not set(ends) & set(ids[:-1]) for ids in rows)
    assert len({ids[-1] for ids in rows}) > 2
    assert step_logs(trainer, "completions/clipped_ratio") == [0, 0]
    assert step_logs(trainer, "darts/pool/truncated_ratio") == [0, 0]


# Evaluation


def test_evaluation_is_neither_over_provisioned_nor_learned_from(lm, tmp_path):
    """On several data sets, before, during and after the training. Rows and prompts of each call are as told."""
    sizes = []

    def reward(prompts, completions, **kwargs):
        sizes.append((len(prompts), len({str(prompt) for prompt in prompts})))
        return variety(completions)

    fields = {"eval_steps": 1, "per_device_eval_batch_size": 8, "num_generations_eval": 1}
    args = make_args(tmp_path, eval_strategy="steps", **fields)
    data = {"easy": texts(2), "hard": chats(4).to_iterable_dataset()}
    trainer = make_trainer(lm, args, eval_dataset=data, reward_funcs=reward)
    before = trainer.evaluate()
    assert len(trainer.length_tracker) == 0
    train_all(trainer)
    after = trainer.evaluate()
    easy, hard, step = (2, 2), (4, 4), (8, 2)
    assert sizes == [easy, hard, step, easy, hard, step, easy, hard, easy, hard]
    assert before.keys() == after.keys() >= {"eval_easy_loss", "eval_hard_loss"}
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("eval_darts")]
    assert len(step_logs(trainer, "darts/rollout/seconds")) == 2
    assert len(trainer.length_tracker) == 4
