"""Tests `balance`, and the order and engines of `AssignedPlacement`."""

import math
from collections import Counter

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from trl_darts.engines.in_process.share import MainLink
from trl_darts.policy import LengthTracker
from trl_darts.scheduling import (
    AssignedPlacement,
    Candidate,
    EngineLoad,
    GroupPlan,
    GroupSummary,
    LengthOrder,
    PromptInfo,
    SchedulePolicies,
    Scheduler,
    ScheduleSettings,
    Submit,
    UniformAdmission,
    balance,
)
from trl_darts.scheduling.placement import Homes


NAN = math.nan
TOLERANCE = 1 + 1e-9  # for sums of floats


@st.composite
def batches(draw) -> tuple[list[int], list[float], int]:
    """Draws candidates and expected lengths of prompts, and a number of engines."""
    counts = draw(st.lists(st.integers(1, 16), min_size=1, max_size=8))
    length = st.one_of(st.sampled_from([1.0, 8.0, 1000.0]), st.floats(1, 1e4))  # equal ones are common
    return counts, draw(st.lists(length, min_size=len(counts), max_size=len(counts))), draw(st.integers(1, 8))


@settings(max_examples=300)
@given(batches())
def test_each_candidate_has_one_engine_and_no_engine_has_none_or_much_more_than_its_fair_part(batch):
    counts, lengths, num_engines = batch
    engines = balance(counts, lengths, num_engines)
    assert [len(group) for group in engines] == counts
    loads: Counter[int] = Counter()
    for group, length in zip(engines, lengths, strict=True):
        loads.update({engine: number * length for engine, number in Counter(group).items()})
    assert loads.keys() <= set(range(num_engines))
    assert len(loads) == min(num_engines, sum(counts))
    fair = sum(count * length for count, length in zip(counts, lengths, strict=True)) / num_engines
    # Candidates that stay together are at most a fair share, rounded up to whole candidates.
    largest_piece = max(min(count * length, fair + length) for count, length in zip(counts, lengths, strict=True))
    assert max(loads.values()) <= (fair + largest_piece) * TOLERANCE


@settings(max_examples=300)
@given(batches())
@example(([4] * 6, [0.1] * 6, 3))  # sums of 0.1 are not exact
def test_a_group_of_at_most_a_fair_part_stays_whole(batch):
    counts, lengths, num_engines = batch
    fair = sum(count * length for count, length in zip(counts, lengths, strict=True)) / num_engines
    assume(max(lengths) <= fair)  # otherwise, one long answer fills an engine, and the others must use the rest
    for count, length, group in zip(counts, lengths, balance(counts, lengths, num_engines), strict=True):
        if count * length <= fair:
            assert len(set(group)) == 1


@pytest.mark.parametrize(
    ("counts", "lengths", "num_engines"), [([4, 4, 1], [1.0, 1.0, 1000.0], 4), ([1, 4, 2], [100.0, 10.0, 1.0], 5)]
)
def test_no_group_is_cut_more_than_it_takes_to_fill_the_engines(counts, lengths, num_engines):
    engines = balance(counts, lengths, num_engines)
    assert {engine for group in engines for engine in group} == set(range(num_engines))
    assert sum(len(set(group)) for group in engines) == num_engines  # each engine prefills one prompt


def test_longest_first_to_the_engine_with_the_least_work():
    # The fair share is 1400: the first group is split into two of 800. The last one is a tie, which goes to the first.
    assert balance([4, 4, 4, 4], [400.0, 100.0, 100.0, 100.0], 2) == [[0, 0, 1, 1], [0] * 4, [1] * 4, [0] * 4]
    # Shortest first would end at 5 + 9.
    assert balance([1, 1, 1, 1], [3.0, 5.0, 9.0, 7.0], 2) == [[0], [1], [0], [1]]
    # A group of five is split into two parts, the larger one first.
    assert balance([5, 1], [10.0, 10.0], 2) == [[0, 0, 0, 1, 1], [1]]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 5000), st.booleans()), min_size=1), st.integers(1, 8))
