"""Batch arithmetic against hand-computed numbers, and against TRL's sampler, accelerate's loader and transformers."""

from types import SimpleNamespace

import pytest
from accelerate.data_loader import prepare_data_loader
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import Trainer
from trl.trainer.utils import RepeatSampler

from trl_darts.errors import ConfigurationError
from trl_darts.recipes import BatchPlan


FIELDS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_iterations": 1,
    "num_generations": 8,
}


def plan(num_processes=2, **fields):
    return BatchPlan.of({**FIELDS, **fields}, num_processes)


def test_one_step_per_generation_is_the_default():
    made = plan()
    assert made.generation_batch_size == 64
    assert made.prompts_per_generation == made.prompts_per_step == 8
    assert made.steps_of_generation == 1


@pytest.mark.parametrize("fields", [{"steps_per_generation": 16}, {"generation_batch_size": 128}])
def test_a_larger_generation_feeds_several_steps(fields):
    made = plan(**fields)
    assert made.generation_batch_size == 128
    assert made.prompts_per_generation == 16
    assert made.prompts_per_step == 8
    assert made.steps_of_generation == 2


def steps_of_the_trainer(made, num_prompts, num_train_epochs):
    """The real parts: TRL's sampler, the loader that accelerate shares out, and the Trainer's count of its steps."""
    sampler = RepeatSampler(
        range(num_prompts),
        mini_repeat_count=made.num_generations,
        batch_size=made.prompts_per_generation,
        repeat_count=made.num_iterations * made.steps_per_generation,
    )
    loader = DataLoader(
        range(num_prompts), batch_size=made.per_device_batch_size * made.steps_per_generation, sampler=sampler
    )
    loader = prepare_data_loader(loader, num_processes=made.num_processes, process_index=0, put_on_device=False)
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 1, get_sp_size=lambda: 1, num_examples=lambda loader: num_prompts
    )
    args = SimpleNamespace(
        max_steps=-1,
        num_train_epochs=num_train_epochs,
        gradient_accumulation_steps=made.gradient_accumulation_steps,
    )
    _, per_epoch, *_, in_all = Trainer.set_initial_training_values(trainer, args, loader)
    return per_epoch, in_all


@settings(max_examples=100, deadline=None)
@example(num_processes=1, batch=1, accumulation=5, steps=11, iterations=1, generations=11, num_prompts=25, epochs=1.0)
@given(
    num_processes=st.integers(1, 4),
    batch=st.integers(1, 4),
    accumulation=st.integers(1, 12),
    steps=st.integers(1, 12),
    iterations=st.integers(1, 3),
    generations=st.integers(2, 12),
    num_prompts=st.integers(1, 60),
    epochs=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_steps_are_those_of_the_trainer(
    num_processes, batch, accumulation, steps, iterations, generations, num_prompts, epochs
):
    steps *= generations if num_processes * batch * steps % generations else 1  # else TRL would refuse it
    made = plan(
        num_processes,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
        num_iterations=iterations,
        num_generations=generations,
    )
    num_prompts = max(num_prompts, made.prompts_per_generation)
    counted = made.steps_per_epoch(num_prompts), made.num_steps(num_prompts, epochs, -1)
    assert counted == steps_of_the_trainer(made, num_prompts, epochs)


def test_steps_in_all():
    made = plan()
    assert made.steps_per_epoch(100) == 12
    assert made.num_steps(100, 3.0, -1) == 36
    assert made.num_steps(100, 0.5, -1) == 6
    assert made.num_steps(100, 3.0, 20) == 20
    assert made.num_steps(None, 3.0, 20) == 20
    assert made.num_steps(None, 3.0, -1) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1},
            r"\(6 rows: 3 per device × 2 processes",
        ),
        ({"per_device_train_batch_size": 0}, r"`per_device_train_batch_size` \(0\) must be at least 1"),
        ({"gradient_accumulation_steps": 0}, r"`gradient_accumulation_steps` \(0\) must be at least 1"),
        ({"num_iterations": 0}, r"`num_iterations` \(0\) must be at least 1"),
        ({"num_generations": 1}, r"`num_generations` \(1\) must be at least 2"),
        ({"generation_batch_size": 60}, r"`generation_batch_size` \(60\) must be a multiple of .* \(8\)"),
        ({"steps_per_generation": 0}, r"`steps_per_generation` \(0\) must be at least 1"),
        ({"generation_batch_size": 64, "steps_per_generation": 8}, "must not be given both"),
    ],
)
def test_what_does_not_divide(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        plan(**fields)


def test_too_few_prompts():
    with pytest.raises(
        ConfigurationError, match=r"`num_prompts` \(7\) must be at least the prompts of one generation"
    ):
        plan().steps_per_epoch(7)
