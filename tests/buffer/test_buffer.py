"""The rollout buffer and the policies that decide rounds, over random rollouts."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.chaos import ChaosEngine
from trl_darts.buffer.buffer import Lifecycle
from trl_darts.buffer.checkpoint import at_rest, dump, load
from trl_darts.buffer.rounds import Ahead, DynamicSampling, PartialRollout, Sorted, TailBatching, num_likely_enough
from trl_darts.policy import LengthTracker
from trl_darts.scheduling import FinishReason, PromptInfo, SchedulePolicies, Scheduler, ScheduleSettings


M = 2
POLICIES = st.one_of(
    st.builds(Ahead, st.integers(1, 3)),
    st.builds(DynamicSampling, st.integers(1, 3), st.sampled_from([1.5, 4.0])),
    st.builds(TailBatching, st.integers(1, 3), st.sampled_from([1.25, 2.0])),
    st.builds(PartialRollout, st.integers(1, 3), st.sampled_from([1.5, 3.0]), st.integers(1, 3)),
    st.builds(Sorted, st.integers(1, 3), st.integers(2, 3), st.booleans()),
)


def enter(policy, buffer, prompts) -> None:
    for prompt in prompts:
        policy.enter(buffer, prompt, {}, [])


class Training:
    """An epoch of rounds with an adversarial engine; every prompt enters through the loader, batch by batch."""

    def __init__(self, policy, num_batches: int, seed: int, selection: str = "all") -> None:
        loader = "grpo" if selection == "all" else "darts"
        schedule = {Ahead: loader, DynamicSampling: loader, TailBatching: "tail_batching", Sorted: "sorted"}.get(
            type(policy), "partial_rollout"
        )
        self.settings = ScheduleSettings(schedule, num_generations=M, selection=selection)
        self.policy = policy
        self.admission = self.settings.admission(LengthTracker(0.5, 200))
        self.buffer = policy.buffer()
        self.loader = [[PromptInfo(b * policy.num_groups + i, 3) for i in range(policy.num_groups)] for b in
                       range(num_batches)]  # fmt: skip
        self.version = 0
        self.seed = seed
        self.trained: list = []

    def step(self) -> list:
        while self.policy.lacking(self.buffer) and self.loader:
            enter(self.policy, self.buffer, self.loader.pop(0))
        plan = self.policy.next(self.buffer)
        result = None
        if plan.entries:
            _, plans = self.policy.begin(self.buffer, plan, M, self.admission)
            scheduler = Scheduler(self.settings.policies(batch_stop=plan.batch_stop), M)
            ChaosEngine(self.seed + self.version, num_engines=2).run(scheduler, plans)
            result = scheduler.result()
        dropped = self.buffer.absorb(result, self.version)
        self.version += 1
        self.trained.append(self.policy.take(self.buffer, plan, len(dropped)))
        return self.trained[-1]

    def run(self) -> list:
        while self.loader or len(self.buffer):
            assert self.version < 100, "prompts are starved"
            self.step()
        return [group for groups in self.trained for group in groups]


trainings = st.builds(
    Training, POLICIES, st.integers(1, 6), st.integers(0, 2**32), st.sampled_from(["all", "dual_end", "uniform"])
)


@settings(max_examples=80)
@given(trainings)
def test_trained_once(training):
    num_batches, size = len(training.loader), training.policy.num_groups
    groups = training.run()
    assert Counter(g.prompt.key for g in groups) == Counter(range(num_batches * size))
    assert [len(batch) for batch in training.trained] == [size] * num_batches  # as many steps as the loader has
    assert all(len(group.candidates) == M for group in groups)


@settings(max_examples=80)
@given(trainings)
def test_not_starved(training):
    policy, entered, left = training.policy, {}, {}
    while training.loader or len(training.buffer):
        before = training.buffer.num_entered
        groups = training.step()
        entered.update(dict.fromkeys(range(before, training.buffer.num_entered), training.version))
        left.update({group.entry_id: training.version for group in groups})
        deferrals = [entry.num_deferrals for entry in training.buffer.entries.values()]
        if isinstance(policy, PartialRollout):
            assert max(deferrals, default=0) <= policy.max_age
    waits = [left[entry_id] - entered[entry_id] for entry_id in entered]
    if isinstance(policy, Sorted):
        assert max(waits) < policy.num_batches
    if isinstance(policy, TailBatching):  # its queue is served in turn, and never holds much more than a batch
        assert max(waits) <= 2 * policy.num_groups + 2


@settings(max_examples=80)
@given(trainings)
def test_logprobs_of_their_time(training):
    training.run()
    rows = [(now, row) for now, groups in enumerate(training.trained) for g in groups for row in g.candidates]
    for now, row in rows:
        tokens = list(row.partial.tokens)
        assert tokens == list(range(len(tokens)))  # of one piece: the engine counts them
        assert list(row.partial.logprobs) == [-float(token) for token in tokens]
        assert sum(count for _, count in row.versions) == len(tokens)
        assert [version for version, _ in row.versions] == sorted({version for version, _ in row.versions})
        assert row.partial.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not training.buffer.keeps_tokens:
            assert [version for version, _ in row.versions] == [now]  # on-policy


@settings(max_examples=60)
@given(trainings, st.integers(0, 5))
def test_restored_as_saved(training, stop_at):
    for _ in range(min(stop_at, len(training.loader))):
        training.step()
    state, arrays = dump(training.buffer)
    learned = training.policy.state_dict()
    assert all(value.dtype != object for value in arrays.values())
    again = training.policy.buffer()
    load(again, json.loads(json.dumps(state)), arrays)
    assert again.entries == training.buffer.entries
    assert again.num_entered == training.buffer.num_entered
    policy = replace(training.policy)
    policy.load_state_dict(json.loads(json.dumps(learned)))
    other = Training(policy, 0, training.seed, training.settings.selection)
    other.buffer, other.loader, other.version = again, list(training.loader), training.version
    other.admission = training.admission
    taken = len(training.trained)
    expected = [(g.entry_id, g.candidates) for g in training.run()]
    done = sum(len(groups) for groups in training.trained[:taken])
    if training.settings.selection == "all":  # else the admission has learned in between
        assert [(g.entry_id, g.candidates) for g in other.run()] == expected[done:]


@settings(max_examples=40)
@given(trainings, st.integers(0, 5))
def test_a_rollout_under_way_is_saved_as_what_was_before_it(training, stop_at):
    def known() -> list:
        return [(e.state, e.num_deferrals, e.candidates) for e in map(at_rest, training.buffer.entries.values())]

    for _ in range(min(stop_at, len(training.loader))):
        training.step()
    plan = training.policy.next(training.buffer)
    before = known()
    training.policy.begin(training.buffer, plan, M, training.admission)
    assert known() == before


def test_a_long_round_follows_when_a_batch_is_deferred():
    training = Training(TailBatching(4, 1.25), 8, seed=3)
    plans = []
    begin = training.buffer.begin

    def watched(plan, *args):
        plans.append(plan)
        return begin(plan, *args)

    training.buffer.begin = watched
    training.run()
    assert [plan.long for plan in plans[:5]] == [False] * 4 + [True]
    assert [len(plan.entries) for plan in plans[:5]] == [5, 5, 5, 5, 4]
    assert all(entry.num_deferrals for entry in plans[4].entries)


def test_no_new_prompt_before_all_are_used():
    training = Training(Sorted(2, 3, True), 6, seed=5)
    seen = []
    while training.loader or len(training.buffer):
        before = training.buffer.num_entered
        used = sum(len(groups) for groups in training.trained)
        training.step()
        if training.buffer.num_entered > before:
            seen.append(used)
    assert seen == [0, 6]


def test_the_oldest_must_finish():
    policy = PartialRollout(1, 3.0, max_age=1)
    buffer = policy.buffer()
    enter(policy, buffer, [PromptInfo(i, 1) for i in range(4)])
    policy.begin(
        buffer, policy.next(buffer), M, ScheduleSettings("partial_rollout", num_generations=M).admission(None)
    )
    # One that never got a token too: where room is short, those that are expected to be short come last.
    for entry, state in zip(buffer.select(Lifecycle.IN_FLIGHT), ["partial", "partial", "waiting"], strict=True):
        entry.state, entry.num_deferrals = Lifecycle(state), 1
    assert policy.next(buffer).must_finish == {0, 1, 2}


def test_oversampling_is_rounded_up_but_not_by_rounding_errors():
    assert TailBatching(10, 1.1).lacking(TailBatching(10, 1.1).buffer()) == 11


def test_dropped_prompts_leave():
    training = Training(TailBatching(3, 2.0), 3, seed=1)
    rng = random.Random(7)
    keys = Counter()
    while training.loader or len(training.buffer):
        while training.policy.lacking(training.buffer) and training.loader:
            enter(training.policy, training.buffer, training.loader.pop(0))
        plan = training.policy.next(training.buffer)
        _, plans = training.policy.begin(training.buffer, plan, M, training.admission)
        scheduler = Scheduler(SchedulePolicies(batch_stop=plan.batch_stop), M, drop_failed_groups=True)
        ChaosEngine(rng.randrange(2**32), failure_rate=0.02).run(scheduler, plans)
        if scheduler.error is not None:
            pytest.skip("all were dropped at once")
        dropped = training.buffer.absorb(scheduler.result(), 0)
        taken = training.policy.take(training.buffer, plan, len(dropped))
        keys.update(entry.prompt.key for entry in [*dropped, *taken])
    assert keys == Counter(range(9))


@settings(max_examples=40)
@given(trainings, st.integers(0, 5))
def test_prompts_are_restored_without_their_answers(training, stop_at):
    """After a change of settings, with which what was sampled can't be used."""
    for _ in range(min(stop_at, len(training.loader))):
        training.step()
    again = training.policy.buffer()
    load(again, *dump(training.buffer), keeps_candidates=False)
    assert again.entries.keys() == training.buffer.entries.keys()
    for entry in again.entries.values():
        assert (entry.state, entry.candidates) == (Lifecycle.WAITING, [])


