"""Rewards that were computed before their batch was full are those of the rows that are trained on."""

import numpy as np
import pytest

from tests.builders import letters_dataset, make_args, make_trainer, record_batches
from tests.test_resume import LIMIT, SERVER, write
from trl_darts.testing import stub_servers


SCHEDULES = {
    "dynamic": {"drop_uniform_groups": True},
    "dynamic, streamed": {"drop_uniform_groups": True, "stream_rewards": True},
    "deferral": {"defer_unsettled_groups": True},
    "tail, streamed": {"schedule": "tail_batching", "stream_rewards": True},
    "partial, streamed": {"schedule": "partial_rollout", "stream_rewards": True},
    "sorted, streamed": {"schedule": "sorted", "stream_rewards": True},
}


def length(prompts, completion_ids, **kwargs):
    return [len(ids) * float(prompt[-1] in "CE") for prompt, ids in zip(prompts, completion_ids, strict=True)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rewards_are_of_the_rows_that_are_trained_on(model_dir, tmp_path, name):
    """Also of prompts that were sampled again, with other answers, after they had been scored."""
    visits: dict[tuple[int, ...], int] = {}

    def write_another(prompt_ids, index):
        key = (*prompt_ids, -index)
        visits[key] = visits.get(key, 0) + 1
        return write([*prompt_ids, visits[key]], index)

    fields = {"max_steps": 10, "scale_rewards": False, "max_completion_length": LIMIT, **SCHEDULES[name]}
    with stub_servers(write_another):
        args = make_args(tmp_path, **SERVER, **fields)
        trainer = make_trainer(model_dir, args, reward_funcs=length, train_dataset=letters_dataset(10))
    batches = record_batches(trainer)
    trainer.train()
    for batch in batches:
        lengths = batch["completion_mask"].sum(1).tolist()
        rewards = np.array(length([row["prompt"] for row in batch["inputs"]], [range(n) for n in lengths]))
        expected = (rewards.reshape(-1, 4) - rewards.reshape(-1, 4).mean(1, keepdims=True)).ravel()
        assert batch["advantages"].tolist() == pytest.approx(expected, abs=1e-4)
