"""`stream_training`: a batch that is trained on in waves has the gradient of the whole batch, and loses no prompt."""

import random
import shutil
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.builders import (
    length_reward,
    letters_dataset,
    make_args,
    make_trainer,
    record_ages,
    record_batches,
    rollout_logs,
)
from tests.test_trainer_server import server_args
from tests.training.test_preemption import terminate
from trl_darts.buffer.wave_source import WaveSource
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.scheduling import FinishedGroups
from trl_darts.testing import stub_servers
from trl_darts.training import preemption
from trl_darts.training.waves import SUPPORTED, Waves


pytestmark = pytest.mark.vllm  # TRL imports it; a real server: `tests/launches/test_two_processes.py`

SERVER = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": 48, "schedule": "grpo"}
BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
TRAINING = {"learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.1}


def write(prompt_ids: list[int], index: int) -> list[int]:
    """Answers of very different lengths, by prompt and index."""
    draw = random.Random(str((tuple(prompt_ids), index)))
    return [5 + draw.randrange(60) for _ in range(draw.choice([3, 5, 8, 12, 20, 40]))]


def train(model_dir: Any, out: Any, **fields: Any) -> tuple[Any, torch.Tensor, list[dict[str, Any]]]:
    """Returns the trainer, its parameters and its batches."""
    args = make_args(out, **{**SERVER, **BATCH, **TRAINING, "max_steps": 3, **fields})
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, reward_funcs=length_reward, train_dataset=letters_dataset(24))
    batches = record_batches(trainer)
    trainer.train()
    return trainer, flat(trainer.model), batches


def flat(model: Any) -> torch.Tensor:
    """Returns a copy of all parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "fields",
    [
        *({"loss_type": loss} for loss in SUPPORTED if loss != "vespo"),
        {"loss_type": "dapo", "max_grad_norm": 0.0},
        {"loss_type": "dapo", "beta": 0.1},
        {"loss_type": "dapo", "vllm_importance_sampling_correction": False},
        {"loss_type": "dapo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
         "steps_per_generation": 8},
        {"loss_type": "grpo", "per_device_train_batch_size": 8, "trim_padding": False},
        {"loss_type": "grpo", "share_prompts": False, "scale_rewards": False},
    ],
    ids=str,
)  # fmt: skip
def test_the_gradient_is_that_of_the_whole_batch(model_dir, tmp_path, fields):
    """Also after several steps, and with what clipping sees."""
    (whole, expected, _), (waves, found, _) = (
        train(model_dir, tmp_path / name, stream_training=name == "waves", **fields) for name in ("whole", "waves")
    )
    moved = (expected - flat(make_start(model_dir))).abs().max()
    assert moved > 1e-5  # otherwise, nothing could differ
    assert (found - expected).abs().max() < 1e-4 * moved
    for name in ("grad_norm", "loss", "reward"):
        own, theirs = ([entry[name] for entry in t.state.log_history if name in entry] for t in (waves, whole))
        assert own == pytest.approx(theirs, rel=1e-3, abs=1e-5), name


def make_start(model_dir: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir)


@pytest.mark.parametrize("schedule", ["grpo", "darts"])
def test_each_prompt_is_trained_on_once(model_dir, tmp_path, schedule):
    trainer, _, batches = train(model_dir, tmp_path, stream_training=True, schedule=schedule, max_steps=6)
    rows = Counter(row["prompt"] for batch in batches for row in batch["inputs"])
    assert rows == dict.fromkeys(letters_dataset(24)["prompt"], 4)
    assert len(batches) == 4 * 6
    logs = rollout_logs(trainer)
    assert len(logs) == 6
    assert all({"darts/rollout/wait_seconds", "darts/score/seconds"} <= entry.keys() for entry in logs)
    assert len(trainer._batches.buffer) == 0


@pytest.mark.parametrize(("kwargs", "carries"), [({"stop": "x"}, False), (None, True)])
def test_an_option_that_is_not_carried_starts_candidates_again(model_dir, tmp_path, monkeypatch, kwargs, carries):
    """As in every rollout: a stop string could straddle two requests."""
    plan, found = WaveSource.plan, []

    def planned(self, *args):
        found.append(self._scheduler.carries_tokens)
        return plan(self, *args)

    monkeypatch.setattr(WaveSource, "plan", planned)
    train(model_dir, tmp_path, stream_training=True, generation_kwargs=kwargs, max_steps=1)
    assert found == [carries] * 4


def test_a_resumed_run_goes_on(model_dir, tmp_path):
    fields = {"stream_training": True, "save_strategy": "steps", "save_steps": 2}
    _, expected, _ = train(model_dir, tmp_path, max_steps=4, **fields)
    args = make_args(tmp_path, **{**SERVER, **BATCH, **TRAINING, "max_steps": 4, **fields})
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, reward_funcs=length_reward, train_dataset=letters_dataset(24))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.allclose(flat(trainer.model), expected, atol=1e-7)


def between_waves(trainer: Any, act: Any) -> None:
    """Calls `act` with the second wave's progress, in the second step, before its groups are taken."""
    run = trainer._engine.run

    def waved(plan: Any, batch: Any, on_progress: Any, *args: Any) -> Any:
        if trainer.state.global_step == 1 and trainer._step % 4 == 1:
            assert any(parameter.grad.any() for parameter in trainer.model.parameters())  # of the first wave
            act(lambda: on_progress(plan.scheduler.ledger))
        return run(plan, batch, on_progress, *args)

    trainer._engine.run = waved