@settings(max_examples=80)
@given(st.integers(1, 4), st.sampled_from([1.5, 3.0]), st.lists(st.booleans(), max_size=40), st.integers(0, 2**32))
def test_uniform_groups_leave(size, most, teaches, seed):
    """Each prompt is judged and leaves once; a batch is full, or has taken as many prompts as it may, or all."""
    training = Training(DynamicSampling(size, most), 0, seed)
    buffer, waiting = training.buffer, [PromptInfo(key, 3) for key in range(len(teaches))]
    left: list[int] = []
    while waiting or len(buffer):
        sampled: set[int] = set()
        while True:
            num = training.policy.lacking(buffer)
            enter(training.policy, buffer, waiting[:num])
            del waiting[:num]
            plan = training.policy.next(buffer)
            if not plan.entries:
                break
            _, plans = training.policy.begin(buffer, plan, M, training.admission)
            scheduler = Scheduler(SchedulePolicies(batch_stop=plan.batch_stop), M)
            ChaosEngine(seed).run(scheduler, plans)
            buffer.absorb(scheduler.result(), 0)
            judged = {entry.entry_id: entry.prompt.key for entry in plan.entries}
            assert not sampled & judged.keys()
            sampled |= judged.keys()
            uniform = [entry_id for entry_id, key in judged.items() if not teaches[key]]
            training.policy.drop(buffer, uniform, len(judged))
            left += [judged[entry_id] for entry_id in uniform]
        assert len(sampled) <= most * size
        taken = training.policy.take(buffer, plan)
        assert len(taken) == size or len(sampled) == int(most * size) or not waiting
        assert 0 <= training.policy.informative_share <= 1
        left += [entry.prompt.key for entry in taken]
    assert Counter(left) == Counter(range(len(teaches)))


@given(st.integers(1, 512), st.floats(0.05, 1.0))
def test_prompts_that_are_likely_enough(num_groups, share):
    def left_over(num):
        return num * share - (num * share * (1 - share)) ** 0.5 - num_groups

    num = num_likely_enough(num_groups, share)
    assert num >= num_groups
    assert left_over(num + 0.5) >= -1e-6
    assert left_over(num - 0.5) <= 1e-6
    assert num_likely_enough(num_groups, 1 - 1e-9) == num_groups
    assert num_likely_enough(0, share) == 0
