"""
A resumed run trains on the rows that the uninterrupted one would: with every schedule, within an epoch, at its end and
after it, from checkpoints of TRL and of other schedules, and after changes between two stages.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.models import EOS_ID
from tests.builders import LETTERS, letters_dataset, make_args, make_trainer
from trl_darts.testing import stub_servers
from trl_darts.training.preemption import Preemption


SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
LIMIT, STEPS = 60, 15  # five per epoch
SCHEDULES: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "default": {},
    "unguarded": {"defer_unsettled_groups": False},
    "paper": {"long_end_patience": None},
    "every third": {"defer_unsettled_groups": False, "long_end_every": 3},
    "tail": {"schedule": "tail_batching"},
    "partial": {"schedule": "partial_rollout"},
    "sorted": {"schedule": "sorted"},
    "sorted, partial": {"schedule": "sorted", "sorted_mode": "partial"},
    "ahead": {"rollout_ahead": 1, "defer_unsettled_groups": False},
    "dynamic": {"drop_uniform_groups": True},
}
# Two optimizer steps share a batch, and one step takes two batches of which the second is used by the next one too.
SHARED = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
ODD = {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 8}


def write(prompt_ids: list[int], index: int) -> list[int]:
    rng = random.Random(str((tuple(prompt_ids), index)))
    return [5 + rng.randrange(60)] * rng.choice([3, 5, 8, 12, 20, 40, 55]) + [EOS_ID]


def hard(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    needs = [int(prompt[:-1]) % 2 == 1 for prompt in prompts]
    return [float(len(ids) >= 40 if need else len(ids) % 2) for need, ids in zip(needs, completion_ids, strict=True)]


def build(model_dir: Path, path: Path, data: Any = None, stub: bool = True, **fields: Any) -> Any:
    own = {"max_completion_length": LIMIT, "save_strategy": "steps", "save_steps": 1, "max_steps": STEPS, **fields}
    data = letters_dataset(20) if data is None else data
    if not stub:
        return make_trainer(model_dir, make_args(path, **own), reward_funcs=hard, train_dataset=data)
    with stub_servers(write):
        return make_trainer(model_dir, make_args(path, **{**SERVER, **own}), reward_funcs=hard, train_dataset=data)


Step = tuple[int, list[tuple[Any, int]]]  # optimizer step, and prompt and completion's length of each row


def watch(trainer: Any) -> list[Step]:
    """Collects the rows of each micro-batch in their order."""
    seen: list[Step] = []
    compute = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        prompts = [tuple(ids[mask.bool()].tolist()) for ids, mask in rows]
        lengths = inputs["completion_mask"].sum(1).tolist()
        seen.append((trainer.state.global_step, list(zip(prompts, lengths, strict=True))))
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    return seen


def counts(seen: list[Step]) -> Counter[Any]:
    """Returns the rows of each prompt, without filler rows."""
    return Counter(prompt for _, rows in seen for prompt, length in rows if length)


def parameters(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def check_resumes(model_dir: Path, tmp_path: Path, steps: tuple[int, ...], **fields: Any) -> None:
    """The rows, their order and the parameters are those of the uninterrupted run."""
    whole = build(model_dir, tmp_path / "whole", **fields)
    expected = watch(whole)
    whole.train()
    for step in steps:
        again = build(model_dir, tmp_path / "again", **{**fields, "save_strategy": "no"})
        seen = watch(again)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert seen == [rows for rows in expected if rows[0] >= step]
        assert torch.equal(parameters(again), parameters(whole))


@pytest.mark.parametrize("name", SCHEDULES)
def test_on_servers(model_dir, tmp_path, name):
    """Within an epoch, and at its end."""
    check_resumes(model_dir, tmp_path, (5, 7), **SCHEDULES[name])


@pytest.mark.parametrize("name", ["grpo", "unguarded", "paper", "every third"])
def test_in_the_trainers_process(model_dir, tmp_path, name):
    check_resumes(model_dir, tmp_path, (5, 7), stub=False, max_steps=9, **SCHEDULES[name])


@pytest.mark.parametrize("name", ["grpo", "default", "tail", "sorted, partial", "ahead", "dynamic"])
@pytest.mark.parametrize("fields", [SHARED, ODD], ids=["shared", "odd"])
def test_within_a_batch(model_dir, tmp_path, name, fields):
    """The rest of the batch is saved, so nothing is sampled or trained on twice."""
    check_resumes(model_dir, tmp_path, (3, 4), max_steps=8, **SCHEDULES[name], **fields)


def test_without_the_rest_of_a_batch(model_dir, tmp_path, caplog):
    """Another number of processes saved it: the next batch begins."""
    whole = build(model_dir, tmp_path, schedule="grpo", max_steps=6, **SHARED)
    expected = watch(whole)
    whole.train()
    (tmp_path / "checkpoint-3" / "darts_batch_0.pt").unlink()
    again = build(model_dir, tmp_path, schedule="grpo", max_steps=5, save_strategy="no", **SHARED)
    seen = watch(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [counts([step]) for step in seen] == [counts([step]) for step in expected[4:6]]
    assert "was saved within a batch, by another number of processes" in caplog.text


@pytest.mark.parametrize("step", [2, 5, 7])
@pytest.mark.parametrize("name", ["grpo", "default", "tail", "ahead"])
def test_from_a_checkpoint_of_trl(model_dir, tmp_path, name, step):
    """In each epoch, each prompt is trained on that the first part has not been trained on."""
    args = dict(make_args(tmp_path / "trl", max_completion_length=8, save_strategy="steps", save_steps=1).to_dict())
    names = GRPOConfig.__dataclass_fields__.keys()
    own = {key: value for key, value in args.items() if key in names} | {"max_steps": step, "num_generations": 4}
    own |= {"generation_batch_size": None, "steps_per_generation": 1, "max_completion_length": 8}
    first = make_trainer(model_dir, GRPOConfig(**own), cls=GRPOTrainer, train_dataset=letters_dataset(20))
    before = counts(watch_after(first))
    fields = {**SCHEDULES[name], "max_completion_length": LIMIT, "max_steps": 10}
    second = build(model_dir, tmp_path / "ours", save_strategy="no", **fields)
    seen = watch(second)
    second.train(resume_from_checkpoint=str(tmp_path / "trl" / f"checkpoint-{step}"))
    waiting = (
        Counter(tuple(entry.tokens) for entry in second._batches.buffer.entries.values())
        if second._batches
        else Counter()
    )
    trained = before + counts(seen) + Counter({prompt: 4 * count for prompt, count in waiting.items()})
    missing = 40 - sum(trained.values()) // 4  # groups of filler rows whose prompts were not pulled
    assert missing == 0 or name == "default"
    assert set(trained.values()) <= {4, 8}
    assert len(before) == min(20, 4 * step)


def watch_after(trainer: Any) -> list[Step]:
    seen = watch(trainer)
    trainer.train()
    return seen


@pytest.mark.parametrize(("first", "second"), [("default", "grpo"), ("grpo", "default"), ("partial", "tail"),
                                               ("default", "partial"), ("tail", "dynamic")])  # fmt: skip
def test_from_another_schedule(model_dir, tmp_path, caplog, first, second):
    """No prompt is trained on twice in a pass; what waits in a buffer is trained on if there is one."""
    trainer = build(model_dir, tmp_path / "first", **SCHEDULES[first], max_steps=3)
    before = counts(watch_after(trainer))
    waiting = len(trainer._batches.buffer) if trainer._batches else 0
    again = build(model_dir, tmp_path / "second", **SCHEDULES[second], max_steps=5, save_strategy="no")
    seen = watch(again)
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    both = before + counts(seen)
    assert max(both.values()) == 4 or waiting
    if second == "grpo" and waiting:
        assert f"has {waiting} prompts in its rollout buffer, of another `schedule`" in caplog.text


def stream(data: Dataset) -> Any:
    return data.to_iterable_dataset()


class Epochs(TrainerCallback):
    """Notes the steps at which epochs ended."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.parametrize("name", ["grpo", "unguarded", "default", "tail", "dynamic", "ahead"])
