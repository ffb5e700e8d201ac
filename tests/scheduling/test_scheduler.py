"""Tests single decisions of the scheduler with the stub engine."""

import pytest

from tests.policies import make_policies
from tests.stub_engine import StubEngine
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.scheduling import (
    Abort,
    CandidateEnded,
    CandidateErred,
    CandidateFailed,
    CandidateStalled,
    CandidateState,
    EngineJoined,
    EngineLoad,
    EngineLost,
    EngineResized,
    FinishReason,
    FirstGroups,
    GroupPlan,
    LengthOrder,
    PartialCandidate,
    RolloutExpired,
    SchedulePolicies,
    Scheduler,
    ScheduleSettings,
    Submit,
    TokensArrived,
)
from trl_darts.scheduling.scheduler import MAX_EMPTY_ATTEMPTS


def darts(num_generations=3, max_num_generations=6, num_longest=1, **kwargs) -> Scheduler:
    fields = {"max_num_generations": max_num_generations, "num_longest": num_longest}
    return Scheduler(make_policies("darts", num_generations, **fields, **kwargs), num_generations)


def grpo(num_generations=3) -> Scheduler:
    return Scheduler(ScheduleSettings("grpo", num_generations).policies(), num_generations)


def end_of(result) -> float:
    assert result.timeline.running[-1] == 0
    return result.timeline.times[-1]


def ended(candidate_id, num_tokens, now, reason=FinishReason.STOP, segment=0, offset=0):
    tokens = [5] * num_tokens
    return CandidateEnded(candidate_id, segment, offset, tokens, [-1.0] * num_tokens, reason, now)


def test_grpo_waits_for_all_and_keeps_all():
    scheduler = grpo()
    engine = StubEngine({0: [4, 90, 7], 1: [3, 3, 3]})
    result = engine.run(scheduler, [GroupPlan(0, 3), GroupPlan(1, 3)])
    assert [g.selected for g in result.groups] == [[0, 1, 2], [0, 1, 2]]
    assert not [c for c in engine.commands if isinstance(c, Abort)]
    assert end_of(result) == 90.0


def test_dual_end_waits_for_the_whole_pool_below_the_bound():
    engine = StubEngine({0: [4, 90, 7, 30, 12]})
    result = engine.run(darts(), [GroupPlan(0, 5)])
    assert result.groups[0].selected == [0, 1, 2]  # the two shortest, 4 and 7, and the longest, 90
    assert end_of(result) == 90.0


def test_saturated_group_stops_at_its_mth_complete_candidate():
    engine = StubEngine({0: [4, 90, 7, 30, 12, 500]})
    result = engine.run(darts(), [GroupPlan(0, 6)])
    assert result.groups[0].selected == [0, 2, 4]
    assert end_of(result) == 12.0
    aborted = [c for c in result.groups[0].candidates if c.state is CandidateState.ABORTED]
    assert [c.index for c in aborted] == [1, 3, 5]
    assert [c.length for c in aborted] == [12, 12, 12]  # their tokens are kept


def test_tail_pruning_off_waits_for_the_saturated_group_too():
    engine = StubEngine({0: [4, 90, 7, 30, 12, 500]})
    result = engine.run(darts(tail_pruning=False), [GroupPlan(0, 6)])
    assert result.groups[0].selected == [0, 2, 5]
    assert end_of(result) == 500.0


def test_truncated_candidates_do_not_count_as_complete():
    engine = StubEngine({0: [4, 90, 7, 30, 12, 500]}, max_completion_length=20)
    result = engine.run(darts(tail_pruning=False), [GroupPlan(0, 6)])
    assert result.groups[0].selected == [0, 2, 4]  # the longest *complete* one is 12
    engine = StubEngine({0: [40, 90, 7, 30, 12, 500]}, max_completion_length=20)
    result = engine.run(darts(), [GroupPlan(0, 6)])
    assert result.groups[0].selected == [0, 2, 4]  # two complete ones, and one that is truncated at 20


