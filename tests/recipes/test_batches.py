"""Batch arithmetic against hand-computed numbers, and against TRL's own sampler."""

import pytest
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


@pytest.mark.parametrize(
    ("fields", "num_prompts"),
    [({}, 100), ({"steps_per_generation": 16}, 50), ({"num_iterations": 2}, 64), ({"steps_per_generation": 12}, 40)],
)
def test_steps_are_as_many_as_trls_sampler_has_rows_for(fields, num_prompts):
    made = plan(**fields)
    rows = len(
        RepeatSampler(
            range(num_prompts),
            mini_repeat_count=made.num_generations,
            batch_size=made.prompts_per_generation,
            repeat_count=made.num_iterations * made.steps_per_generation,
        )
    )
    # TRL's loader hands out a whole generation at a time, and hands it out again for each of its passes.
    passes = rows // made.generation_batch_size
    assert made.steps_per_epoch(num_prompts) == -(-passes // made.gradient_accumulation_steps)


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