def refuse(_: Any) -> None:
    raise GenerationError("refused")


def terminate_and_wait(on_progress: Any) -> None:
    terminate()
    on_progress()


@pytest.mark.parametrize(
    ("act", "error", "step_s"),
    [
        (refuse, GenerationError, 60.0),
        (terminate_and_wait, SystemExit, 60.0),
        (lambda _: terminate(), SystemExit, 0.0),
    ],
    ids=["refused", "SIGTERM while waiting", "SIGTERM in a step that is too long"],
)
def test_a_step_that_ends_between_waves_leaves_no_half_gradient(model_dir, tmp_path, monkeypatch, act, error, step_s):
    """Parameters are those of the step before, and a resumed run trains on the whole batch once."""
    monkeypatch.setattr(preemption, "STEP_S", step_s)
    _, after_one, _ = train(model_dir, tmp_path / "one", stream_training=True, max_steps=1)
    _, expected, whole = train(model_dir, tmp_path / "whole", stream_training=True)
    fields = {"stream_training": True, "save_strategy": "steps", "save_steps": 1 if error is GenerationError else 100}
    args = make_args(tmp_path, **{**SERVER, **BATCH, **TRAINING, "max_steps": 3, **fields})
    with stub_servers(write):
        first, second = (
            make_trainer(model_dir, args, reward_funcs=length_reward, train_dataset=letters_dataset(24))
            for _ in range(2)
        )
    between_waves(first, act)
    with pytest.raises(error):
        first.train()
    assert torch.equal(flat(first.model), after_one)
    batches = record_batches(second)
    second.train(resume_from_checkpoint=True)
    assert torch.allclose(flat(second.model), expected, atol=1e-7)
    rows, found = (Counter(row["prompt"] for batch in own for row in batch["inputs"]) for own in (whole[4:], batches))
    assert found == rows


def test_a_trainer_trains_again_after_a_wave_was_refused(model_dir, tmp_path):
    """From its model as it is, with nothing of the batch that was given up."""
    args = make_args(tmp_path, **{**SERVER, **BATCH, **TRAINING, "max_steps": 2}, stream_training=True)
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, reward_funcs=length_reward, train_dataset=letters_dataset(24))
    run = trainer._engine.run
    between_waves(trainer, refuse)
    with pytest.raises(GenerationError):
        trainer.train()
    trainer._engine.run = run
    begin = shutil.copytree(model_dir, tmp_path / "begin")
    trainer.model.save_pretrained(begin)
    trainer.train()
    _, expected, _ = train(begin, tmp_path / "other", stream_training=True, max_steps=2)
    assert torch.allclose(flat(trainer.model), expected, atol=1e-7)
    assert [log["darts/budget/total"] for log in rollout_logs(trainer)] == [16.0] * 2


