"""
Unsettled groups wait for a long round. Invariants, each under its name: trained_once, not_starved. The engine writes
scripted answers in virtual time.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models import EOS_ID
from tests.builders import letters_dataset, make_args, make_trainer, record_batches, rollout_logs
from trl_darts.buffer.buffer import GroupScore, Lifecycle, Round, SampledCandidate
from trl_darts.buffer.checkpoint import load_rollouts
from trl_darts.buffer.deferral import MAX_DEFERRALS, Deferral
from trl_darts.errors import ConfigurationError
from trl_darts.policy.audit import BoundedWait
from trl_darts.policy.deferral import PRIOR_GAIN, PRIOR_GROUPS
from trl_darts.scheduling import Admission, PartialCandidate, PromptInfo
from trl_darts.scheduling.schedule_fields import GUARD_EVERY
from trl_darts.testing import stub_servers


NUM_PROMPTS, LIMIT, NEEDED = 40, 100, 60
SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}


def write(prompt_ids: list[int], index: int) -> list[int]:
    """One candidate of each group is long, another one for each prompt."""
    long = index == sum(prompt_ids) % 4
    return [5] * (NEEDED + 10 if long else 8 + index) + [EOS_ID]


def hard(prompts: list[str], completion_ids: list[list[int]], **kwargs) -> list[float]:
    """For every other prompt an answer is right if, and only if, it is long."""
    needs = [int(prompt[:-1]) % 2 == 1 for prompt in prompts]
    return [
        float(len(ids) >= NEEDED if long else len(ids) % 2) for long, ids in zip(needs, completion_ids, strict=True)
    ]


def deferring_trainer(model_dir, tmp_path, **fields):
    defaults = {"max_completion_length": LIMIT, "defer_unsettled_groups": True, "max_steps": 10}
    args = make_args(tmp_path, **{**SERVER, **defaults, **fields})
    with stub_servers(write):
        return make_trainer(model_dir, args, reward_funcs=hard)


def test_what_long_answers_teach_is_trained_on(model_dir, tmp_path):
    """A bounded wait aborts every right answer to a hard prompt; deferral trains on half of their groups' prompts."""
    rights = {}
    for defers in (False, True):
        trainer = deferring_trainer(model_dir, tmp_path, max_steps=20, defer_unsettled_groups=defers)
        batches = record_batches(trainer)
        trainer.train()
        rights[defers] = sum(int((b["completion_mask"].sum(1) >= NEEDED).sum()) for b in batches[2:])
    assert rights[False] == 0
    assert rights[True] >= 20