def test_bounded_wait_aborts_beyond_p_times_the_mth_shortest():
    engine = StubEngine({0: [10, 15, 20, 35, 900]}, progress_interval=1)
    result = engine.run(darts(long_end_patience=2.0), [GroupPlan(0, 5)])
    # The third shortest complete length is 20: 35 ends in time and is the longest row, 900 is aborted at 40.
    assert result.groups[0].selected == [0, 1, 3]
    assert result.groups[0].candidates[4].state is CandidateState.ABORTED
    assert end_of(result) == pytest.approx(40, abs=1)


def test_patience_auto_ends_with_the_last_prompt_that_was_short():
    """Group 0 has three complete at 20, group 1 at 60: until then, group 0's other two may continue."""
    engine = StubEngine({0: [10, 15, 20, 40, 500], 1: [5, 30, 60, 70, 400]})
    result = engine.run(darts(long_end_patience="auto"), [GroupPlan(0, 5), GroupPlan(1, 5)])
    assert [g.selected for g in result.groups] == [[0, 1, 3], [0, 1, 2]]
    assert end_of(result) == 60.0
    assert [c.length for c in result.groups[0].candidates] == [10, 15, 20, 40, 60]


def test_patience_auto_does_not_wait_for_what_can_not_come():
    """Group 1 ends with two complete candidates and a truncated one."""
    engine = StubEngine({0: [10, 15, 20, 900], 1: [5, 30, 800]}, max_completion_length=100)
    result = engine.run(darts(long_end_patience="auto"), [GroupPlan(0, 4), GroupPlan(1, 3)])
    assert end_of(result) == 100.0
    assert [g.selected for g in result.groups] == [[0, 1, 2], [0, 1, 2]]


def test_patience_auto_follows_the_batch_that_is_wanted():
    """Two of three groups suffice: the rollout does not wait for the third, whose candidates are longer."""
    policies = make_policies("darts", 2, long_end_patience="auto")
    policies = SchedulePolicies(policies.group_stop, FirstGroups(2))
    engine = StubEngine({0: [3, 9, 300], 1: [4, 20, 400], 2: [5, 90, 95]})
    result = engine.run(Scheduler(policies, 2), [GroupPlan(i, 3) for i in range(3)])
    assert end_of(result) == 20.0
    assert [g.plan.group_id for g in result.groups] == [0, 1]
    assert [g.plan.group_id for g in result.deferred] == [2]


def test_uniform_keeps_the_first_that_ended_whatever_their_length():
    engine = StubEngine({0: [40, 4, 900, 7, 3]}, max_completion_length=100)
    result = engine.run(darts(selection="uniform"), [GroupPlan(0, 5)])
    assert result.groups[0].selected == [0, 1, 2]  # including the truncated one, as plain GRPO trains on it
    engine = StubEngine({0: [40, 4, 900, 7, 3]})
    result = engine.run(darts(selection="uniform", long_end_patience=2.0), [GroupPlan(0, 5)])
    assert result.groups[0].selected == [1, 3, 4]  # the first and the third were aborted


def test_candidates_of_an_earlier_rollout_are_not_sampled_again():
    done = PartialCandidate([5] * 8, finish_reason=FinishReason.STOP, num_segments=1)
    half = PartialCandidate([5] * 6, num_segments=1)
    engine = StubEngine({0: [8, 10, 4]})
    result = engine.run(grpo(), [GroupPlan(0, 3, resumed=(done, half))])
    submits = [c for c in engine.commands if isinstance(c, Submit)]
    assert [(c.index, len(c.prior_tokens), c.segment) for c in submits] == [(1, 6, 1), (2, 0, 0)]
    assert end_of(result) == 4.0
    assert [c.length for c in result.groups[0].candidates] == [8, 10, 4]


def test_candidates_wait_for_room():
    scheduler = grpo(num_generations=3)
    assert len(scheduler.start([GroupPlan(0, 3)], [EngineLoad("a", capacity=2)], now=0.0)) == 2
    (command,) = scheduler.handle(ended(0, 3, now=1.0))
    assert isinstance(command, Submit)
    assert command.candidate_id == 2


