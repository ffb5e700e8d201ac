"""Conversations with tools in virtual time: what they decode and how long they take, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.simulation.builders import SECOND_PER_TOKEN, GivenLengths, InOrder, end_of, outcome
from tests.policies import make_policies
from trl_darts.analysis.simulation import (
    ClusterSpec,
    LogNormalLengths,
    SimulatedCluster,
    SimulatedTraining,
    ToolCalls,
    Workload,
)
from trl_darts.analysis.simulation.conversations import VirtualConversations
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import CandidateState, GroupPlan, Scheduler, ScheduleSettings


M = 2


def run(lengths, calls, schedule="grpo", spec=None, limit=10_000, **fields):
    """`calls` are those of each candidate, by group and place."""
    plans = [GroupPlan(i, len(own)) for i, own in enumerate(lengths)]
    scheduler = Scheduler(make_policies(schedule, M, **fields), M)
    cluster = SimulatedCluster(spec or ClusterSpec(SECOND_PER_TOKEN))

    def make(*args):
        return VirtualConversations(*args, calls_of=lambda group, place, length: list(calls.get((group, place), [])))

    return cluster.rollout(make, scheduler, plans, lengths, limit).run()


def test_by_hand():
    """A token takes a second. The first conversation decodes 3, waits for 10, and decodes 2; the other decodes 8."""
    result = run([[5, 8]], {(0, 0): [(3, 10.0)]})
    ends = {c.index: c.ended for c in result.groups[0].candidates}
    assert ends == {0: 15.0, 1: 8.0}
    assert [c.length for c in result.groups[0].candidates] == [5, 8]


def test_who_waits_for_a_tool_leaves_room():
    """Where one sequence decodes at a time, another decodes meanwhile."""
    spec = ClusterSpec(SECOND_PER_TOKEN, max_num_seqs=1)
    ends = {c.index: c.ended for c in run([[4, 3]], {(0, 0): [(2, 3.0)]}, spec=spec).groups[0].candidates}
    assert ends == {0: 7.0, 1: 5.0}


def test_a_turn_needs_no_prefill_of_what_is_cached():
    spec = ClusterSpec(SECOND_PER_TOKEN, prefill_seconds_per_token=1.0)
    result = run([[4, 1]], {(0, 0): [(2, 3.0)]}, spec=spec)
    assert end_of(result) == 7.0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=M, max_size=4), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(["grpo", "darts"]),
    st.integers(0, 2**31),
)
def test_invariants(lengths, num_engines, max_num_seqs, schedule, seed):
    tools = ToolCalls(2.0, 3.0)
    lengths = [own[:M] for own in lengths] if schedule == "grpo" else lengths
    calls = {
        (group, place): tools.draw(length, (seed, group, place))
        for group, own in enumerate(lengths)
        for place, length in enumerate(own)
    }
    spec = ClusterSpec(LatencyCurve([1, 16], [1.0, 2.0]), num_engines, max_num_seqs=max_num_seqs)
    result = run(lengths, calls, schedule, spec)
    for group in result.groups:
        for candidate in group.candidates:
            key = group.plan.group_id, candidate.index
            assert candidate.length <= lengths[key[0]][key[1]]
            if candidate.state is CandidateState.FINISHED:
                assert candidate.length == lengths[key[0]][key[1]]
                alone = candidate.length + sum(seconds for _, seconds in calls[key])
                assert candidate.ended >= alone - 1e-6
    if schedule == "grpo":
        assert all(c.state is CandidateState.FINISHED for group in result.groups for c in group.candidates)
        without = run(lengths, {}, schedule, spec)
        assert [kept for kept, _ in outcome(result)] == [kept for kept, _ in outcome(without)]


@given(st.integers(1, 200), st.integers(0, 1000))
def test_calls(length, seed):
    calls = ToolCalls(3.0).draw(length, (seed,))
    places = [place for place, _ in calls]
    assert places == sorted(set(places))
    assert all(0 < place < length for place in places)
    assert all(seconds > 0 for _, seconds in calls)


def test_their_mean():
    drawn = [ToolCalls(3.0, 2.0).draw(1000, (seed,)) for seed in range(2000)]
    assert np.mean([len(own) for own in drawn]) == pytest.approx(3, rel=0.05)
    assert np.median([seconds for own in drawn for _, seconds in own]) == pytest.approx(2, rel=0.05)


def test_a_training():
    """Slow tools make steps slower, and spare candidates gain more."""
    seconds = {}
    for mean_calls in (0.0, 4.0):
        for schedule in ("grpo", "darts"):
            tools = ToolCalls(mean_calls, 5.0) if mean_calls else None
            workload = Workload(LogNormalLengths(64, 200.0), 16, 4096, tools=tools)
            own = ScheduleSettings(schedule=schedule, num_generations=8)
            run = SimulatedTraining(workload, own, ClusterSpec(LatencyCurve([1, 128], [0.01, 0.02]))).run(4)
            seconds[mean_calls, schedule] = sum(run.rollout_seconds)
    assert seconds[4.0, "grpo"] > seconds[0.0, "grpo"]
    gain, gain_without = (seconds[calls, "grpo"] / seconds[calls, "darts"] for calls in (4.0, 0.0))
    assert gain > gain_without > 1


def test_what_is_refused():
    workload = InOrder(GivenLengths([[1, 2]] * 2), 2, 100, tools=ToolCalls(1.0))
    for fields in ({"schedule": "tail_batching"}, {"schedule": "grpo", "rollout_ahead": 1}):
        with pytest.raises(ConfigurationError, match=r"`tools` of a workload are not simulated with"):
            SimulatedTraining(workload, ScheduleSettings(num_generations=2, **fields), ClusterSpec(SECOND_PER_TOKEN))
    with pytest.raises(ConfigurationError, match=r"`mean_calls` \(-1\) must be finite and not negative"):
        ToolCalls(-1)