def test_groups_of_a_real_server(server, model_dir, tmp_path):
    """All tokens are of the current weights, and a group that is refused is filled up in its wave."""
    fields = {**BATCH, "schedule": "darts", "stream_training": True, "on_generation_error": "drop_group"}
    args = server_args(tmp_path, server, **fields, learning_rate=3e-3, max_completion_length=32, max_steps=6)
    trainer = make_trainer(model_dir, args, reward_funcs=length_reward, train_dataset=letters_dataset(24))
    trainer._engine.overrides = lambda command: {"top_p": 7.0} if command.group_id == 5 else {}
    ages, batches = record_ages(trainer), record_batches(trainer)
    trainer.train()
    masked = [int((batch["completion_mask"].sum(1) == 0).sum()) for batch in batches]
    assert sorted(masked) == [0] * 23 + [4]
    pairs = [pair for batch in batches for pair in zip(batch["inputs"], batch["completion_mask"], strict=True)]
    assert sorted(Counter(row["prompt"] for row, mask in pairs if mask.any()).values()) == [4] * 23
    assert {age for rows in ages for runs in rows for age, _ in runs} == {0}
    logs = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history if "reward" in log]
    assert max(logs) < 1e-3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_type": "bnpo"}, r"`stream_training` \(True\) does not run with `loss_type` \('bnpo'\)"),
        ({"scale_rewards": "batch"}, r"does not run with `scale_rewards` \('batch'\)"),
        ({"num_iterations": 2}, "needs one optimizer step per batch"),
        ({"steps_per_generation": 2}, "needs one optimizer step per batch"),
        ({"rollout_ahead": 1}, r"`rollout_ahead` \(1\)"),
        ({"schedule": "sorted"}, r"does not run with `schedule` \('sorted'\)"),
        ({"stream_rewards": True}, "each group is scored once it has finished"),
        ({"schedule": "darts", "defer_unsettled_groups": True}, "does not run with"),
        ({"use_vllm": False}, "only has an effect with vLLM servers"),
    ],
)
def test_what_does_not_run_is_refused(tmp_path, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        make_args(tmp_path, **{**SERVER, **BATCH, "stream_training": True, **fields})


def test_one_wave_is_refused(model_dir, tmp_path):
    one = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "per_device_train_batch_size": 16}
    args = make_args(tmp_path, **{**SERVER, **one}, stream_training=True)
    with stub_servers(write), pytest.raises(ConfigurationError, match="needs batches of several waves"):
        make_trainer(model_dir, args)


@pytest.mark.parametrize(("takeable", "closed", "left", "chosen"), [
    ([], [], [0, 1, 2, 3], None), ([3], [3], [0, 1, 2, 3], None), ([1, 3], [], [0, 1, 2, 3], [1, 3]),
    ([0, 1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1]), ([0, 1, 3], [3], [0, 1, 2, 3], [0, 3]),
    ([3], [], [3], [3]), ([], [], [], []),
])  # fmt: skip
def test_a_wave_takes_what_has_finished(takeable, closed, left, chosen):
    """Groups whose long end still decodes go last."""
    groups = {group_id: SimpleNamespace(closed=group_id in closed) for group_id in left}
    scheduler = SimpleNamespace(takeable=takeable, ledger=SimpleNamespace(groups=groups))
    assert FinishedGroups(2).choose(scheduler) == chosen


def test_waves_of_a_batch():
    waves = Waves(2, 3, counts_tokens=True)
    assert [waves.is_first(step) for step in range(7)] == [True, *[False] * 5, True]
    assert [waves.is_last(step) for step in (0, 2, 4, 10)] == [False, False, True, True]