def test_lost_engine_resumes_elsewhere_from_its_tokens():
    scheduler = grpo(num_generations=2)
    scheduler.start([GroupPlan(0, 2)], [EngineLoad("a"), EngineLoad("b")], now=0.0)
    scheduler.handle(TokensArrived(0, 0, 0, [5, 6], [-1.0, -2.0], now=1.0))
    (command,) = scheduler.handle(EngineLost("a", "connection refused", now=2.0))
    assert (command.engine_id, command.segment, command.prior_tokens) == ("b", 1, (5, 6))
    assert scheduler.handle(ended(0, 9, now=3.0, segment=0)) == []  # too late, for the old segment
    scheduler.handle(ended(1, 3, now=3.0))
    scheduler.handle(ended(0, 2, now=4.0, segment=1, offset=2))
    assert scheduler.result().groups[0].candidates[0].tokens == [5, 6, 5, 5]


def test_last_engine_lost_is_waited_for():
    scheduler = grpo(num_generations=2)
    scheduler.start([GroupPlan(0, 2)], [EngineLoad("http://a")], now=0.0)
    scheduler.handle(TokensArrived(1, 0, 0, [5, 6], [-1.0, -2.0], now=0.5))
    assert scheduler.handle(EngineLost("http://a", "connection refused", now=1.0)) == []
    assert not scheduler.done
    commands = scheduler.handle(EngineJoined("http://a", now=2.0))
    assert [(c.candidate_id, c.segment, c.prior_tokens) for c in commands] == [(0, 1, ()), (1, 1, (5, 6))]


def test_candidate_that_no_engine_survives_is_named():
    scheduler = grpo(num_generations=1)
    scheduler.start([GroupPlan(0, 1)], [EngineLoad("a")], now=0.0)
    for n in range(MAX_EMPTY_ATTEMPTS + 1):
        assert not scheduler.done
        if n == 3:  # a token resets the count
            scheduler.handle(TokensArrived(0, n, 0, [5], [-1.0], now=n))
        scheduler.handle(EngineLost("a", "connection reset", now=n))
        scheduler.handle(EngineJoined("a", now=n))
    for n in range(MAX_EMPTY_ATTEMPTS - 4, MAX_EMPTY_ATTEMPTS):
        assert not scheduler.done
        scheduler.handle(EngineLost("a", "connection reset", now=n))
        scheduler.handle(EngineJoined("a", now=n))
    assert scheduler.done
    with pytest.raises(GenerationError, match=r"prompt 0 on a: its engine was lost 9 times.*connection reset"):
        scheduler.result()


def test_an_engine_that_is_drained_takes_nothing_new_and_keeps_what_it_has():
    scheduler = grpo(num_generations=3)
    assert len(scheduler.start([GroupPlan(0, 3)], [EngineLoad("a", 2)], now=0.0)) == 2
    assert scheduler.handle(EngineResized("a", 0, now=1.0)) == []
    assert scheduler.handle(ended(0, 3, now=2.0)) == []
    (command,) = scheduler.handle(EngineResized("a", 2, now=3.0))
    assert command.candidate_id == 2
    assert scheduler.handle(EngineResized("gone", 2, now=4.0)) == []


def test_longest_expected_first_on_the_engine_with_the_least_work():
    policies = SchedulePolicies(placement=LengthOrder({0: 10.0, 1: 100.0, 2: 55.0}))
    scheduler = Scheduler(policies, 2)
    plans = [GroupPlan(i, 2, expected_length=length) for i, length in enumerate([10.0, 100.0, 55.0])]
    commands = scheduler.start(plans, [EngineLoad("a"), EngineLoad("b")], now=0.0)
    assert [(c.group_id, c.engine_id) for c in commands] == [
        (1, "a"), (1, "a"), (2, "b"), (2, "b"), (0, "b"), (0, "b")
    ]  # fmt: skip
    scheduler.handle(ended(2, 100, now=1.0))
    assert scheduler.ledger.engines["a"].expected_tokens == 100.0


