"""
Waits that are bounded, and bubbles that are filled, against cases by hand; and that leaving out the reports that
decide nothing changes no decision.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.given import SECOND_PER_TOKEN
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import (
    BubbleFilling,
    DualEnd,
    GroupPlan,
    SchedulePolicies,
    Scheduler,
    UniformPool,
    make_policies,
)
from trl_darts.analysis.simulation import ENDLESS, ClusterSpec, SimulatedCluster


M, M_UP = 2, 4


def run(lengths, policies, counts=None, limit=10_000, spec=None):
    counts = counts or [len(own) for own in lengths]
    plans = [GroupPlan(index, count, num_prompt_tokens=3) for index, count in enumerate(counts)]
    cluster = SimulatedCluster(spec or ClusterSpec(SECOND_PER_TOKEN))
    return cluster.run(Scheduler(policies, M), plans, lengths, limit)


def auto(refill=None) -> SchedulePolicies:
    return replace(make_policies("darts", M, M_UP, 1, long_end_patience="auto"), refill=refill)


def test_auto_ends_with_the_second_complete_candidate_of_the_last_group():
    """The second group has two at 70. Until then the first one's third goes on: had it ended by 70, it would count."""
    result = run([[10, 20, 500], [30, 70, 400]], auto())
    assert result.timeline.times[-1] == 70.0
    assert [group.selected for group in result.groups] == [[0, 1], [0, 1]]
    assert [group.candidates[2].length for group in result.groups] == [70, 70]
    result = run([[10, 20, 60], [30, 70, 400]], auto())
    assert result.timeline.times[-1] == 70.0
    assert result.groups[0].selected == [0, 2]  # both ends, the long one was in time


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(1, 300), min_size=M, max_size=M_UP), min_size=1, max_size=6))
def test_auto_ends_exactly_when_the_last_group_has_enough(lengths):
    result = run(lengths, auto())
    assert result.timeline.times[-1] == max(sorted(own)[M - 1] for own in lengths)


# Four groups that end by 400, and one whose second candidate never does. Its third would have 150 tokens.
WAITING = [[20, 200], [30, 300], [40, 400], [60, 350], [100, ENDLESS, 150]]


def test_a_bubble_is_filled_when_one_slot_is_free_and_ends_the_wait():
    """At 400 one candidate runs and two cost the same: the third is added, ends at 550, and the group has its two."""
    counts = [2] * 5
    without = run(WAITING, auto(), counts)
    filled = run(WAITING, auto(BubbleFilling(num_slots=2, max_num_generations=3)), counts)
    assert without.timeline.times[-1] == 10_000.0
    assert filled.timeline.times[-1] == 550.0
    third = filled.groups[4].candidates[2]
    assert (third.started, third.length) == (400.0, 150)
    assert filled.groups[4].selected == [0, 2]
    assert [len(group.candidates) for group in filled.groups] == [2, 2, 2, 2, 3]


def test_without_room_nothing_is_added():
    result = run(WAITING, auto(BubbleFilling(num_slots=1, max_num_generations=3)), [2] * 5)
    assert [len(group.candidates) for group in result.groups] == [2] * 5


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 3))
def test_candidates_are_added_only_below_the_knee(seed, num_slots, num_engines):
    lengths = random_lengths(seed, num_groups=8)
    policies = auto(BubbleFilling(num_slots, M_UP))
    result = run(lengths, policies, [M] * 8, 2_000, ClusterSpec(SECOND_PER_TOKEN, num_engines))
    for group in result.groups:
        assert M <= len(group.candidates) <= M_UP
        for candidate in group.candidates[M:]:
            assert candidate.started > 0
    changes = list(pairwise(result.timeline.running))
    assert all(after <= max(before, num_slots) for before, after in changes)
    assert result.timeline.times[-1] <= run(lengths, auto(), [M] * 8, 2_000).timeline.times[-1]


class Talkative(DualEnd):
    """Another policy, as far as the simulator knows: it hears every report."""

    def surplus(self, group):
        return super().surplus(group)


class TalkativePool(Talkative, UniformPool):
    """As above, with the other selection."""


@dataclass
class TalkativeFilling(BubbleFilling):
    """As above, for a refill."""

    def extra(self, groups, num_open):
        return super().extra(groups, num_open)


def random_lengths(seed: int, num_groups: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return np.maximum(1, rng.lognormal(4.0, 1.0, (num_groups, M_UP)).astype(int)).tolist()


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1.3, 2.0, "auto"]),
    st.sampled_from([None, 1, 3, 8]),
    st.booleans(),
    st.sampled_from([{}, {"max_num_seqs": 3}, {"kv_tokens": 400}, {"prefill_seconds_per_token": 0.3}]),
)
def test_what_is_left_out_decides_nothing(seed, patience, num_slots, uniform, limits):
    lengths = random_lengths(seed, num_groups=8)
    counts = [M if num_slots else M + seed % (index + 2) % 3 for index in range(8)]
    spec = ClusterSpec(LatencyCurve([1, 4, 16], [1.0, 1.25, 2.0]), **limits)
    some, every = (UniformPool, TalkativePool) if uniform else (DualEnd, Talkative)
    results = []
    for stop, filling in ((some, BubbleFilling), (every, TalkativeFilling)):
        refill = filling(num_slots, M_UP) if num_slots else None
        policies = SchedulePolicies(group_stop=stop(M, M_UP, 1, True, patience), refill=refill)
        results.append(run(lengths, policies, counts, 1_000, spec))
    few, all_of_them = results
    assert outcome(few) == outcome(all_of_them)
    assert few.timeline.times[-1] == pytest.approx(all_of_them.timeline.times[-1])


def outcome(result) -> list:
    return [(g.selected, [(c.length, c.finish_reason) for c in g.candidates]) for g in result.groups]


def test_a_bounded_wait_needs_few_reports():
    """Of 1,000 tokens there would be 62 reports; one is heard, beyond the bound."""
    heard = []

    class Listening(Scheduler):
        def handle(self, event):
            heard.append(type(event).__name__)
            return super().handle(event)

    policies = make_policies("darts", M, M_UP, 1, long_end_patience=10.0)
    scheduler = Listening(policies, M)
    SimulatedCluster(ClusterSpec(SECOND_PER_TOKEN)).run(scheduler, [GroupPlan(0, 3)], [[90, 100, ENDLESS]], 10_000)
    assert heard == ["CandidateEnded", "CandidateEnded", "TokensArrived", "CandidateEnded"]
