"""Tests the invariants of `trl_darts/scheduling/scheduler.py` under the names in its docstring."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies import make_policies
from tests.scheduling.chaos import ChaosEngine
from trl_darts.errors import GenerationError
from trl_darts.policy import EngineTimes, LatencyCurve, TailTimes
from trl_darts.scheduling import (
    Abort,
    CandidateEnded,
    CandidateState,
    FirstGroups,
    GroupPlan,
    PartialCandidate,
    Scheduler,
    Submit,
    TailPolicy,
    TailServers,
    TakeTurns,
)
from trl_darts.scheduling.types import FINAL_STATES


NUM_GENERATIONS, MAX_NUM_GENERATIONS = 3, 6


@st.composite
def rollouts(draw) -> dict:
    schedule = draw(st.sampled_from(["grpo", "darts"]))
    highest = NUM_GENERATIONS if schedule == "grpo" else MAX_NUM_GENERATIONS
    counts = draw(st.lists(st.integers(NUM_GENERATIONS, highest), min_size=1, max_size=5))
    resumed = draw(st.booleans())
    return {
        "schedule": schedule,
        "max_num_generations": MAX_NUM_GENERATIONS,
        "long_end_patience": draw(st.sampled_from([None, 1.0, 1.5, "auto"])),
        "selection": draw(st.sampled_from(["dual_end", "uniform"])) if schedule == "darts" else "all",
        "tail_pruning": draw(st.booleans()),
        "num_longest": draw(st.integers(0, NUM_GENERATIONS - 1)),
        "plans": [
            GroupPlan(i, n, resumed=(PartialCandidate((0, 1), (-0.0, -1.0)),) if resumed else ())
            for i, n in enumerate(counts)
        ],
        "first_groups": draw(st.sampled_from([None, 1, 2])),
        "seed": draw(st.integers(0, 2**32)),
        "num_engines": draw(st.integers(1, 3)),
        "num_tail_engines": draw(st.integers(0, 2)),
        "takes_turns": draw(st.booleans()),
        "switch_at": draw(st.sampled_from([None, 0, 1, 4, 100])),
        "long_groups": draw(st.sampled_from([frozenset(), frozenset({0})])),
    }


def new_engine(rollout: dict, **fields) -> ChaosEngine:
    names = ("seed", "num_engines", "num_tail_engines", "takes_turns")
    return ChaosEngine(**{name: rollout[name] for name in names}, **fields)


def tail_policy(rollout: dict) -> TailPolicy:
    """Returns times for which predicted switches often pay: the tail is three times as fast."""
    main, tail = (EngineTimes(LatencyCurve([1, 8], [ms, 2 * ms])) for ms in (0.03, 0.01))
    servers = TailServers(TailTimes(main, tail), 40, rollout["takes_turns"])
    long_groups = frozenset() if rollout["takes_turns"] else rollout["long_groups"]
    return TailPolicy(servers, rollout["switch_at"], long_groups)


def new_scheduler(rollout: dict, drop_failed_groups: bool = False, carries_tokens: bool = True) -> Scheduler:
    fields = {}
    if rollout["schedule"] == "darts":
        names = ("max_num_generations", "tail_pruning", "long_end_patience", "selection")
        names += ("num_longest",) * (rollout["selection"] == "dual_end")
        fields = {name: rollout[name] for name in names}
    policies = make_policies(
        rollout["schedule"],
        NUM_GENERATIONS,
        **fields,
        batch_stop=rollout["first_groups"] and FirstGroups(rollout["first_groups"]),
        tail=tail_policy(rollout) if rollout["num_tail_engines"] else None,
    )
    return Scheduler(policies, NUM_GENERATIONS, drop_failed_groups, carries_tokens)


def num_accounted(scheduler: Scheduler, engine: ChaosEngine) -> int:
    return sum(engine.ends.values()) + engine.num_dropped + engine.num_moved + scheduler.ledger.num_resumed


def run(rollout: dict) -> tuple[Scheduler, ChaosEngine]:
    scheduler, engine = new_scheduler(rollout), new_engine(rollout)
    engine.run(scheduler, rollout["plans"])
    return scheduler, engine


@settings(max_examples=300)
@given(rollouts())
def test_ends_once(rollout):
    scheduler, engine = run(rollout)
    assert all(c.state in FINAL_STATES for c in scheduler.ledger.candidates)
    assert all(count == 1 for count in engine.ends.values())
    finished = [c for c in scheduler.ledger.candidates if c.state is CandidateState.FINISHED]
    assert all(engine.ends[c.candidate_id] == 1 for c in finished)
    ledger = scheduler.ledger
    submitted = [c for _, commands in engine.trace for c in commands if isinstance(c, Submit)]
    assert ledger.num_submitted == len(submitted) + len(engine.first_commands)
    # Every submission ended, moved or was resumed; nothing else was submitted.
    assert ledger.num_submitted == num_accounted(scheduler, engine)
    assert all(abs(load.expected_tokens) < 1e-6 for load in ledger.engines.values())


@settings(max_examples=300)
@given(rollouts())
def test_rows_per_group(rollout):
    scheduler, _ = run(rollout)
    result = scheduler.result()
    assert len(result.groups) + len(result.deferred) == len(rollout["plans"])
    if rollout["first_groups"] is None:
        assert not result.deferred
    for group in result.groups:
        assert len(group.rows) == NUM_GENERATIONS
        assert len(set(group.selected)) == NUM_GENERATIONS
        assert all(row.state is CandidateState.FINISHED for row in group.rows)
    for group in result.deferred:
        assert group.rows == []


@settings(max_examples=300)
@given(rollouts())
def test_tokens_match_logprobs(rollout):
    scheduler, _ = run(rollout)
    for candidate in scheduler.ledger.candidates:
        assert candidate.tokens == list(range(candidate.length))  # no repeats, no gaps
        if candidate.tokens:
            assert candidate.logprobs == [-float(t) for t in candidate.tokens]


@settings(max_examples=300)
@given(rollouts())
def test_nothing_outstanding(rollout):
    scheduler, engine = run(rollout)
    assert not engine.running
    assert scheduler.ledger.num_running == 0
    assert all(load.num_running == 0 for load in scheduler.ledger.engines.values())
    assert all(group.num_unfinished == 0 for group in scheduler.ledger.groups.values())
    late = [copy.deepcopy(event) for event, _ in engine.trace if isinstance(event, CandidateEnded)]
    assert all(scheduler.handle(event) == [] for event in late)


@settings(max_examples=200)
@given(rollouts())
def test_rows_first(rollout):
    _, engine = run(rollout)
    for commands in (engine.first_commands, *(commands for _, commands in engine.trace)):
        submits = [c for c in commands if isinstance(c, Submit)]
        beyond_rows = [max(0, c.index - NUM_GENERATIONS + 1) for c in submits]
        assert beyond_rows == sorted(beyond_rows)


@settings(max_examples=200)
@given(rollouts())
def test_same_trace_same_commands(rollout):
    first, engine = run(rollout)
    second = new_scheduler(rollout)
    assert second.start(rollout["plans"], copy.deepcopy(engine.initial), 0.0) == engine.first_commands
    for event, commands in engine.trace:
        assert second.handle(copy.deepcopy(event)) == commands
    assert [g.selected for g in second.result().groups] == [g.selected for g in first.result().groups]


@settings(max_examples=200)
@given(rollouts())
def test_settled_is_final(rollout):
    scheduler = new_scheduler(rollout)
    engine = new_engine(rollout)
    seen: dict[int, list[int]] = {}
    handle = scheduler.handle

    def watched(event):
        commands = handle(event)
        for group in scheduler.ledger.groups.values():
            if group.has_rows:
                assert seen.setdefault(group.group_id, list(group.selected)) == group.selected
        return commands

    scheduler.handle = watched
    engine.run(scheduler, rollout["plans"])
    if rollout["first_groups"] is None:
        assert len(seen) == len(rollout["plans"])


@settings(max_examples=300)
@given(rollouts())
def test_moves_once(rollout):
    scheduler, engine = run(rollout)
    switch = scheduler.result().tail_switch
    assert engine.num_moved == (switch.num_moved if switch else 0)
    if not rollout["num_tail_engines"] or rollout["switch_at"] == 0:
        assert switch is None
    commands = [(event, command) for event, (_, own) in enumerate(engine.trace) for command in own]
    begun = {(c.candidate_id, c.segment - 1) for _, c in commands if isinstance(c, Submit)}
    moves = {event for event, c in commands if isinstance(c, Abort) and (c.candidate_id, c.segment) in begun}
    assert len(moves) <= 1
    assert sum(isinstance(c, TakeTurns) for _, c in commands) <= rollout["takes_turns"]


@settings(max_examples=200)
@given(rollouts())
def test_restarts_whole(rollout):
    """The engine asserts that no request has prior tokens."""
    rollout["plans"] = [GroupPlan(plan.group_id, plan.num_candidates) for plan in rollout["plans"]]
    scheduler, engine = new_scheduler(rollout, carries_tokens=False), new_engine(rollout)
    engine.run(scheduler, rollout["plans"])
    for candidate in scheduler.ledger.candidates:
        assert candidate.tokens == list(range(candidate.length))
        assert not candidate.tokens or candidate.logprobs == [-float(t) for t in candidate.tokens]


@settings(max_examples=200)
@given(rollouts())
def test_only_attempts_count(rollout):
    """However often engines are lost before they had a request, or are busy."""
    rollout["plans"] = [GroupPlan(plan.group_id, plan.num_candidates) for plan in rollout["plans"]]
    scheduler = new_scheduler(rollout)
    engine = new_engine(rollout, trouble_rate=0.5, tries=False)
    engine.run(scheduler, rollout["plans"])
    assert scheduler.error is None
    assert scheduler.ledger.num_lost == 0
    assert not any(candidate.num_empty_attempts for candidate in scheduler.ledger.candidates)


@settings(max_examples=300)
@given(rollouts(), st.floats(0.0, 0.2), st.none() | st.floats(0.0, 200.0))
def test_dropped_or_complete(rollout, failure_rate, expires_at):
    """With `drop_failed_groups`, each group has either finished rows or an error message."""
    scheduler = new_scheduler(rollout, drop_failed_groups=True)
    engine = new_engine(rollout, failure_rate=failure_rate, expires_at=expires_at)
    engine.run(scheduler, rollout["plans"])
    ledger = scheduler.ledger
    assert all(c.state in FINAL_STATES for c in ledger.candidates)
    assert ledger.num_submitted == num_accounted(scheduler, engine)
    if all(group.error for group in ledger.groups.values()):
        with pytest.raises(GenerationError, match=r"broken|time ran out"):
            scheduler.result()
        return
    result = scheduler.result()
    closed = {group.plan.group_id for group in [*result.groups, *result.deferred]}
    assert closed.isdisjoint(result.dropped)
    assert closed | set(result.dropped) == {plan.group_id for plan in rollout["plans"]}
    assert all("broken" in reason or "time ran out" in reason for reason in result.dropped.values())
    assert bool(result.deferred) <= (rollout["first_groups"] is not None)
    for group in result.groups:
        assert len(set(group.selected)) == NUM_GENERATIONS
        assert all(row.state is CandidateState.FINISHED for row in group.rows)
    for group_id in result.dropped:  # only groups that could not be kept
        assert ledger.groups[group_id].num_complete < NUM_GENERATIONS