def test_epochs_of_data_without_a_length(model_dir, tmp_path, name):
    """Epochs end with the passes, and each has its checkpoint, from which a run resumes."""
    fields = {**SCHEDULES[name], "save_strategy": "epoch"}
    whole = build(model_dir, tmp_path / "whole", data=stream(letters_dataset(20)), **fields)
    epochs = Epochs()
    whole.add_callback(epochs)
    expected = watch(whole)
    whole.train()
    if name != "dynamic":  # which needs more prompts than it trains on
        assert epochs.steps == [5, 10, 15]
    for step in epochs.steps[:2]:
        again = build(
            model_dir, tmp_path / "again", data=stream(letters_dataset(20)), **fields | {"save_strategy": "no"}
        )
        seen = watch(again)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert seen == [rows for rows in expected if rows[0] >= step]


@pytest.mark.parametrize("name", ["grpo", "default"])
def test_data_without_a_length_in_a_later_pass(model_dir, tmp_path, name):
    check_resumes(model_dir, tmp_path, (7,), data=stream(letters_dataset(20)), **SCHEDULES[name])


@pytest.mark.parametrize("fields", [{}, {"schedule": "tail_batching"}, {"schedule": "grpo"}])
def test_rollouts_are_counted(model_dir, tmp_path, fields):
    """Also if a step takes two batches, and an epoch's last one fewer: its number, and how many follow."""
    own = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 4}
    trainer = build(model_dir, tmp_path, data=letters_dataset(12), max_steps=6, save_strategy="no", **own, **fields)
    source, numbers = trainer._sources[0], []
    next_batch = source.next

    def counted(inputs: Any) -> Any:
        left = trainer._loop.num_batches(trainer.state.max_steps) - source.number
        numbers.append((source.number, left))
        return next_batch(inputs)

    source.next = counted
    trainer.train()
    assert numbers == [(number, 9 - number) for number in range(9)]


