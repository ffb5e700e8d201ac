"""Tests which candidates tail engines decode, when they take over, and their failures."""

import pytest

from tests.policies import make_policies
from trl_darts.policy import EngineTimes, LatencyCurve, TailTimes
from trl_darts.policy.forecast import HANDOVER_S
from trl_darts.scheduling import (
    Abort,
    CandidateEnded,
    CandidateState,
    EngineJoined,
    EngineLoad,
    EngineLost,
    EngineResized,
    FinishReason,
    GroupPlan,
    Scheduler,
    Submit,
    TailPolicy,
    TailServers,
    TakeTurns,
    TokensArrived,
)


STOP, ABORT = FinishReason.STOP, FinishReason.ABORT
NUMBER = TailServers()  # without a prediction


class Rollout:
    """Two groups of two candidates on one main engine, with one tail engine. Token i of a completion is i."""

    def __init__(self, tail: TailPolicy | None, schedule: str = "grpo", num: int = 2, **fields):
        self.scheduler = Scheduler(make_policies(schedule, 2, tail=tail, **fields), 2)
        self.now = 0.0
        self.sent: dict[int, int] = {}
        capacity = 0 if tail is not None and tail.servers.takes_turns else None
        engines = [EngineLoad("tail", capacity, tail=True), EngineLoad("main")]
        plans = [GroupPlan(group, num, num_prompt_tokens=5, expected_length=100.0) for group in range(2)]
        self.first = self.scheduler.start(plans, engines, 0.0)

    def tokens(self, candidate: int, num: int):
        return self.scheduler.handle(TokensArrived(*self._fields(candidate, num), self.now))

    def end(self, candidate: int, num: int = 0, reason: FinishReason = STOP):
        return self.scheduler.handle(CandidateEnded(*self._fields(candidate, num), reason, self.now))

    def _fields(self, candidate: int, num: int):
        self.now += 1.0
        offset = self.sent.get(candidate, 0)
        self.sent[candidate] = offset + num
        segment = self.scheduler.ledger.candidates[candidate].segment
        return candidate, segment, offset, list(range(offset, offset + num)), [-1.0] * num


def aborted(commands) -> list[int]:
    return [c.candidate_id for c in commands if isinstance(c, Abort)]


def placed(commands) -> list[tuple[int, str, int]]:
    return [(c.candidate_id, c.engine_id, len(c.prior_tokens)) for c in commands if isinstance(c, Submit)]


def test_what_is_left_moves_once_with_its_tokens():
    rollout = Rollout(TailPolicy(NUMBER, switch_at=2))
    assert [name for _, name, _ in placed(rollout.first)] == ["main"] * 4
    for candidate in range(4):
        rollout.tokens(candidate, 7)
    assert rollout.end(0) == []
    assert aborted(rollout.end(1)) == [2, 3]
    assert placed(rollout.end(2, 2, ABORT)) == [(2, "tail", 9)]
    assert rollout.end(3, 1) == []  # it ended just before its abort
    assert rollout.tokens(2, 3) == []
    rollout.end(2)
    result = rollout.scheduler.result()
    assert [row.tokens for row in result.groups[1].rows] == [list(range(12)), list(range(8))]
    switch = result.tail_switch
    assert (switch.num_unfinished, switch.num_moved, switch.num_tokens, switch.forecast) == (2, 1, 14, None)
    assert result.num_resumed == 0


def test_without_tail_engines_or_a_policy_nothing_moves():
    rollout = Rollout(None)
    assert [name for _, name, _ in placed(rollout.first)] == ["main"] * 4  # as in an evaluation
    rollout = Rollout(TailPolicy(NUMBER, switch_at=3))
    rollout.scheduler.handle(EngineLost("tail", "gone", 0.5))
    assert rollout.end(0, 5) == []
    commands = rollout.scheduler.handle(EngineJoined("tail", 1.0, tail=True))
    assert commands == []
    assert aborted(rollout.end(1, 5)) == [2, 3]  # it is back
    assert Rollout(TailPolicy(NUMBER, switch_at=0)).end(0, 5) == []
    assert Rollout(TailPolicy(NUMBER)).end(0, 5) == []  # without a profile


def test_back_to_the_main_engine_where_the_tails_is_lost():
    rollout = Rollout(TailPolicy(NUMBER, switch_at=3))
    rollout.end(0, 5)
    rollout.end(1, 4, ABORT)
    assert placed(rollout.scheduler.handle(EngineLost("tail", "gone", 9.0))) == [(1, "main", 4)]
    assert placed(rollout.end(2, 6, ABORT)) == [(2, "main", 6)]
    for candidate in (1, 2, 3):
        assert rollout.end(candidate, 1) == []
    result = rollout.scheduler.result()
    assert result.num_resumed == 1
    assert result.tail_switch.num_moved == 2


