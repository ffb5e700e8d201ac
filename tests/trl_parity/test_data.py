"""How data becomes generation batches: arithmetic, order, repetition, streams, workers."""

import itertools

import pytest
from datasets import Dataset

from tests.builders import record_batches
from tests.trl_parity.common import chats, make_args, make_trainer, step_logs, texts, train, train_all, variety


def prompts_of(batch):
    return [example["prompt"] for example in batch["inputs"]]


def recorded(trainer):
    """The prompts of each generation batch of a training."""
    batches = record_batches(trainer)
    train(trainer)
    return [prompts_of(batch) for batch in batches]


@pytest.mark.parametrize(
    ("fields", "generation_batch_size", "steps_per_generation"),
    [
        ({}, 8, 1),
        ({"gradient_accumulation_steps": 3}, 24, 3),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 8, 1),
        ({"steps_per_generation": 4}, 32, 4),
        ({"generation_batch_size": 24}, 24, 3),
    ],
)
def test_generation_batch(lm, tmp_path, fields, generation_batch_size, steps_per_generation):
    args = make_args(tmp_path, **fields, shuffle_dataset=False)
    assert args.generation_batch_size == generation_batch_size
    assert args.steps_per_generation == steps_per_generation
    batches = recorded(make_trainer(lm, args, train_dataset=texts(24)))
    assert len(batches) == -(-2 * args.gradient_accumulation_steps // steps_per_generation)
    groups = iter(texts(24)["prompt"])
    for batch in batches:
        assert batch == [prompt for prompt in itertools.islice(groups, generation_batch_size // 4) for _ in range(4)]


def test_more_generations_than_rows_per_device(lm, tmp_path):
    fields = {"per_device_train_batch_size": 3, "num_generations": 6, "gradient_accumulation_steps": 2}
    trainer = make_trainer(lm, make_args(tmp_path, **fields))
    batches = record_batches(trainer)
    train_all(trainer)
    assert [len(set(prompts_of(batch))) for batch in batches] == [1, 1]
    assert [len(batch["advantages"]) for batch in batches] == [6, 6]


def test_each_step_sees_the_generation_batch_as_often_as_it_is_used(lm, tmp_path):
    args = make_args(
        tmp_path,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=3,
        steps_per_generation=4,
        num_iterations=2,
        shuffle_dataset=False,
        num_train_epochs=1,
        max_steps=-1,
        max_num_generations=5,
    )
    trainer = make_trainer(lm, args, train_dataset=texts(13))  # 13: the last prompt fills no generation batch
    seen, step = [], trainer.training_step

    def recorded_step(model, inputs, num_items_in_batch):
        seen.append(prompts_of({"inputs": inputs}))
        return step(model, inputs, num_items_in_batch)

    trainer.training_step = recorded_step
    generations = record_batches(trainer)
    train(trainer)
    prompts = texts(13)["prompt"]
    first, second = ([prompt for prompt in part for _ in range(4)] for part in (prompts[:6], prompts[6:12]))
    assert seen == [first] * 8 + [second] * 8
    assert len(generations) == 2


@pytest.mark.parametrize(
    ("generations", "steps_per_generation", "iterations"), [(2, 1, 1), (4, 2, 1), (2, 2, 3), (8, 3, 2)]
)
def test_sampler_repeats_groups_and_batches(lm, tmp_path, generations, steps_per_generation, iterations):
    args = make_args(
        tmp_path,
        num_generations=generations,
        steps_per_generation=steps_per_generation,
        num_iterations=iterations,
    )
    trainer = make_trainer(lm, args, train_dataset=texts(7))
    indices = list(trainer._get_train_sampler())
    per_batch = args.generation_batch_size // generations
    num_batches, repeats = 7 // per_batch, steps_per_generation * iterations
    assert len(indices) == num_batches * repeats * args.generation_batch_size
    seen = []
    for start in range(0, len(indices), repeats * args.generation_batch_size):
        block = indices[start : start + repeats * args.generation_batch_size]
        batch = block[: args.generation_batch_size]
        assert block == batch * repeats
        assert batch == [index for index in batch[::generations] for _ in range(generations)]
        seen += batch[::generations]
    assert len(set(seen)) == len(seen) == num_batches * per_batch


def test_shuffling_depends_on_the_seed_alone(lm, tmp_path):
    def order(**fields):
        return list(make_trainer(lm, make_args(tmp_path, **fields), train_dataset=texts(40))._get_train_sampler())

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert order(shuffle_dataset=False) == sorted(order(seed=1))


def test_evaluation_sampler_takes_every_prompt(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path, num_generations_eval=3), eval_dataset=texts(5))
    indices = list(trainer._get_eval_sampler(trainer.eval_dataset))
    assert sorted(indices) == [index for index in range(5) for _ in range(3)]
    assert indices == [index for index in indices[::3] for _ in range(3)]


@pytest.mark.parametrize("data", [texts, chats])
def test_stream_gives_the_batches_of_the_data_set_it_streams(lm, tmp_path, data):
    fields = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 8, "shuffle_dataset": False}
    batches = []
    for dataset in (data(8), data(8).to_iterable_dataset()):
        batches.append(recorded(make_trainer(lm, make_args(tmp_path, **fields), train_dataset=dataset)))
    assert batches[0] == batches[1]
    assert len(batches[0]) == 2


def test_stream_is_shuffled_and_trains(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path, max_steps=3), train_dataset=texts(6).to_iterable_dataset())
    batches = record_batches(trainer)
    train_all(trainer)
    seen = [prompt for batch in batches for prompt in prompts_of(batch)[::4]]
    assert sorted(seen) == sorted(texts(6)["prompt"])
    assert seen != texts(6)["prompt"]