def test_stalled_candidate_goes_on_elsewhere_and_its_engine_stays():
    scheduler = grpo(num_generations=2)
    scheduler.start([GroupPlan(0, 2)], [EngineLoad("a", 2), EngineLoad("b", 0)], now=0.0)
    scheduler.handle(TokensArrived(1, 0, 0, [7, 8], [-1.0, -1.0], 1.0))
    assert scheduler.handle(CandidateStalled(1, 0, "late", 2.0)) == []  # the other engine has no room yet
    (command,) = scheduler.handle(EngineResized("b", 1, 3.0))
    assert (command.candidate_id, command.engine_id, command.segment) == (1, "b", 1)
    assert command.prior_tokens == (7, 8)
    assert scheduler.ledger.engines["a"].num_running == 1
    assert scheduler.handle(ended(1, 5, now=4.0)) == []  # answer of the old request
    scheduler.handle(ended(0, 1, now=5.0))
    scheduler.handle(CandidateEnded(1, 1, 2, [9], [-1.0], FinishReason.STOP, 6.0))
    (group,) = scheduler.result().groups
    assert [row.tokens for row in group.rows][1] == [7, 8, 9]
    assert scheduler.result().num_resumed == 1


def test_candidate_that_stalls_three_times_without_a_token_has_failed():
    scheduler = grpo(num_generations=1)
    scheduler.start([GroupPlan(0, 1)], [EngineLoad("a")], now=0.0)
    for segment in range(2):  # without another engine, it is retried on the same one
        (command,) = scheduler.handle(CandidateStalled(0, segment, "late", 1.0))
        assert (command.engine_id, command.segment) == ("a", segment + 1)
    scheduler.handle(CandidateStalled(0, 2, "late", 2.0))
    with pytest.raises(GenerationError, match="candidate 0 of prompt 0 on a: late"):
        scheduler.result()


def err_until_it_fails(scheduler, candidate_id):
    """Reports an error for each request of a candidate. Returns the engines that it was tried on."""
    candidate, engines = scheduler.ledger.candidates[candidate_id], []
    while candidate.state is CandidateState.RUNNING:
        engines.append(candidate.engine_id)
        scheduler.handle(CandidateErred(candidate_id, candidate.segment, "answered 500: it broke", 1.0))
    return engines


def test_candidate_that_errs_is_tried_elsewhere_and_only_its_group_is_dropped():
    scheduler = Scheduler(SchedulePolicies(), 1, drop_failed_groups=True)
    scheduler.start([GroupPlan(0, 1), GroupPlan(1, 1)], [EngineLoad("a"), EngineLoad("b")], now=0.0)
    assert err_until_it_fails(scheduler, 1) == ["b", "a"] * 4 + ["b"]
    assert sorted(scheduler.ledger.engines) == ["a", "b"]
    scheduler.handle(ended(0, 3, now=2.0))
    result = scheduler.result()
    assert [group.plan.group_id for group in result.groups] == [0]
    message = "Generation failed for candidate 0 of prompt 1 on b: answered 500: it broke (9 times in a row)"
    assert result.dropped == {1: message}


def test_a_new_token_resets_the_count_of_errors():
    scheduler = grpo(num_generations=1)
    scheduler.start([GroupPlan(0, 1)], [EngineLoad("a")], now=0.0)
    for segment in range(3 * MAX_EMPTY_ATTEMPTS):
        scheduler.handle(TokensArrived(0, segment, segment, [5], [-1.0], 1.0))
        (command,) = scheduler.handle(CandidateErred(0, segment, "answered 500", 1.0))
        assert command.prior_tokens == (5,) * (segment + 1)
    assert not scheduler.done


def test_an_engine_that_is_busy_or_was_not_reached_has_not_tried():
    scheduler = grpo(num_generations=1)
    scheduler.start([GroupPlan(0, 1)], [EngineLoad("a")], now=0.0)
    for segment in range(0, 6 * MAX_EMPTY_ATTEMPTS, 2):
        (command,) = scheduler.handle(CandidateErred(0, segment, "answered 503", 1.0, tried=False))
        assert (command.engine_id, command.segment) == ("a", segment + 1)
        assert scheduler.handle(EngineLost("a", "nothing listens there", 1.0, untried={0})) == []
        (command,) = scheduler.handle(EngineJoined("a", 2.0))
    scheduler.handle(ended(0, 3, now=3.0, segment=command.segment))
    assert scheduler.result().groups[0].candidates[0].length == 3


