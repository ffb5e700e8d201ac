"""`stream_rewards` with a rollout buffer: each group is scored once, while others decode, with TRL's rewards."""

from collections import Counter

import pytest

from tests.builders import length_reward, letters_dataset, make_args, make_trainer, record_batches, rollout_logs
from tests.model_server import model_server


pytestmark = pytest.mark.vllm  # TRL imports it; the server is in this process


class Reward:
    """Records its calls: prompts, and whether each came from the main thread."""

    __name__ = "reward"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completion_ids, log_extra, **kwargs):
        self.calls.append(list(prompts))
        log_extra("letter", [prompt[-1] for prompt in prompts])
        return length_reward(prompts, completion_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "sorted", "sorted_mode": "partial", "sorted_group_batches": 2, "stream_logprobs": True},
        {"schedule": "tail_batching", "prompt_oversampling": 1.5, "gradient_accumulation_steps": 2},
        {"rollout_ahead": 1},
    ],
    ids=lambda fields: fields.get("schedule", "ahead"),
)
def test_each_group_is_scored_once(model_dir, tmp_path, monkeypatch, fields):
    reward = Reward()
    with model_server(model_dir, monkeypatch) as (_, settings):
        own = {"max_completion_length": 24, "max_steps": 4, "log_completions": True, "stream_rewards": True}
        args = make_args(tmp_path, **own, **settings, **fields)
        trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=letters_dataset(40))
        batches = record_batches(trainer)
        trainer.train()
    assert len(batches) == 4
    assert all(len(prompts) == 4 and len(set(prompts)) == 1 for prompts in reward.calls)
    trained = Counter()
    for batch in batches:
        lengths = batch["completion_mask"].sum(dim=1)
        for start in range(0, 16, 4):
            rewards = (lengths[start : start + 4] % 7).float()
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            assert batch["advantages"][start : start + 4].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
            (prompt,) = {row["prompt"] for row in batch["inputs"][start : start + 4]}
            trained[prompt] += 1
    scored = Counter(prompts[0] for prompts in reward.calls)
    assert set(trained.values()) == {1}
    assert trained.keys() <= scored.keys()
    if args.schedule != "tail_batching":  # what is sampled anew is scored anew
        assert set(scored.values()) == {1}
    logs = rollout_logs(trainer)
    assert sum(entry["darts/stream/reward_hidden_seconds"] for entry in logs) > 0
    assert list(trainer._logs["extra"]["letter"]) == [prompt[-1] for prompt in trainer._logs["prompt"]]
