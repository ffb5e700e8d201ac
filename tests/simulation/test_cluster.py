"""Rollouts in virtual time against a simulation token by token, and against the closed form."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.oracle import token_by_token
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve, rollout_time
from trl_darts.scheduling import CandidateState, GroupPlan, Scheduler, make_policies
from trl_darts.analysis.simulation import ENDLESS, ClusterSpec, SimulatedCluster


CURVE = LatencyCurve([1, 4, 16], [1.0, 1.25, 2.0])
M, M_UP = 2, 4


def scheduler_of(schedule: str, **kwargs) -> Scheduler:
    return Scheduler(make_policies(schedule, M, M_UP if schedule == "darts" else M, 1, **kwargs), M)


def end_of(result) -> float:
    assert result.timeline.running[-1] == 0
    return result.timeline.times[-1]


def outcome(result) -> list:
    return [(g.selected, [(c.length, c.finish_reason) for c in g.candidates]) for g in result.groups]


@st.composite
def workloads(draw, schedule: str = "darts"):
    counts = draw(st.lists(st.integers(M, M_UP if schedule == "darts" else M), min_size=1, max_size=6))
    lengths = [draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)) for n in counts]
    plans = [GroupPlan(i, n, num_prompt_tokens=draw(st.integers(0, 9))) for i, n in enumerate(counts)]
    return plans, lengths, draw(st.integers(1, 40))


@settings(max_examples=300, deadline=None)
@given(workloads(), st.sampled_from([None, 1, 2, 5]), st.booleans())
def test_as_token_by_token(workload, max_num_seqs, tail_pruning):
    plans, lengths, limit = workload
    expected = token_by_token(
        scheduler_of("darts", tail_pruning=tail_pruning), plans, lengths, limit, CURVE, max_num_seqs
    )
    cluster = SimulatedCluster(ClusterSpec(CURVE, max_num_seqs=max_num_seqs))
    result = cluster.run(scheduler_of("darts", tail_pruning=tail_pruning), plans, lengths, limit)
    assert outcome(result) == outcome(expected)
    assert end_of(result) == pytest.approx(end_of(expected))


@settings(max_examples=200, deadline=None)
@given(workloads("grpo"), st.integers(1, 3))
def test_without_limits_the_time_is_the_slowest_engines_closed_form(workload, num_engines):
    """Eq. 4 per engine; GRPO puts candidates on engines in turn."""
    plans, lengths, limit = workload
    cluster = SimulatedCluster(ClusterSpec(CURVE, num_engines))
    result = cluster.run(scheduler_of("grpo"), plans, lengths, limit)
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    for group in result.groups:
        for candidate in group.candidates:
            shares[int(candidate.engine_id)].append(candidate.length)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert end_of(result) == pytest.approx(max(rollout_time(share, CURVE) for share in shares))


@settings(max_examples=200, deadline=None)
@given(workloads(), st.integers(1, 3), st.integers(10, 120), st.floats(0.0, 0.5), st.sampled_from([None, 1.5]))
def test_whatever_the_limits_each_candidate_ends_with_its_own_length(
    workload, num_engines, kv_tokens, prefill, patience
):
    plans, lengths, limit = workload
    spec = ClusterSpec(CURVE, num_engines, kv_tokens=kv_tokens, prefill_seconds_per_token=prefill)
    result = SimulatedCluster(spec).run(scheduler_of("darts", long_end_patience=patience), plans, lengths, limit)
    for group in result.groups:
        for candidate, own in zip(group.candidates, lengths[group.plan.group_id], strict=True):
            if candidate.state is CandidateState.FINISHED:
                assert candidate.length == min(own, limit)
            else:
                assert candidate.length <= min(own, limit)
    times = result.timeline.times
    assert all(a <= b for a, b in pairwise(times))


def test_a_cache_that_overflows_preempts_the_youngest_and_computes_it_anew():
    """Two of 10 tokens and prompts of 5 need 30 slots at the end. With 24, the second is sent back after 7 steps."""
    plans, lengths = [GroupPlan(0, 2, num_prompt_tokens=5)], [[10, 10]]
    constant = LatencyCurve([1], [1.0])

    def seconds(**limits) -> float:
        return end_of(SimulatedCluster(ClusterSpec(constant, **limits)).run(scheduler_of("grpo"), plans, lengths, 99))

    assert seconds() == 10.0
    # 7 steps of both, 3 of the first alone, then the 3 that the second still lacks
    assert seconds(kv_tokens=24) == 13.0
    # one prompt at the start (5 × 0.5 s), and the 7 tokens that the second had
    assert seconds(kv_tokens=24, prefill_seconds_per_token=0.5) == 13.0 + 2.5 + 3.5


def test_prompts_are_prefilled_once_per_engine():
    plans = [GroupPlan(i, 2, num_prompt_tokens=10) for i in range(3)]
    spec = ClusterSpec(LatencyCurve([1], [1.0]), prefill_seconds_per_token=0.1)
    result = SimulatedCluster(spec).run(scheduler_of("grpo"), plans, [[5, 5]] * 3, 99)
    assert end_of(result) == pytest.approx(3 * 10 * 0.1 + 5)


def test_bounded_wait_aborts_within_a_report_of_the_bound():
    plans, lengths = [GroupPlan(0, 3)], [[100, 110, ENDLESS]]
    result = SimulatedCluster(ClusterSpec(CURVE)).run(
        scheduler_of("darts", long_end_patience=2.0), plans, lengths, 10_000
    )
    (group,) = result.groups
    assert group.selected == [0, 1]
    assert 220 <= group.candidates[2].length <= 220 + 16


def test_less_work_is_never_slower_and_more_engines_are_never_slower():
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(4, 1, (40, M)).astype(int))
    plans = [GroupPlan(i, M) for i in range(40)]
    ends = [
        end_of(SimulatedCluster(ClusterSpec(CURVE, n)).run(scheduler_of("grpo"), plans, lengths.tolist(), 999))
        for n in (1, 2, 4, 8)
    ]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_engines": 0}, r"`num_engines` \(0\)"),
        ({"max_num_seqs": 0}, r"`max_num_seqs` \(0\)"),
        ({"kv_tokens": -1}, r"`kv_tokens` \(-1\)"),
        ({"prefill_seconds_per_token": float("nan")}, r"`prefill_seconds_per_token` \(nan\)"),
    ],
)
def test_clusters_that_can_not_be(fields, words):
    with pytest.raises(ConfigurationError, match=words):
        ClusterSpec(CURVE, **fields)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=M, max_size=M_UP), st.sampled_from([None, "auto", 3.0]))
def test_shortest_only_waits_for_nothing_that_it_can_not_keep(lengths, patience):
    """Whatever the patience: a candidate that is as long as the M-th shortest complete one is never kept."""
    constant = ClusterSpec(LatencyCurve([1], [1.0]))
    policies = make_policies("darts", M, M_UP, 0, tail_pruning=False, long_end_patience=patience)
    scheduler = Scheduler(policies, M)
    result = SimulatedCluster(constant).run(scheduler, [GroupPlan(0, len(lengths))], [lengths], 999)
    (group,) = result.groups
    shortest = sorted(lengths)[:M]
    assert sorted(len(row.tokens) for row in group.rows) == shortest
    assert end_of(result) <= shortest[-1] + 16  # engines report every 16 tokens