def test_stream_is_read_by_one_worker(lm, tmp_path):
    args = make_args(tmp_path, dataloader_num_workers=2)
    trainer = make_trainer(lm, args, train_dataset=texts().to_iterable_dataset())
    assert trainer.args.dataloader_num_workers == 0
    train_all(trainer)


def test_workers_load_the_same_batches(lm, tmp_path):
    fields = {"shuffle_dataset": False}
    batches = [recorded(make_trainer(lm, make_args(tmp_path, dataloader_num_workers=n, **fields))) for n in (0, 2)]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("remove", [False, True])
def test_other_columns_reach_rewards_unless_they_are_removed(lm, tmp_path, remove):
    dataset = texts().add_column("target", list(range(8)))
    columns = []

    def reward(completions, **kwargs):
        columns.append("target" in kwargs)
        return variety(completions)

    args = make_args(tmp_path, remove_unused_columns=remove, max_steps=1)
    train_all(make_trainer(lm, args, train_dataset=dataset, reward_funcs=reward))
    assert columns == [not remove]


def test_batches_are_padded_to_a_multiple(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path, pad_to_multiple_of=16, max_completion_length=20))
    batches = record_batches(trainer)
    train_all(trainer)
    for batch in batches:
        assert batch["prompt_ids"].shape[1] % 16 == 0
        assert batch["completion_ids"].shape[1] in (16, 32)
        assert (batch["prompt_ids"][batch["prompt_mask"] == 0] == 0).all()
        lengths = batch["completion_mask"].sum(1)
        assert lengths.max() <= 20
        assert (batch["completion_mask"] == (batch["completion_ids"] != 0)).all()


@pytest.mark.parametrize(("fields", "steps"), [({"max_steps": 3}, 3), ({"max_steps": -1, "num_train_epochs": 2}, 8)])
def test_training_ends_where_it_should(lm, tmp_path, fields, steps):
    trainer = make_trainer(lm, make_args(tmp_path, **fields))
    train_all(trainer)
    assert trainer.state.global_step == steps == len(step_logs(trainer, "loss"))


def test_one_prompt_that_stands_twice_in_a_batch_is_two_groups(lm, tmp_path):
    dataset = Dataset.from_dict({"prompt": ["same"] * 4})
    sizes = []

    def reward(prompts, completions, **kwargs):
        sizes.append((len(set(prompts)), len(completions)))
        return variety(completions)

    trainer = make_trainer(lm, make_args(tmp_path, scale_rewards=False), train_dataset=dataset, reward_funcs=reward)
    batches = record_batches(trainer)
    train_all(trainer)
    assert sizes == [(1, 8), (1, 8)]
    for batch in batches:
        assert batch["advantages"].view(2, 4).sum(1).tolist() == pytest.approx([0, 0], abs=1e-4)
