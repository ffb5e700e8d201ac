"""
Rewards of a rollout without an end: groups are scored in other threads once they are complete, and batches are taken
in any order. `tests/test_continuous.py` has them with a real server.

Invariants, under these names, over random orders: own_rewards (each row that is taken has the reward of its own
completion, from one call), nothing_left (no result outlives its group, also if it was dropped or the rollout ended).
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import letters_dataset, make_args, make_trainer, record_batches, rollout_logs
from tests.streaming.test_rewards import Letters, length, stub_trainer
from tests.test_resume import LIMIT, SERVER, write
from tests.waits import wait_for
from trl_darts.errors import ConfigurationError
from trl_darts.scheduling import Candidate, GroupPlan, GroupResult
from trl_darts.streaming import make_streams
from trl_darts.streaming.continuous_rewards import ContinuousRewards
from trl_darts.testing import stub_servers


M = 2
CONTINUOUS = {"rollout_ahead": "continuous", "stream_rewards": True, "max_completion_length": LIMIT}


def group_of(group_id: int, rows: list[list[int]]) -> GroupResult:
    candidates = [Candidate(index, group_id, index, tokens=tokens) for index, tokens in enumerate(rows)]
    return GroupResult(GroupPlan(group_id, 1), candidates, list(range(len(rows))))


class Rollout:
    """Groups with random completions, of which batches are taken as the trainer takes them."""

    def __init__(self, *functions: Any, seed: int = 0, num_groups: int = 8) -> None:
        rng = random.Random(seed)
        self.groups = {
            group_id: [[rng.randrange(26) for _ in range(rng.randint(1, 4))] for _ in range(M)]
            for group_id in range(num_groups)
        }
        self.stream = ContinuousRewards(stub_trainer(*functions), 20.0)
        self.stream.begin(lambda row: self.data(row // M)[0])
        self.on_group = self.stream.follow(self.data)

    def data(self, group_id: int) -> tuple[dict[str, Any], list[int]]:
        return {"prompt": f"p{group_id}", "target": group_id}, [group_id]

    def note(self, group_id: int) -> None:
        self.on_group(group_of(group_id, self.groups[group_id]))

    def take(self, group_ids: list[int]) -> list[list[float | None]]:
        """Returns rewards by function, as `_calculate_rewards` gets them."""
        completion_ids = [tokens for group_id in group_ids for tokens in self.groups[group_id]]
        rows = [group_id * M + index for group_id in group_ids for index in range(M)]
        arguments = {
            "prompts": [f"p{row // M}" for row in rows],
            "completions": Letters().batch_decode(completion_ids, True),
            "completion_ids": completion_ids,
            "target": [row // M for row in rows],
            "trainer_state": self.stream.trainer.state,
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: None,
        }
        self.stream.begin(lambda row: self.data(row // M)[0])
        with self.stream.serving(rows):
            return [function(**arguments) for function in self.stream.trainer.reward_funcs]

    def kept(self) -> set[int]:
        """Returns the groups of which something is kept."""
        self.stream._decoder.submit(int).result()
        own = self.stream
        rows = [
            *own._completion_ids,
            *(row for _, row in own._call_of),
            *(r for call in own._calls for r in call.rows),
        ]
        return {row // M for row in rows}


@given(st.integers(0, 10**6), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_own_rewards_and_nothing_left(seed, batch_size):
    rng, calls = random.Random(seed), []

    def counted(completion_ids, **kwargs):
        calls.extend(map(tuple, completion_ids))
        return [float(sum(ids)) for ids in completion_ids]

    async def later(completions, **kwargs):
        return length(completions)

    rollout = Rollout(counted, later, seed=seed)
    order = rng.sample(sorted(rollout.groups), len(rollout.groups))
    noted = [group_id for group_id in order if rng.random() < 0.8]  # the others are selected as their batch is taken
    threads = [threading.Thread(target=rollout.note, args=(group_id,)) for group_id in noted]
    taken: set[int] = set()
    try:
        for start in range(0, len(order), batch_size):
            batch = sorted(order[start : start + batch_size])
            for thread, group_id in zip(threads, noted, strict=True):
                if thread.ident is None and (group_id in batch or rng.random() < 0.5):
                    thread.start()
            for group_id in set(batch).intersection(noted):
                threads[noted.index(group_id)].join()  # a group is passed on before it is taken
            rows = [ids for group_id in batch for ids in rollout.groups[group_id]]
            expected = [float(sum(ids)) for ids in rows], length(Letters().batch_decode(rows, True))
            assert rollout.take(batch) == list(expected)
            taken.update(batch)
            assert not rollout.kept() & taken
        assert rollout.kept() == set()
        assert sorted(calls) == sorted(tuple(ids) for rows in rollout.groups.values() for ids in rows)
    finally:
        rollout.stream.close()


def test_a_group_is_scored_while_the_trainer_trains():
    """In other threads, with another tokenizer."""
    threads = []

    def sees(completions, **kwargs):
        threads.append(threading.current_thread())
        return length(completions)

    rollout = Rollout(sees)
    decoded = []
    rollout.stream._tokenizer.batch_decode = lambda ids, skip_special_tokens: (
        decoded.append(threading.current_thread()) or Letters().batch_decode(ids, True)
    )
    rollout.note(3)
    wait_for(lambda: threads)
    assert threading.main_thread() not in [*threads, *decoded]
    rollout.take([3])
    assert len(threads) == len(decoded) == 1
    metrics = rollout.stream.metrics()
    assert metrics["darts/stream/reward_hidden_seconds"] > 0
    rollout.stream.close()


def test_an_ended_rollout_is_forgotten():
    """Also a group that completes after its end: the engine ends its requests in another thread."""
    others = set(threading.enumerate())  # of trainers in other tests
    started, released = threading.Event(), threading.Event()

    def waits(completions, **kwargs):
        started.set()
        released.wait(20)
        return length(completions)

    rollout = Rollout(waits)
    rollout.note(0)
    rollout.note(1)
    started.wait(20)
    rollout.stream.clear()
    rollout.note(2)
    assert rollout.kept() == set()
    released.set()
    rollout.on_group = rollout.stream.follow(rollout.data)
    rollout.note(0)
    assert rollout.kept() == {0}
    rollout.stream.close()
    rollout.note(4)
    wait_for(lambda: not any(t.name.startswith("trl_darts-reward") for t in set(threading.enumerate()) - others))


def test_an_error_is_raised_with_its_batch():
    def fails(target, **kwargs):
        if 1 in target:
            raise ZeroDivisionError("of the reward")
        return [1.0] * len(target)

    rollout = Rollout(fails)
    for group_id in range(3):
        rollout.note(group_id)
    assert rollout.take([0, 2]) == [[1.0] * 4]
    with pytest.raises(ZeroDivisionError, match="of the reward"):
        rollout.take([1])
    rollout.stream.close()


def test_an_evaluation_has_functions_for_itself():
    """What is not async may not be thread-safe, and an evaluation calls it in the main thread."""
    busy = threading.Lock()

    def alone(completions, **kwargs):
        assert busy.acquire(blocking=False)
        time.sleep(0.02)
        busy.release()
        return length(completions)

    rollout = Rollout(alone)
    for group_id in range(4):
        rollout.note(group_id)
    with rollout.stream.paused():
        for group_id in range(4, 8):
            rollout.note(group_id)
        for _ in range(4):
            alone(["a"])
    rewards = rollout.take(list(range(8)))
    assert rewards == [length(Letters().batch_decode([ids for g in range(8) for ids in rollout.groups[g]], True))]
    rollout.stream.close()


# With a trainer


def own_reward(prompts, completion_ids, log_extra, log_metric, **kwargs):
    log_extra("letter", [prompt[-1] for prompt in prompts])
    log_metric("calls", float(len(prompts)))
    return [len(ids) * float(prompt[-1] in "CE") for prompt, ids in zip(prompts, completion_ids, strict=True)]


def build(model_dir, path, reward=own_reward, **fields):
    own = {**SERVER, **CONTINUOUS, "max_steps": 6, "scale_rewards": False, "log_completions": True, **fields}
    with stub_servers(write):
        args = make_args(path, **own)
        data = {"train_dataset": letters_dataset(20), "eval_dataset": letters_dataset(4)}
        return make_trainer(model_dir, args, reward_funcs=reward, **data)


def check(batches):
    """Asserts that advantages are those of `own_reward`."""
    for batch in batches:
        lengths = batch["completion_mask"].sum(1).tolist()
        rewards = [n * float(row["prompt"][-1] in "CE") for n, row in zip(lengths, batch["inputs"], strict=True)]
        for start in range(0, 16, 4):
            own = rewards[start : start + 4]
            expected = [value - sum(own) / 4 for value in own]
            assert batch["advantages"][start : start + 4].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("schedule", ["grpo", "darts"])
def test_batches_have_the_rewards_of_their_rows(model_dir, tmp_path, schedule):
    """With evaluations in between, and several optimizer steps to a batch."""
    threads = []

    def reward(*args: Any, **kwargs: Any) -> list[float]:
        threads.append(threading.current_thread())
        return own_reward(*args, **kwargs)

    fields = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    fields |= {"per_device_train_batch_size": 8, "steps_per_generation": 2, "schedule": schedule}
    trainer = build(model_dir, tmp_path, reward, **fields)
    batches = record_batches(trainer)
    trainer.train()
    batches = [batch for batch in batches if len(batch["advantages"]) == 16]
    assert len(batches) == 3
    check(batches)
    streamed = [thread for thread in threads if thread is not threading.main_thread()]
    assert len(streamed) == 12  # one call for each group; evaluations are left to TRL
    assert len(threads) > 12
    assert list(trainer._logs["extra"]["letter"]) == [prompt[-1] for prompt in trainer._logs["prompt"]]
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    assert not trainer._streams.rewards._calls
    assert all(entry["darts/stream/reward_timeouts"] == 0 for entry in rollout_logs(trainer))


def test_the_same_training_with_and_without(model_dir, tmp_path):
    weights = []
    for streams in (False, True):
        trainer = build(model_dir, tmp_path, stream_rewards=streams, learning_rate=1e-3)
        trainer.train()
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(a.equal(b) for a, b in zip(*weights, strict=True))


def test_resumed(model_dir, tmp_path):
    """What was under way at the checkpoint is sampled and scored again. No prompt is trained on twice."""
    prompts: Counter[str] = Counter()
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = build(model_dir, tmp_path, max_steps=5, save_strategy="steps", save_steps=2)
        batches = record_batches(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        check(batches)
        own = batches if checkpoint else batches[:2]
        prompts.update(row["prompt"] for batch in own for row in batch["inputs"])
    assert prompts == dict.fromkeys(letters_dataset(20)["prompt"], 4)


def test_a_function_that_fails_ends_the_training(model_dir, tmp_path):
    def fails(prompts, **kwargs):
        if any(prompt == "17C" for prompt in prompts):
            raise ZeroDivisionError("of the reward")
        return [1.0] * len(prompts)

    trainer = build(model_dir, tmp_path, fails)
    with pytest.raises(ZeroDivisionError, match="of the reward"):
        trainer.train()
    assert not trainer._streams.rewards._calls


def test_dropped_groups(model_dir, tmp_path, monkeypatch):
    """Filler rows take their place, and nothing of them is kept."""
    trainer = build(model_dir, tmp_path, on_generation_error="drop_group")
    batches = record_batches(trainer)
    take, number = trainer._engine._run, iter(range(100))

    def drops(plan: Any, batch: Any) -> Any:
        result = take(plan, batch)
        if next(number) in (1, 3):
            lost = result.groups.pop()
            result.dropped[lost.plan.group_id] = "It was refused."
        return result

    monkeypatch.setattr(trainer._engine, "_run", drops)
    trainer.train()
    masked = [int((batch["completion_mask"].sum(1) == 0).sum()) for batch in batches]
    assert masked == [0, 4, 0, 4, 0, 0]


def test_several_processes_are_refused():
    args = SimpleNamespace(stream_logprobs=False, stream_rewards=True, is_continuous=True, stream_reward_timeout_s=1.0)
    trainer = {"rollout_func": None, "tools": None, "environment_factories": None, "_is_vlm": False, "args": args}
    trainer |= {"accelerator": SimpleNamespace(num_processes=2), "_main": SimpleNamespace(mailbox=None)}
    with pytest.raises(ConfigurationError, match=r"`stream_rewards` \(True\) does not run .* on 2 processes"):
        make_streams(type("Trainer", (SimpleNamespace,), {})(**trainer))