def test_unknown_lengths_are_the_mean_of_the_known(groups, num_engines):
    counts = [count for count, _, _ in groups]
    known = [length for _, length, hidden in groups if not hidden]
    mean = sum(known) / len(known) if known else 7.0
    filled = [mean if hidden else float(length) for _, length, hidden in groups]
    for nothing in (NAN, math.inf, 0.0, -1.0):
        lengths = [nothing if hidden else float(length) for _, length, hidden in groups]
        assert balance(counts, lengths, num_engines) == balance(counts, filled, num_engines)


def candidates(counts: list[int]) -> list[Candidate]:
    pairs = [(group, index) for group, count in enumerate(counts) for index in range(count)]
    return [Candidate(number, group, index) for number, (group, index) in enumerate(pairs)]


@settings(max_examples=100)
@given(batches(), st.booleans())
def test_order_is_by_expected_length_and_stable(batch, longest_first):
    counts, lengths, _ = batch
    batch_order = candidates(counts)
    ordered = LengthOrder(dict(enumerate(lengths)), longest_first).order(list(batch_order))
    expected = [lengths[c.group_id] for c in ordered]
    assert expected == sorted(expected, reverse=longest_first)
    for length in set(lengths):
        numbers = [c.candidate_id for c in ordered if lengths[c.group_id] == length]
        assert numbers == sorted(numbers)
    assert sorted(c.candidate_id for c in ordered) == [c.candidate_id for c in batch_order]


def test_scheduler_submits_each_candidate_to_its_engine():
    counts, lengths = [6, 4, 5], [10.0, 300.0, 40.0]
    engines = balance(counts, lengths, 3)
    engine_ids = {place: [str(engine) for engine in group] for place, group in enumerate(engines)}
    placement = AssignedPlacement(engine_ids, dict(enumerate(lengths)))
    plans = [GroupPlan(index, count) for index, count in enumerate(counts)]
    scheduler = Scheduler(SchedulePolicies(placement=placement), num_generations=4)
    commands = scheduler.start(plans, [EngineLoad(str(i)) for i in range(3)], now=0.0)
    assert all(isinstance(command, Submit) for command in commands)
    assert [c.group_id for c in commands] == [1] * 4 + [2] * 4 + [0] * 4 + [2, 0, 0]  # rows, then spare candidates
    assert {(c.group_id, c.index): c.engine_id for c in commands} == {
        (group, index): str(engine) for group, row in enumerate(engines) for index, engine in enumerate(row)
    }
    link = MainLink(Scheduler(SchedulePolicies(placement=placement), 4), plans, range(3))
    for engine, slots in enumerate(link.slots):
        assert [s.candidate_id for s in slots] == [c.candidate_id for c in commands if c.engine_id == str(engine)]


def test_candidates_that_were_never_started_say_nothing():
    tracker = LengthTracker(0.5)
    admission = UniformAdmission(2, tracker)
    admission.observe([GroupSummary(0, 7, [0, 0], ["abort"] * 2, [], 4)])
    assert math.isnan(admission.expected_lengths([PromptInfo(7, 4)])[0])
    admission.observe([GroupSummary(0, 7, [50, 0], ["stop", "abort"], [0], 4)])
    assert admission.expected_lengths([PromptInfo(7, 4)]) == [50]


def test_a_prompt_never_seen_is_expected_as_long_as_those_of_its_length():
    admission = UniformAdmission(2, LengthTracker(0.5))
    groups = [
        GroupSummary(i, i, [100 * tokens] * 2, ["stop"] * 2, [0, 1], tokens) for i, tokens in enumerate([4, 64] * 20)
    ]
    admission.observe(groups)
    short, long, seen = admission.expected_lengths([PromptInfo(98, 4), PromptInfo(99, 64), PromptInfo(0, 64)])
    assert short < 0.3 * long
    assert seen == 400  # its history counts, not its length
    restored = LengthTracker()
    restored.load_state_dict(admission.tracker.state_dict())
    assert UniformAdmission(2, restored).expected_lengths([PromptInfo(98, 4)]) == [short]


