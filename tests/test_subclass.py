"""Tests that what a subclass of the trainer overrides decides as it trains: early scoring goes through it too."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.models import EOS_ID
from tests.builders import letters_dataset, make_args, make_trainer, record_batches, rollout_logs
from trl_darts import DARTSGRPOTrainer
from trl_darts.buffer.batch import logger
from trl_darts.buffer.buffer import BufferEntry, SampledCandidate
from trl_darts.buffer.scores import GroupScores
from trl_darts.scheduling import PartialCandidate, PromptInfo
from trl_darts.testing import stub_servers


LIMIT, LONG = 64, 40
SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
SCHEDULES = {
    "deferral": {},
    "ahead": {"rollout_ahead": 1},
    "dynamic": {"drop_uniform_groups": True},
    "streamed": {"stream_rewards": True},
    "streamed_buffer": {"stream_rewards": True, "schedule": "tail_batching"},
    "loader": {"defer_unsettled_groups": False},
    "grpo": {"schedule": "grpo"},
}


def write(prompt_ids: list[int], index: int) -> list[int]:
    """The second candidate of each group is long, the others differ in one token each."""
    return [5 + sum(prompt_ids) % 9] * (LONG if index == 1 else 3 + index) + [EOS_ID]


def zero(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


class LongIsGood(DARTSGRPOTrainer):
    """Adds 1 to the rewards of a group's longest answer, as rows of whole groups, and counts the rows that it saw."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        self.seen.update((row["prompt"], len(ids)) for row, ids in zip(inputs, completion_ids, strict=True))
        lengths = torch.tensor([float(len(ids)) for ids in completion_ids]).view(-1, self.num_generations)
        return rewards + (lengths == lengths.max(dim=1, keepdim=True).values).float().view(-1, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rewards_that_a_subclass_edits_decide_and_train(model_dir, tmp_path, name):
    """No group is uniform, so none is deferred or dropped; each row is edited once, and trained with that reward."""
    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=6, **SERVER, **SCHEDULES[name])
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, cls=LongIsGood, reward_funcs=zero)
    batches = record_batches(trainer)
    trainer.train()
    logs = rollout_logs(trainer)
    for metric in ("darts/deferral/deferred", "darts/deferral/missing", "darts/uniform/dropped"):
        assert not any(entry.get(metric, 0.0) for entry in logs)
    assert [entry["reward"] for entry in logs] == [0.25] * 6
    trained: Counter[tuple[str, int]] = Counter()
    for batch in batches:
        lengths = batch["completion_mask"].sum(1).tolist()
        trained.update((row["prompt"], length) for row, length in zip(batch["inputs"], lengths, strict=True))
        for start in range(0, 16, 4):
            best = lengths[start : start + 4].index(max(lengths[start : start + 4]))
            assert batch["advantages"][start : start + 4].argmax() == best
    assert trained.total() == 6 * 16
    scored = trainer.seen
    assert not any(count > 1 for count in scored.values())
    assert not trained - scored


def test_an_evaluation_is_scored_by_the_subclass(model_dir, tmp_path):
    args = make_args(tmp_path, max_completion_length=LIMIT, per_device_eval_batch_size=4, **SERVER)
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, cls=LongIsGood, reward_funcs=zero, eval_dataset=letters_dataset(4))
    assert trainer.evaluate()["eval_reward"] == 0.25


def test_a_method_set_on_the_trainer_is_a_subclass_too(model_dir, tmp_path):
    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=4, **SERVER)
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, reward_funcs=zero)
    before = trainer._calculate_rewards
    trainer._calculate_rewards = lambda inputs, *rest: before(inputs, *rest) + torch.arange(len(inputs))[:, None]
    trainer.train()
    assert not any(entry["darts/deferral/missing"] for entry in rollout_logs(trainer))
    assert all(entry["reward_std"] > 0 for entry in rollout_logs(trainer))