@pytest.mark.parametrize(("ahead", "passes"), [(0, 1), (1, 1), (0, 3)])
def test_trained_once(model_dir, tmp_path, ahead, passes):
    """In each pass over the data, each prompt is trained on once, or waits until the training ends."""
    trainer = deferring_trainer(model_dir, tmp_path, rollout_ahead=ahead, max_steps=10 * passes)
    batches = record_batches(trainer)
    trainer.train()
    rows = Counter()
    for batch in batches:
        weights = batch["completion_mask"].sum(1)
        rows.update(row["prompt"] for row, weight in zip(batch["inputs"], weights, strict=True) if weight)
    assert not any(count % 4 for count in rows.values())
    trained = Counter({prompt: count // 4 for prompt, count in rows.items()})
    waiting = Counter(entry.row["prompt"] for entry in trainer._batches.buffer.entries.values())
    seen, num_left = trained + waiting, 4 * (10 * passes - trainer._batches.feed.num_pulled)
    assert max(seen.values()) == passes
    assert sum(seen.values()) + num_left == passes * NUM_PROMPTS


def test_the_end_leaves_no_deferred_prompt_for_filler_rows(model_dir, tmp_path):
    """Deferred prompts fill up the last batches."""
    trainer = deferring_trainer(model_dir, tmp_path, max_steps=20)
    trainer.train()
    logs = rollout_logs(trainer)
    missing = sum(log["darts/deferral/missing"] for log in logs)
    assert len(trainer._batches.buffer.entries) <= missing


def test_not_starved(model_dir, tmp_path):
    """A long round comes after so many batches at most, also for a single deferred prompt."""
    trainer = deferring_trainer(model_dir, tmp_path, max_steps=40)
    waits: list[int] = []
    source = trainer._sources[0]
    next_batch = source.next

    def recorded(inputs):
        batch = next_batch(inputs)
        waits.extend(entry.num_deferrals for entry in trainer._batches.buffer.entries.values())
        return batch

    source.next = recorded
    trainer.train()
    assert 0 < max(waits) <= MAX_DEFERRALS + 1


def test_a_long_round_before_any_short_one_tells_nothing_of_prompts(model_dir, tmp_path):
    """What a short round would have kept is not known yet, so that any spread of rewards would count as a gain."""
    trainer = deferring_trainer(model_dir, tmp_path, max_steps=1)
    trainer.train()
    learned = trainer._batches.policy.learned
    assert learned.cut_off_share == 0.0
    assert not learned.by_prompt
    assert (learned.num_groups, learned.total_gain) == (PRIOR_GROUPS, PRIOR_GAIN)


def test_logged(model_dir, tmp_path):
    trainer = deferring_trainer(model_dir, tmp_path, max_steps=12)
    trainer.train()
    logs = rollout_logs(trainer)
    assert logs[0]["darts/buffer/long_round"] == 1.0  # nothing is known of answers without an end
    assert sum(log["darts/deferral/deferred"] for log in logs) > 0
    assert np.mean([log["darts/buffer/long_round"] for log in logs]) < 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "grpo"}, "'grpo'"),
        ({"long_end_patience": None}, "waits for all"),
        ({"drop_uniform_groups": True}, "drop_uniform_groups"),
        ({"use_vllm": False}, "`use_vllm`"),
        ({"defer_unsettled_groups": False, "audit_share": 1.0}, "less than 1"),
        ({"defer_unsettled_groups": False, "audit_share": 0.1, "schedule": "grpo"}, "audit_share"),
        ({"audit_share": 0.1, "selection": "uniform"}, "audits"),
        ({"defer_unsettled_groups": False, "audit_share": 0.1, "vllm_mode": "colocate"}, "`vllm_mode`"),
    ],
)
def test_what_can_not_defer(tmp_path, model_dir, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        deferring_trainer(model_dir, tmp_path, **fields)


# The default


@pytest.mark.parametrize(
    ("fields", "defers", "every"),
    [
        ({}, True, None),
        ({"rollout_ahead": 1}, True, None),
        ({"long_end_patience": 1.5}, True, None),
        ({"long_end_patience": None}, False, None),
        ({"schedule": "grpo"}, False, None),
        ({"use_vllm": False}, False, GUARD_EVERY),
        ({"drop_uniform_groups": True}, False, GUARD_EVERY),
        ({"stream_logprobs": True}, False, GUARD_EVERY),
        ({"rollout_ahead": "continuous"}, False, None),
        ({"use_vllm": False, "long_end_every": 7}, False, 7),
        ({"defer_unsettled_groups": False}, False, None),
        ({"defer_unsettled_groups": False, "use_vllm": False}, False, None),
    ],
)
def test_default(tmp_path, fields, defers, every):
    """Groups are deferred where that is possible; elsewhere, every few rollouts wait for all answers."""
    args = make_args(tmp_path, **{**SERVER, **fields})
    assert (args.defers_groups, args.long_end_every) == (defers, every)
    assert args.buffers_prompts == (defers or bool(args.rollout_ahead) or args.drop_uniform_groups)


def test_the_default_is_computed_again(tmp_path):
    args = make_args(tmp_path, **SERVER)
    in_process = replace(args, use_vllm=False, generation_batch_size=None)
    assert (in_process.defers_groups, in_process.long_end_every) == (False, GUARD_EVERY)
    again = replace(in_process, use_vllm=True, generation_batch_size=None)
    assert (again.defers_groups, again.long_end_every) == (True, None)


def test_data_without_a_buffer_turn_the_default_off(tmp_path, model_dir, caplog):
    """By default the trainer says what stands in the way; where deferral was asked for, it raises."""
    dataset = letters_dataset(NUM_PROMPTS)
    dataset = dataset.add_column("when", [datetime(2026, 1, 1)] * len(dataset))

    def build(**fields):
        args = make_args(tmp_path, save_strategy="steps", **SERVER, **fields)
        with stub_servers(write):
            return make_trainer(model_dir, args, reward_funcs=hard, train_dataset=dataset)

    trainer = build()
    assert trainer._batches is None
    assert trainer.args.long_end_every == GUARD_EVERY
    assert sum("not deferred" in record.message and "'when'" in record.message for record in caplog.records) == 1
    with pytest.raises(ConfigurationError, match="'when'"):
        build(defer_unsettled_groups=True)


# Audits


def flat(prompts: list[str], completion_ids: list[list[int]], **kwargs) -> list[float]:
    """An answer's reward has nothing to do with its length."""
    return [float((len(ids) + int(prompt[:-1])) % 2) for prompt, ids in zip(prompts, completion_ids, strict=True)]


def audited_trainer(model_dir, tmp_path, reward=hard, **fields):
    trainer = deferring_trainer(
        model_dir, tmp_path, **{"defer_unsettled_groups": False, "audit_share": 0.4, "max_steps": 40, **fields}
    )
    trainer.reward_funcs = [reward]
    return trainer


def test_audited_prompts_are_sampled_twice_and_trained_on_once(model_dir, tmp_path):
    trainer = audited_trainer(model_dir, tmp_path, max_steps=10)
    batches = record_batches(trainer)
    trainer.train()
    trained = Counter(row["prompt"] for batch in batches for row in batch["inputs"])
    assert set(trained.values()) == {4}
    buffer = trainer._batches.buffer
    assert buffer.num_entered > NUM_PROMPTS
    waiting = {entry.row["prompt"] for entry in buffer.entries.values()}
    assert not set(trained) & waiting
    assert len(trained) + len(waiting) == NUM_PROMPTS


@pytest.mark.parametrize(("reward", "loses"), [(hard, True), (flat, False)])
def test_what_is_lost_is_measured(model_dir, tmp_path, caplog, reward, loses):
    trainer = audited_trainer(model_dir, tmp_path, reward, max_steps=60)
    trainer.train()
    last = rollout_logs(trainer)[-1]
    assert last["darts/audit/groups"] >= 20
    assert (last["darts/audit/lost_share"] > 0.3) == loses
    assert last["darts/audit/length_mean_ratio"] < 0.7
    warnings = [record.message for record in caplog.records if "loses what long answers teach" in record.message]
    assert len(warnings) == loses


class Budgets:
    """Gives each prompt of its `n`-th call `n` candidates."""

    def __init__(self):
        self.num_calls = 0

    def plan(self, prompts):
        self.num_calls += 1
        return Admission([self.num_calls] * len(prompts))

    def expected_lengths(self, prompts):
        return None


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.integers(1, 500)), min_size=1, max_size=12))
def test_audited_prompts_are_compared_with_the_short_round_in_which_they_entered(rounds):
    """Its end, and as many candidates as it would have sampled. Long rounds and later ones change neither."""
    policy = Deferral(4, BoundedWait(4, 1, math.inf), defers=False, audit_share=0.5)
    buffer, budgets, counts, lengths = policy.buffer(), Budgets(), {}, {}
    for num_prompts, is_long, length in rounds:
        for key in range(num_prompts):
            policy.enter(buffer, PromptInfo(key, 3), {}, [])
        entries = [entry for entry in buffer.select(Lifecycle.WAITING) if not entry.num_deferrals]
        plan = Round(entries, 4, len(entries), long=is_long)
        policy.begin(buffer, plan, 4, budgets)
        if not is_long:
            for entry in entries:
                entry.candidates = [SampledCandidate(PartialCandidate([5] * length))]
                entry.score = GroupScore(None, {}, [0.0], True)
            policy.judge(buffer, plan, is_last=False)
            for entry_id in [entry.entry_id for entry in buffer.entries.values() if entry.audit_of is not None]:
                counts.setdefault(entry_id, budgets.num_calls)
                if entries:  # a round of audited prompts alone has no end
                    lengths.setdefault(entry_id, length)
    for entry in buffer.entries.values():
        assert entry.num_usual == counts.get(entry.entry_id, 0)
        assert entry.usual_length == lengths.get(entry.entry_id, 0.0)