def test_prompts_never_seen_get_candidates_by_the_deviation_that_their_length_predicts():
    tracker = LengthTracker()
    for key, tokens in enumerate([4, 64] * 50):
        tracker.update(key, [10 * tokens, 20 * tokens, 30 * tokens], num_prompt_tokens=tokens)
    tracker.end_step()
    admission = ScheduleSettings(min_num_generations=8).admission(tracker)
    short, long = PromptInfo(1000, 4), PromptInfo(1001, 64)
    counts = admission.plan([short, long] * 8).num_candidates
    assert sum(counts) == 16 * 12
    assert min(counts[1::2]) > max(counts[::2])
    counts = admission.plan([PromptInfo(1000 + i, 16) for i in range(16)]).num_candidates
    assert counts == [12] * 16  # without differences


def placed(plans, engines, lengths=None):
    """Returns the engines of all candidates by group, if there is room."""
    lengths = lengths or [1.0] * len(plans)
    scheduler = Scheduler(SchedulePolicies(placement=LengthOrder(dict(enumerate(lengths)))), 1)
    homes: dict[int, list[str]] = {}
    for command in scheduler.start(plans, engines, now=0.0):
        homes.setdefault(command.group_id, []).append(command.engine_id)
    return homes


@settings(max_examples=300)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=12), st.integers(1, 4))
@example([6, 8, 14, 15, 13, 4, 15, 10, 10, 15, 14, 13], 3)
def test_candidates_of_a_prompt_share_an_engine_that_has_room(counts, num_engines):
    """A prompt uses a second engine only if the first one has its fair share of all candidates."""
    engines = [EngineLoad(str(i)) for i in range(num_engines)]
    homes = placed([GroupPlan(i, count) for i, count in enumerate(counts)], engines)
    loads = Counter(engine for group in homes.values() for engine in group)
    fair = sum(counts) // num_engines
    if max(counts) * num_engines <= fair:  # an engine is full once, and what is beyond is spread one by one
        rest = sum(counts) % num_engines
        assert sum(len(set(group)) - 1 for group in homes.values()) <= num_engines + rest
    assert max(loads.values()) <= max(fair, 1) + max(counts)
    assert len(loads) == min(num_engines, sum(counts))


def test_a_prompt_goes_on_elsewhere_when_its_engine_is_full():
    homes = placed([GroupPlan(0, 4), GroupPlan(1, 4)], [EngineLoad("a", 3), EngineLoad("b", 4)])
    assert homes == {0: ["a", "a", "a", "b"], 1: ["b", "b", "b"]}


TURNS = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), min_size=1, max_size=4)),
    max_size=40,
)


@given(TURNS)
def test_a_conversation_stays_where_its_beginning_is(turns):
    """Unless its server is full, or has over twice as many turns as another. A turn: conversation, loads, slots."""
    placement, homes = Homes(5), {}
    for number, (conversation, servers) in enumerate(turns):
        engines = [EngineLoad(str(i), slots, running) for i, (running, slots) in enumerate(servers)]
        candidate = Candidate(number, 5 * number + conversation, 0)
        chosen = placement.choose(candidate, engines)
        placement.forget([candidate.group_id])
        free = {engine.engine_id: engine.num_running for engine in engines if engine.has_room}
        if not free:
            assert chosen is None
            continue
        home = homes.get(conversation)
        if home in free and free[home] <= 2 * min(free.values()) + 1:
            assert chosen == home
        else:
            assert free[chosen] == min(free.values())
        homes[conversation] = chosen