def test_a_candidate_called_off_while_it_moves_is_told_once():
    rollout = Rollout(TailPolicy(NUMBER, switch_at=7), "darts", 4, long_end_patience=None)  # M_up: saturated groups
    assert aborted(rollout.end(0, 5)) == [1, 2, 3, 4, 5, 6, 7]
    assert rollout.end(1, 5) == []  # the group has enough, so its others are aborted
    assert rollout.end(2, 4, ABORT) == []
    assert rollout.end(3, 4, ABORT) == []
    assert sum(c.state is CandidateState.ABORTED for c in rollout.scheduler.ledger.candidates) == 2
    assert placed(rollout.end(4, 4, ABORT)) == [(4, "tail", 4)]


def test_long_groups_start_on_tail_engines():
    rollout = Rollout(TailPolicy(NUMBER, switch_at=0, long_groups=frozenset({1})))
    assert [name for _, name, _ in placed(rollout.first)] == ["main", "main", "tail", "tail"]
    rollout.end(0, 5)
    assert [name for _, name, _ in placed(rollout.scheduler.handle(EngineLost("tail", "gone", 2.0)))] == ["main"] * 2


def test_a_full_tail_engine_keeps_nobody_else_waiting():
    tail = TailPolicy(NUMBER, 0, frozenset({0}))
    scheduler = Scheduler(make_policies("grpo", 2, tail=tail), 2)
    engines = [EngineLoad("tail", 1, tail=True), EngineLoad("main", 10)]
    commands = scheduler.start([GroupPlan(group, 2) for group in range(3)], engines, 0.0)
    assert [(c.group_id, c.engine_id) for c in commands] == [(0, "tail"), *[(1, "main")] * 2, *[(2, "main")] * 2]
    end = CandidateEnded(commands[0].candidate_id, 0, 0, [5], [-1.0], STOP, 1.0)
    assert [(c.group_id, c.engine_id) for c in scheduler.handle(end)] == [(0, "tail")]


@pytest.mark.parametrize("wakes", [True, False])
def test_engines_that_share_gpus_take_turns(wakes):
    rollout = Rollout(TailPolicy(TailServers(takes_turns=True), switch_at=2))
    rollout.end(0, 5)
    assert aborted(rollout.end(1, 5)) == [2, 3]
    assert rollout.end(2, 3, ABORT) == []
    assert rollout.end(3, 4, ABORT) == [TakeTurns()]  # the main engine is idle now
    handle = rollout.scheduler.handle
    assert handle(EngineResized("main", 0, 5.0)) == []
    if wakes:
        assert placed(handle(EngineResized("tail", None, 6.0))) == [(3, "tail", 4), (2, "tail", 3)]
    else:
        assert handle(EngineLost("tail", "it does not wake", 6.0)) == []
        assert handle(EngineJoined("tail", 6.5, 0, tail=True)) == []  # it sleeps again
        assert placed(handle(EngineResized("main", None, 7.0))) == [(3, "main", 4), (2, "main", 3)]
    rollout.end(2, 1)
    assert rollout.end(3, 1) == []
    assert rollout.scheduler.result().tail_switch.num_moved == 2


def servers(tail_ms: float, main_slope: float = 0.0) -> TailServers:
    main = EngineTimes(LatencyCurve([1, 8], [0.010, 0.010 + main_slope]))
    return TailServers(TailTimes(main, EngineTimes(LatencyCurve([1, 8], [tail_ms / 1e3, 0.050]))), 10_000)


def test_a_predicted_switch_waits_until_the_other_layout_is_faster():
    rollout = Rollout(TailPolicy(servers(4.0)))  # faster with one sequence alone: 4 and 10.6 ms with two
    for candidate, length in enumerate((100, 120, 150, 400)):
        rollout.tokens(candidate, length)
    assert [rollout.end(candidate) for candidate in (0, 1)] == [[], []]
    assert aborted(rollout.end(2)) == [3]
    rollout.end(3, 1, ABORT)
    rollout.end(3, 5)
    forecast = rollout.scheduler.result().tail_switch.forecast
    assert forecast.pays
    assert forecast.there == pytest.approx(0.4 * forecast.here + HANDOVER_S)


def test_no_switch_where_the_tail_is_slower_or_nothing_is_waited_for():
    rollout = Rollout(TailPolicy(servers(9.5)))  # faster, but by less than `MIN_GAIN`
    for candidate in range(3):
        assert rollout.end(candidate, 100) == []
    policies = make_policies("darts", 2, long_end_patience="auto")
    groups = Rollout(None, "darts", 3, long_end_patience="auto").scheduler.ledger.groups
    assert policies.group_stop.awaited(groups[0])[0] == 2  # two of three suffice
    assert make_policies("grpo", 2).group_stop.awaited(groups[0])[0] == 3
    assert make_policies("darts", 2).group_stop.awaited(groups[0])[0] == 3