def test_audits_survive_a_checkpoint(model_dir, tmp_path):
    trainer = audited_trainer(model_dir, tmp_path, max_steps=20, save_strategy="steps", save_steps=20)
    trainer.train()
    audits = trainer._batches.policy.audits
    assert audits.groups
    again = audited_trainer(model_dir, tmp_path, max_steps=21)
    again.get_train_dataloader()
    load_rollouts(again._state_callback._rollouts, tmp_path / "checkpoint-20", step=20, skips=True)
    assert again._batches.policy.audits == audits
    assert again._batches.buffer.entries.keys() == trainer._batches.buffer.entries.keys()


def test_an_audited_prompt_that_is_rejected_leaves(model_dir, tmp_path):
    """Neither its second sample nor its rows stay behind."""
    trainer = audited_trainer(model_dir, tmp_path, max_steps=1)
    batches = trainer._batches
    policy, buffer = batches.policy, batches.buffer
    for key in range(30):
        policy.enter(buffer, PromptInfo(key, 3), {}, [])
    second = next(entry for entry in buffer.entries.values() if entry.audit_of is not None)
    buffer.remove([second.audit_of])  # dropped
    second.state, second.score = Lifecycle.COMPLETE, GroupScore(None, {}, [1.0] * 4, True)
    second.num_usual, second.usual_length = 4, 10.0
    outcome = policy.judge(buffer, Round([second], 1, 1, long=True), is_last=False)
    assert policy.audits.groups == []
    assert outcome.counts["darts/deferral/sampled"] == 0


def test_answers_that_are_cut_off_make_one_warning(model_dir, tmp_path, caplog):
    """With a limit of 20 tokens each prompt's long answer is cut off: every rollout is plain GRPO's."""
    trainer = deferring_trainer(model_dir, tmp_path, max_completion_length=20, max_steps=8)
    trainer.train()
    assert [entry["darts/buffer/long_round"] for entry in rollout_logs(trainer)] == [1.0] * 8
    assert [entry["darts/budget/redundancy"] for entry in rollout_logs(trainer)] == [1.0] * 8
    words = "% of the answers reach `max_completion_length`, more than 3% in 5 rollouts: each waits for all"
    assert sum(words in message for message in caplog.messages) == 1
