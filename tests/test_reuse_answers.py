"""Tests `reuse_answers` on a real server: answers are the current policy's, and are decoded in part only."""

import copy

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from tests.builders import letters_dataset, make_args, make_trainer, rollout_logs
from tests.test_drop_uniform import logged
from tests.test_trainer_server import server_args
from trl_darts.engines.answers import ANSWERS_FILE
from trl_darts.errors import ConfigurationError


pytestmark = pytest.mark.vllm

FIELDS = {
    "schedule": "grpo",
    "reuse_answers": True,
    "temperature": 1.0,
    "max_completion_length": 24,
    "per_device_train_batch_size": 256,
    "num_generations": 64,
}
PROMPTS = letters_dataset(4)  # a pass is one step


class Recorder:
    """A reward that teaches, and keeps what was sampled with the weights of then."""

    __name__ = "reward"

    def __init__(self) -> None:
        self.steps: list = []
        self.trainer: object = None

    def __call__(self, prompts, completion_ids, **kwargs):
        weights = copy.deepcopy(self.trainer.model.state_dict())
        self.steps.append((weights, list(prompts), [list(ids) for ids in completion_ids]))
        return [float(ids[0] % 2) + float(len(ids) > 6) for ids in completion_ids]


def trained(model_dir, args, **kwargs):
    reward = Recorder()
    trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=PROMPTS)
    reward.trainer = trainer
    trainer.train(**kwargs)
    return trainer, reward.steps


def quantiles(trainer, step):
    """
    Where each token is in the cumulative distribution of the policy of then, in the order of token IDs, and at random
    within its own probability: uniform if, and only if, tokens follow the policy.
    """
    weights, prompts, completions = step
    rng, found = np.random.default_rng(), []
    trainer.model.load_state_dict(weights)
    for prompt, ids in zip(prompts, completions, strict=True):
        before = trainer.processing_class(prompt)["input_ids"]
        with torch.no_grad():
            logits = trainer.model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1]
        probs = logits.double().softmax(-1)
        ends = probs.cumsum(-1)
        for place, token in enumerate(ids):
            own = probs[place, token].item()
            found.append(ends[place, token].item() - own * rng.random())
    return found


def test_answers_follow_the_current_policy(server, model_dir, tmp_path):
    """After three weight updates, each of which changes the policy."""
    args = server_args(tmp_path, server, max_steps=4, learning_rate=1e-3, lr_scheduler_type="constant", **FIELDS)
    trainer, steps = trained(model_dir, args)
    assert logged(trainer, "darts/reuse/answers") == [0.0] + [256.0] * 3
    reused = logged(trainer, "darts/reuse/reused_ratio")
    assert len(reused) == 3
    assert min(reused) > 0.2
    assert max(reused) < 1  # else the policies were the same, and nothing is shown
    assert max(logged(trainer, "darts/reuse/unknown_ratio")) < 0.1
    own = quantiles(trainer, steps[-1])  # those of several steps share tokens, and are not independent
    assert len(own) > 2000
    assert kstest(own, "uniform").pvalue > 1e-4
    stale = quantiles(trainer, (steps[-1][0], *steps[0][1:]))
    assert kstest(stale, "uniform").pvalue < 1e-4  # the test can fail
    for entry in rollout_logs(trainer):
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    decoded, kept = (logged(trainer, f"darts/rollout/{name}_tokens") for name in ("generated", "kept"))
    assert sum(decoded[1:]) < 0.8 * sum(kept[1:])


def test_a_resumed_run_reuses_the_answers_of_its_checkpoint(server, model_dir, tmp_path, caplog):
    fields = {**FIELDS, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-4}
    trained(model_dir, server_args(tmp_path, server, max_steps=1, **fields))
    checkpoint = tmp_path / "checkpoint-1"
    args = server_args(tmp_path, server, max_steps=2, **fields)
    trainer, _ = trained(model_dir, args, resume_from_checkpoint=str(checkpoint))
    assert logged(trainer, "darts/reuse/answers")[-1] == 256
    assert logged(trainer, "darts/reuse/reused_ratio")[-1] > 0.5
    (checkpoint / ANSWERS_FILE).unlink()  # as of a run without `reuse_answers`; a broken file ends the resume
    trainer, _ = trained(model_dir, args, resume_from_checkpoint=str(checkpoint))
    assert logged(trainer, "darts/reuse/answers")[-1] == 0
    assert sum("no answer of earlier" in record.message for record in caplog.records) == 1


def test_a_policy_that_is_less_like_the_old_one_than_pays(server, model_dir, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trl_darts.engines.reuse_tally.LEAST_REUSED", 1.1)
    args = server_args(tmp_path, server, max_steps=5, **FIELDS)
    trainer, _ = trained(model_dir, args)
    assert logged(trainer, "darts/reuse/answers") == [0.0, 256.0, 0.0, 0.0, 0.0]
    assert sum("`reuse_answers` pauses" in record.message for record in caplog.records) == 1


def test_an_evaluation_is_sampled_anew(server, model_dir, tmp_path):
    args = server_args(tmp_path, server, max_steps=2, per_device_eval_batch_size=256, **FIELDS)
    trainer, _ = trained(model_dir, args)
    before = trainer._reuse.store.num_tokens
    trainer.evaluate(PROMPTS)
    assert trainer._reuse.store.num_tokens == before
    assert trainer._reuse.tally.pop_metrics()["darts/reuse/answers"] == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "darts"}, "what a selection keeps has other lengths"),
        ({"temperature": 0.7}, r"needs plain sampling.*`temperature` \(0.7\)"),
        ({"generation_kwargs": {"stop": ["x"]}}, "needs plain sampling"),
        ({"rollout_ahead": "continuous"}, "whose prompts enter a rollout that runs"),
        ({"vllm_mode": "colocate"}, "needs vLLM servers"),
        ({"reuse_answers": False, "reuse_answers_gib": 1.0}, "has no effect without `reuse_answers`"),
    ],
    ids=lambda own: str(own)[:30],
)
def test_bad_input(tmp_path, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        make_args(tmp_path, **{"use_vllm": True, "vllm_mode": "server", **FIELDS, **fields})