class ScoresItself(DARTSGRPOTrainer):
    """Calls its reward functions in its own way."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> torch.Tensor:
        assert [function.__name__ for function in self.reward_funcs] == ["by_index"]
        return torch.tensor([self.reward_funcs[0](completions)]).T


def by_index(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(i % 4) for i in range(len(completions))]


@pytest.mark.parametrize("name", ["deferral", "loader"])
def test_a_subclass_may_call_the_functions_itself(model_dir, tmp_path, name):
    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=3, **SERVER, **SCHEDULES[name])
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, cls=ScoresItself, reward_funcs=by_index)
    trainer.train()
    assert [entry["reward"] for entry in rollout_logs(trainer)] == [1.5] * 3


class Prefixed(DARTSGRPOTrainer):
    """Puts a token before each prompt, and so trains on other prompts than TRL would."""

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        ids, *rest = super()._tokenize_prompts(prompts)
        return [[7, *tokens] for tokens in ids], *rest


@pytest.mark.parametrize("name", SCHEDULES)
def test_prompts_are_decoded_as_a_subclass_tokenizes_them(model_dir, tmp_path, name):
    decoded: list[list[int]] = []

    def watch(prompt_ids: list[int], index: int) -> list[int]:
        decoded.append(prompt_ids)
        return write(prompt_ids, index)

    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=3, **SERVER, **SCHEDULES[name])
    with stub_servers(watch):
        trainer = make_trainer(model_dir, args, cls=Prefixed)
    trainer.train()
    assert decoded
    assert {ids[0] for ids in decoded} == {7}


class Inserts(DARTSGRPOTrainer):
    """Changes prompts after a buffer has decoded them, as a template does that has the date in it."""

    def _generate(self, prompts: list[Any], *args: Any) -> Any:
        output = super()._generate([f"7{prompt}" for prompt in prompts], *args)
        self.trained = output[0]
        return output


@pytest.mark.parametrize("name", ["deferral", "dynamic", "loader"])
def test_rows_are_trained_on_with_the_prompts_that_were_decoded(model_dir, tmp_path, caplog, name):
    decoded: set[tuple[int, ...]] = set()
    type(logger).warning_once.cache_clear()

    def watch(prompt_ids: list[int], index: int) -> list[int]:
        decoded.add(tuple(prompt_ids))
        return write(prompt_ids, index)

    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=3, **SERVER, **SCHEDULES[name])
    with stub_servers(watch):
        trainer = make_trainer(model_dir, args, cls=Inserts)
    trainer.train()
    assert {tuple(ids) for ids in trainer.trained} <= decoded
    told = [message for message in caplog.messages if "other tokens than when they were decoded" in message]
    assert len(told) == (name != "loader")  # which decodes what TRL hands out


def entry_of(number: int) -> BufferEntry:
    """A complete prompt with two rows of one token."""
    entry = BufferEntry(number, PromptInfo(number, 1))
    entry.candidates = [SampledCandidate(PartialCandidate([number - 2 + place])) for place in range(2)]
    return entry


@pytest.mark.parametrize("owners", [{}, {3: 1, 5: 1, 7: 1}])
@pytest.mark.parametrize("index", [0, 1])
def test_each_process_scores_whole_groups(monkeypatch, index, owners):
    """As many on each, so that a subclass finds the rows of a group together in what all processes gather."""
    main = SimpleNamespace(num_processes=2, index=index, scatter=lambda make: make()[index])
    entries = {number: entry_of(number) for number in (3, 5, 7)}
    batches = SimpleNamespace(
        main=main, num_generations=2, unscored=lambda: list(entries.values()), entry=entries.__getitem__
    )
    trainer = SimpleNamespace(reward_weights=torch.ones(1), multi_objective_aggregation="sum_then_normalize")
    scores = GroupScores(trainer, batches, None, lambda: owners)  # type: ignore[arg-type]
    scored: list[tuple[int, int]] = []

    def score(share: Any) -> Any:
        scored.extend(share.rows)
        assert share.completion_ids == [[entry_id - 2 + place] for entry_id, place in share.rows]
        return torch.arange(2.0 * len(share.rows))[:, None], {}

    monkeypatch.setattr(scores, "_score", score)
    scores._score_new()
    assert all(entry.score is not None for entry in entries.values())
    assert [entry_id for entry_id, _ in scored[::2]] == [entry_id for entry_id, _ in scored[1::2]]
    assert [place for _, place in scored] == [0, 1] * (len(scored) // 2)
    assert len(scored) == (6 if owners else 4)
    if owners:  # the other process has none, and scores the last group again
        assert [*dict.fromkeys(entry_id for entry_id, _ in scored)] == ([3, 5, 7] if index else [7])


class Reads(DARTSGRPOTrainer):
    """Reads the data of a batch before it is scored, as many subclasses do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.read: list[str] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.read += [row["prompt"] for row in inputs]
        return super()._generate_and_score_completions(inputs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_subclass_gets_the_rows_that_are_trained_on(model_dir, tmp_path, name):
    args = make_args(tmp_path, max_completion_length=LIMIT, max_steps=3, **SERVER, **SCHEDULES[name])
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, cls=Reads)
    batches = record_batches(trainer)
    trainer.train()
    assert trainer.read == [row["prompt"] for batch in batches for row in batch["inputs"]]