@pytest.mark.parametrize("micro_step", [2, 6])
@pytest.mark.parametrize("name", ["grpo", "tail", "default"])
def test_sigterm_within_a_step_of_two_batches(model_dir, tmp_path, monkeypatch, name, micro_step):
    """The step is given up, so the prompts of both batches are trained on again, and none is lost."""
    fields = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 4}
    fields |= {"max_steps": -1, "num_train_epochs": 1, "save_steps": 100, **SCHEDULES[name]}
    first = build(model_dir, tmp_path, data=letters_dataset(32), **fields)
    seen = watch(first)
    with monkeypatch.context() as patch:
        patch.setattr(Preemption, "_is_late", property(lambda self: first._step == micro_step))
        with pytest.raises(SystemExit):
            first.train()
    done = micro_step // 4
    again = build(model_dir, tmp_path, data=letters_dataset(32), **{**fields, "save_strategy": "no"})
    rest = watch(again)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}") if done else None)
    rows = counts([step for step in seen if step[0] < done]) + counts(rest)
    waiting = len(again._batches.buffer) if again._batches else 0
    fillers = sum(not length for _, own in rest for _, length in own)
    assert set(rows.values()) == {4}
    assert len(rows) + waiting == 32 or name == "default"
    assert fillers == 0 or name == "default"


# What users change between two stages


def second_stage(model_dir: Path, tmp_path: Path, data: Any = None, first: Any = None, **fields: Any) -> list[Step]:
    """Trains four steps, and four others with other settings or data."""
    build(model_dir, tmp_path / "first", max_steps=4, **(first or {})).train()
    trainer = build(model_dir, tmp_path / "second", data=data, **{"max_steps": 8, "save_strategy": "no", **fields})
    seen = watch(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert trainer.state.global_step == 8
    return seen


@pytest.mark.parametrize("first", [{}, {"schedule": "partial_rollout"}, {"defer_unsettled_groups": False}])
def test_other_group_sizes(model_dir, tmp_path, caplog, first):
    """TRL resumes. Learned lengths stay, and what depends on the size of groups is dropped, in one line."""
    seen = second_stage(model_dir, tmp_path, first=first, **first, num_generations=8)
    assert all(count % 8 == 0 for count in counts(seen).values())
    assert "A batch has 2 prompts, and had 4 before the checkpoint" in caplog.text


def test_other_budgets(model_dir, tmp_path, caplog):
    second_stage(model_dir, tmp_path, max_num_generations=6)
    assert "`max_num_generations` was another one before" in caplog.text


@pytest.mark.parametrize(
    "fields", [{"max_completion_length": 30}, {"temperature": 0.5}, {"schedule": "tail_batching"}]
)
def test_answers_of_other_settings_are_dropped(model_dir, tmp_path, caplog, fields):
    partial = {"schedule": "partial_rollout"}
    seen = second_stage(model_dir, tmp_path, first=partial, **partial | fields)
    name, value = next(iter(fields.items()))
    assert f"`{name}` ({value!r}) was " in caplog.text
    assert "answers in its rollout buffer are dropped" in caplog.text
    assert max(length for _, rows in seen for _, length in rows) <= fields.get("max_completion_length", LIMIT)


def test_other_columns(model_dir, tmp_path, caplog):
    """Prompts of the buffer lack them, and reward functions would fail."""
    data = letters_dataset(20).add_column("answer", list(range(20)))
    seen = second_stage(
        model_dir, tmp_path, data=data, schedule="partial_rollout", first={"schedule": "partial_rollout"}
    )
    assert "The data set has the columns answer, prompt, and had prompt before" in caplog.text
    assert counts(seen)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_formatted_columns_are_restored_as_they_were(model_dir, tmp_path, kind):
    data = letters_dataset(20).add_column("answer", [[i, i + 1] for i in range(20)]).with_format(kind)
    types = set()

    def reward(completions: list[str], answer: list[Any], **kwargs: Any) -> list[float]:
        types.update(type(value) for value in answer)
        return [float(len(text) % 3) for text in completions]

    with stub_servers(write):
        for part, steps in (("first", 3), ("second", 6)):
            args = make_args(tmp_path / part, **SERVER, schedule="partial_rollout", max_completion_length=LIMIT,
                             max_steps=steps, save_strategy="steps", save_steps=3)  # fmt: skip
            trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=data)
            trainer.train(resume_from_checkpoint=None if part == "first" else str(tmp_path / "first/checkpoint-3"))
    assert len(types) == 1
    assert types.pop().__module__ == kind


def test_a_skip_that_is_ignored(model_dir, tmp_path):
    """`ignore_data_skip` begins the epoch again, with its own order."""
    whole = build(model_dir, tmp_path / "whole", schedule="grpo")
    expected = watch(whole)
    whole.train()
    again = build(model_dir, tmp_path / "again", schedule="grpo", ignore_data_skip=True, save_strategy="no")
    seen = watch(again)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-7"))
    first = [Counter(prompt for prompt, _ in rows) for _, rows in expected][5:8]
    assert [Counter(prompt for prompt, _ in rows) for _, rows in seen][:3] == first


def test_letters() -> None:
    assert len(LETTERS) == 5  # 20 prompts are five batches of four