def test_tokens_that_can_not_be_carried_are_thrown_away():
    scheduler = Scheduler(SchedulePolicies(), 1, carries_tokens=False)
    scheduler.start([GroupPlan(0, 1)], [EngineLoad("a"), EngineLoad("b")], now=0.0)
    scheduler.handle(TokensArrived(0, 0, 0, [7, 8], [-1.0, -1.0], 1.0))
    (command,) = scheduler.handle(EngineLost("a", "gone", 2.0))
    assert (command.engine_id, command.prior_tokens) == ("b", ())
    scheduler.handle(CandidateEnded(0, 1, 0, [3], [-2.0], FinishReason.STOP, 3.0))
    (row,) = scheduler.result().groups[0].rows
    assert (row.tokens, row.logprobs, row.num_restarts) == ([3], [-2.0], 1)


def test_engine_lost_while_only_called_off_candidates_run_loses_nothing():
    scheduler = darts(num_generations=1, max_num_generations=2, num_longest=0)
    scheduler.start([GroupPlan(0, 2)], [EngineLoad("a")], now=0.0)
    (command,) = scheduler.handle(ended(0, 3, now=1.0))
    assert isinstance(command, Abort)
    scheduler.handle(EngineLost("a", "closed", now=2.0))
    assert scheduler.result().groups[0].selected == [0]


def test_failed_candidate_aborts_the_rest_and_surfaces_the_message():
    scheduler = grpo()
    scheduler.start([GroupPlan(0, 3)], [EngineLoad("a")], now=0.0)
    commands = scheduler.handle(CandidateFailed(1, 0, "context length exceeded", now=1.0))
    assert [c.candidate_id for c in commands] == [0, 2]
    for candidate_id in (0, 2):
        scheduler.handle(ended(candidate_id, 0, now=2.0, reason=FinishReason.ABORT))
    with pytest.raises(GenerationError, match="candidate 1 of prompt 0 on a: context length exceeded"):
        scheduler.result()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ended(0, 0, now=1.0), "without a single token"),
        (ended(0, 3, now=1.0, reason=FinishReason.ABORT), "not by this trainer"),
        (ended(0, 3, now=1.0, offset=4), "never arrived"),
        (CandidateEnded(0, 0, 0, [5, 5], [-1.0], FinishReason.STOP, 1.0), "1 log-probs came for 2 tokens"),
    ],
)
def test_answers_that_make_no_sense_fail(event, message):
    scheduler = grpo(num_generations=1)
    scheduler.start([GroupPlan(0, 1)], [EngineLoad("a")], now=0.0)
    scheduler.handle(event)
    with pytest.raises(GenerationError, match=message):
        scheduler.result()


def test_failed_group_is_dropped_and_the_others_go_on():
    scheduler = Scheduler(SchedulePolicies(), 2, drop_failed_groups=True)
    scheduler.start([GroupPlan(0, 2), GroupPlan(1, 2)], [EngineLoad("a")], now=0.0)
    assert scheduler.handle(CandidateFailed(0, 0, "too long", now=1.0)) == [Abort(1, "a", 0)]
    scheduler.handle(ended(1, 1, now=1.5, reason=FinishReason.ABORT))
    scheduler.handle(ended(2, 3, now=2.0))
    scheduler.handle(ended(3, 4, now=2.0))
    result = scheduler.result()
    assert result.dropped == {0: "Generation failed for candidate 0 of prompt 0 on a: too long"}
    assert [group.plan.group_id for group in result.groups] == [1]


def test_nothing_left_to_train_on_is_an_error():
    scheduler = Scheduler(SchedulePolicies(), 1, drop_failed_groups=True)
    scheduler.start([GroupPlan(0, 1), GroupPlan(1, 1)], [], now=0.0)
    scheduler.handle(RolloutExpired("no server is left", now=1.0))
    assert scheduler.done
    with pytest.raises(GenerationError, match="no server is left"):
        scheduler.result()


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([GroupPlan(0, 2)], r"`num_candidates` \(2\) of group 0 must be at least"),
        ([GroupPlan(0, 3)] * 2, "occurs twice"),
    ],
)
def test_impossible_plans_are_refused(plans, message):
    with pytest.raises(ConfigurationError, match=message):
        grpo().start(plans, [EngineLoad("a")], now=0.0)
