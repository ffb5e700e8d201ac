"""Rollouts in virtual time against a simulation token by token, the closed form, and cases computed by hand."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.analysis.simulation.builders import SECOND_PER_TOKEN, end_of, outcome
from tests.analysis.simulation.oracle import token_by_token
from tests.policies import make_policies
from trl_darts.analysis.simulation import ENDLESS, ClusterSpec, SimulatedCluster
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve, rollout_time
from trl_darts.scheduling import (
    CandidateState,
    DualEnd,
    GroupPlan,
    SchedulePolicies,
    Scheduler,
    ScheduleSettings,
    UniformPool,
)


CURVE = LatencyCurve([1, 4, 16], [1.0, 1.25, 2.0])
M, M_UP = 2, 4


def scheduler_of(schedule: str, **fields) -> Scheduler:
    return Scheduler(make_policies(schedule, M, **fields), M)


def run(lengths, limit=10_000, schedule="darts", spec=None, prompt_tokens=0, **fields):
    plans = [GroupPlan(i, len(own), num_prompt_tokens=prompt_tokens) for i, own in enumerate(lengths)]
    return SimulatedCluster(spec or ClusterSpec(SECOND_PER_TOKEN)).run(
        scheduler_of(schedule, **fields), plans, lengths, limit
    )


def lengths_of_groups(most: int = M_UP, longest: int = 40):
    groups = st.lists(st.lists(st.integers(1, longest), min_size=M, max_size=most), min_size=1, max_size=6)
    return groups


@settings(max_examples=150, deadline=None)
@given(lengths_of_groups(), st.integers(1, 40), st.sampled_from([None, 1, 2, 5]), st.booleans())
def test_as_token_by_token(lengths, limit, max_num_seqs, tail_pruning):
    plans = [GroupPlan(i, len(own)) for i, own in enumerate(lengths)]
    scheduler = scheduler_of("darts", tail_pruning=tail_pruning)
    expected = token_by_token(scheduler, plans, lengths, limit, CURVE, max_num_seqs)
    result = run(lengths, limit, spec=ClusterSpec(CURVE, max_num_seqs=max_num_seqs), tail_pruning=tail_pruning)
    assert outcome(result) == outcome(expected)
    assert end_of(result) == pytest.approx(end_of(expected))


@settings(max_examples=100, deadline=None)
@given(lengths_of_groups(most=M), st.integers(1, 40), st.integers(1, 3))
def test_without_limits_the_time_is_the_slowest_engines_closed_form(lengths, limit, num_engines):
    """Eq. 4 per engine; GRPO puts candidates on engines in turn."""
    result = run(lengths, limit, "grpo", ClusterSpec(CURVE, num_engines))
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    for group in result.groups:
        for candidate in group.candidates:
            shares[int(candidate.engine_id)].append(candidate.length)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert end_of(result) == pytest.approx(max(rollout_time(share, CURVE) for share in shares))


@settings(max_examples=100, deadline=None)
@given(
    lengths_of_groups(),
    st.integers(1, 40),
    st.builds(
        ClusterSpec,
        st.just(CURVE),
        st.integers(1, 3),
        kv_tokens=st.integers(10, 120),
        prefill_seconds_per_token=st.floats(0.0, 0.5),
    ),
    st.sampled_from([None, 1.5]),
)
def test_whatever_the_limits_each_candidate_ends_with_its_own_length(lengths, limit, spec, patience):
    result = run(lengths, limit, spec=spec, prompt_tokens=5, long_end_patience=patience)
    for group in result.groups:
        for candidate, own in zip(group.candidates, lengths[group.plan.group_id], strict=True):
            if candidate.state is CandidateState.FINISHED:
                assert candidate.length == min(own, limit)
            else:
                assert candidate.length <= min(own, limit)
    assert all(a <= b for a, b in pairwise(result.timeline.times))


def test_a_cache_that_overflows_preempts_the_youngest_and_computes_it_anew():
    """Two of 10 tokens and prompts of 5 need 30 slots at the end. With 24, the second is sent back after 7 steps."""

    def seconds(**limits) -> float:
        return end_of(run([[10, 10]], 99, "grpo", ClusterSpec(SECOND_PER_TOKEN, **limits), prompt_tokens=5))

    assert seconds() == 10.0
    # 7 steps of both, 3 of the first alone, then the 3 that the second still lacks
    assert seconds(kv_tokens=24) == 13.0
    # one prompt at the start (5 × 0.5 s), and the 7 tokens that the second had
    assert seconds(kv_tokens=24, prefill_seconds_per_token=0.5) == 13.0 + 2.5 + 3.5


def test_prompts_are_prefilled_once_per_engine():
    spec = ClusterSpec(SECOND_PER_TOKEN, prefill_seconds_per_token=0.1)
    assert end_of(run([[5, 5]] * 3, 99, "grpo", spec, prompt_tokens=10)) == pytest.approx(3 * 10 * 0.1 + 5)


@settings(max_examples=100, deadline=None)
@given(lengths_of_groups(longest=300))
def test_auto_ends_exactly_when_the_last_group_has_enough(lengths):
    result = run(lengths, long_end_patience="auto")
    assert result.timeline.times[-1] == max(sorted(own)[M - 1] for own in lengths)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=M, max_size=M_UP), st.sampled_from([None, "auto", 3.0]))
def test_shortest_only_waits_for_nothing_that_it_can_not_keep(lengths, patience):
    """Whatever the patience: a candidate that is as long as the M-th shortest complete one is never kept."""
    policies = make_policies("darts", M, num_longest=0, tail_pruning=False, long_end_patience=patience)
    cluster = SimulatedCluster(ClusterSpec(SECOND_PER_TOKEN))
    result = cluster.run(Scheduler(policies, M), [GroupPlan(0, len(lengths))], [lengths], 999)
    shortest = sorted(lengths)[:M]
    assert sorted(len(row.tokens) for row in result.groups[0].rows) == shortest
    assert end_of(result) <= shortest[-1] + 16  # engines report every 16 tokens


def test_a_bounded_wait_aborts_within_a_report_of_the_bound_and_needs_no_other_report():
    """Of 220 tokens there would be 13 reports; the scheduler gets one, beyond the bound."""
    handled = []

    class Listening(Scheduler):
        def handle(self, event):
            handled.append(type(event).__name__)
            return super().handle(event)

    scheduler = Listening(make_policies("darts", M, long_end_patience=2.0), M)
    cluster = SimulatedCluster(ClusterSpec(SECOND_PER_TOKEN))
    (group,) = cluster.run(scheduler, [GroupPlan(0, 3)], [[100, 110, ENDLESS]], 10_000).groups
    assert group.selected == [0, 1]
    assert 220 <= group.candidates[2].length <= 220 + 16
    assert handled == ["CandidateEnded", "CandidateEnded", "TokensArrived", "CandidateEnded"]


class Talkative(DualEnd):
    """A policy that the simulator does not know, so it gets every report."""

    def surplus(self, group):
        return super().surplus(group)


class TalkativePool(Talkative, UniformPool):
    """As above, with the other selection."""


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1.3, 2.0]),
    st.sampled_from([(DualEnd, Talkative), (UniformPool, TalkativePool)]),
    st.sampled_from([{}, {"max_num_seqs": 3}, {"kv_tokens": 400}, {"prefill_seconds_per_token": 0.3}]),
)
@example(128657533, 2.0, (DualEnd, Talkative), {"kv_tokens": 400})  # full but for a rounding error
def test_reports_that_are_left_out_decide_nothing(seed, patience, stops, limits):
    lengths = np.maximum(1, np.random.default_rng(seed).lognormal(4.0, 1.0, (8, M_UP)).astype(int)).tolist()
    plans = [GroupPlan(index, M + seed % (index + 2) % 3, num_prompt_tokens=3) for index in range(8)]
    few, all_of_them = (
        SimulatedCluster(ClusterSpec(CURVE, **limits)).run(
            Scheduler(SchedulePolicies(group_stop=stop(M, M_UP, 1, True, patience)), M), plans, lengths, 1_000
        )
        for stop in stops
    )
    assert outcome(few) == outcome(all_of_them)
    assert few.timeline.times[-1] == pytest.approx(all_of_them.timeline.times[-1])


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_tokens", -1), ("prefill_seconds_per_token", float("nan")), ("seconds_per_request", -1.0)],
)
def test_clusters_that_can_not_be(field, value):
    with pytest.raises(ConfigurationError, match=rf"`{field}` \({value}\)"):
        ClusterSpec(CURVE, **{field: value})


def with_tail(switch_seconds: float = 0.0, prefill: float = 0.0) -> ClusterSpec:
    """Two engines that take a second per token, and one that takes half of it for up to two sequences."""
    tail = ClusterSpec(LatencyCurve([2, 4], [0.5, 3.0]), prefill_seconds_per_token=prefill)
    return ClusterSpec(SECOND_PER_TOKEN, 2, tail=tail, switch_seconds=switch_seconds)


def run_with_tail(lengths, spec, switch_at=None):
    settings = ScheduleSettings("grpo", M, tail_switch_at=switch_at)
    scheduler = Scheduler(settings.policies(tail=spec.tail_servers(10_000)), M)
    plans = [GroupPlan(i, len(own), num_prompt_tokens=5) for i, own in enumerate(lengths)]
    return SimulatedCluster(spec).run(scheduler, plans, lengths, 10_000)


def test_what_is_left_goes_on_on_the_tails_engines():
    lengths = [[100, 1000], [100, 700]]
    result = run_with_tail(lengths, with_tail(), switch_at=2)
    # 100 s together, then 600 tokens of both and 300 of one.
    assert end_of(result) == pytest.approx(100 + 0.5 * 900)
    assert [row.length for group in result.groups for row in group.rows] == [100, 1000, 100, 700]
    assert result.tail_switch.num_moved == 2
    assert result.tail_switch.num_tokens == 2 * (5 + 100)
    asleep = run_with_tail(lengths, with_tail(switch_seconds=30.0), switch_at=2)
    assert end_of(asleep) == pytest.approx(30 + end_of(result))
    reading = run_with_tail(lengths, with_tail(prefill=0.1), switch_at=2)
    assert end_of(reading) == pytest.approx(end_of(result) + 0.1 * 2 * (100 + 5))


def test_a_switch_is_predicted_to_pay_where_it_does(rng):
    heavy = np.exp(5 + rng.standard_normal((8, M))).astype(int).tolist()
    better = end_of(run_with_tail(heavy, with_tail()))
    assert better < 0.8 * end_of(run_with_tail(heavy, with_tail(), switch_at=0))
    never = run_with_tail(heavy, with_tail(switch_seconds=10_000.0))
    assert never.tail_switch is None
    equal = np.linspace(290, 300, 8 * M).astype(int).reshape(8, M).tolist()
    assert end_of(run_with_tail(equal, with_tail())) <= 301
