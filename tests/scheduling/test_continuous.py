"""
Invariants of a rollout without an end, over random lengths, updates and lost engines. A stub decodes, and records
which weights sampled each token; the scheduler learns of tokens later, as from a server that streams in chunks.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError
from trl_darts.scheduling import (
    Abort,
    CandidateEnded,
    CandidateFailed,
    Continuous,
    EngineJoined,
    EngineLoad,
    EngineLost,
    EngineUpdated,
    FinishedGroups,
    FinishReason,
    FreshGroups,
    GroupPlan,
    GroupResult,
    RolloutExpired,
    Scheduler,
    ScheduleSettings,
    Submit,
    TokensArrived,
)
from trl_darts.scheduling.continuous import oldest_version


M = 2


@dataclass
class Request:
    """A candidate on an engine. `sampled` has the version of each token of this request."""

    command: Submit
    length: int  # of the candidate
    sampled: list[int] = field(default_factory=list)
    reported: int = 0


class Stub:
    """Decodes what a scheduler submits, one random event after the other."""

    def __init__(self, schedule: str, rng: random.Random, num_engines: int, capacity: int) -> None:
        self.rng, self.capacity = rng, capacity
        settings = ScheduleSettings(schedule, M, rollout_ahead="continuous")
        self.scheduler = Scheduler(settings.policies(batch_stop=Continuous()), M)
        self.versions = dict.fromkeys((f"engine {i}" for i in range(num_engines)), 0)
        self.lost: set[str] = set()
        self.requests: dict[int, Request] = {}
        self.truth: dict[int, list[int]] = {}  # versions of the tokens that candidates have, by ID
        loads = [EngineLoad(name, capacity, version=0) for name in self.versions]
        self.execute(self.scheduler.start([], loads, 0.0))

    def execute(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                length = self.rng.choice([1, 3, 20, 60])
                self.truth[command.candidate_id] = self.truth.get(command.candidate_id, [])[
                    : len(command.prior_tokens)
                ]
                self.requests[command.candidate_id] = Request(command, len(command.prior_tokens) + length)
            elif isinstance(command, Abort):
                self.report(self.requests.pop(command.candidate_id), FinishReason.ABORT)

    def report(self, request: Request, reason: FinishReason | None) -> None:
        command, new = request.command, request.sampled[request.reported :]
        offset = len(command.prior_tokens) + request.reported
        request.reported = len(request.sampled)
        self.truth[command.candidate_id] += new
        event = (command.candidate_id, command.segment, offset, [7] * len(new), None)
        if reason is None:
            self.execute(self.scheduler.handle(TokensArrived(*event, 0.0)))
        else:
            self.execute(self.scheduler.handle(CandidateEnded(*event, reason, 0.0)))

    def step(self) -> None:
        """Decodes some tokens of one request, and sometimes reports them."""
        request = self.rng.choice(list(self.requests.values()))
        count = min(self.rng.randint(1, 20), request.length - len(request.command.prior_tokens) - len(request.sampled))
        request.sampled += [self.versions[request.command.engine_id]] * count
        if len(request.command.prior_tokens) + len(request.sampled) == request.length:
            del self.requests[request.command.candidate_id]
            self.report(request, FinishReason.STOP)
        elif self.rng.random() < 0.5:
            self.report(request, None)

    def update(self, version: int) -> None:
        """Gives all engines that are there new weights. A request without tokens may not have reached its engine."""
        for name in self.versions.keys() - self.lost:
            self.versions[name] = version
            own = [r for r in self.requests.values() if r.command.engine_id == name]
            counts = {r.command.candidate_id: len(r.sampled) for r in own if r.sampled or self.rng.random() < 0.5}
            self.execute(self.scheduler.handle(EngineUpdated(name, version, counts, 0.0)))

    def lose(self) -> None:
        """Loses an engine, with the tokens that it has not reported."""
        name = self.rng.choice(sorted(self.versions.keys() - self.lost))
        self.lost.add(name)
        for request in [r for r in self.requests.values() if r.command.engine_id == name]:
            del self.requests[request.command.candidate_id]
        self.execute(self.scheduler.handle(EngineLost(name, "", 0.0)))

    def bring_back(self, version: int) -> None:
        """Brings back all lost engines with the current weights."""
        for name in sorted(self.lost):
            self.versions[name] = version
            self.execute(self.scheduler.handle(EngineJoined(name, 0.0, self.capacity, version=version)))
        self.lost.clear()

    def take(self, rule: FreshGroups, version: int) -> list[GroupResult]:
        while (chosen := rule.choose(self.scheduler)) is None:
            event = self.rng.random()
            if event < 0.02 and len(self.versions) - len(self.lost) > 1:
                self.lose()
            elif not self.requests or (self.lost and event < 0.1):
                self.bring_back(version)
            else:
                self.step()
        groups, takeable = self.scheduler.ledger.groups, self.scheduler.takeable
        due = {i for i, group in groups.items() if oldest_version(group) <= rule.due}
        assert due & set(groups) <= set(chosen) or len(due) > rule.num_groups
        others = [i for i in takeable if i not in due]
        assert others[: len(set(chosen) - due)] == sorted(set(chosen) - due), "in_order"
        self.execute(self.scheduler.select(chosen, 0.0))
        assert self.scheduler.has_ended(chosen)
        return self.scheduler.take(chosen, 0.0).groups


def runs_of(versions: list[int]) -> tuple[tuple[int, int], ...]:
    """Returns runs of equal versions."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return tuple((version, count) for version, count in runs)


@settings(max_examples=60)
@given(
    schedule=st.sampled_from(["grpo", "darts"]),
    seed=st.integers(0, 10_000),
    num_groups=st.integers(1, 4),
    max_staleness=st.integers(1, 5),
    num_engines=st.integers(1, 3),
    capacity=st.integers(1, 12),
)
def test_invariants(schedule, seed, num_groups, max_staleness, num_engines, capacity):
    """bounded, in_order, trained_once, versions_exact."""
    stub = Stub(schedule, random.Random(seed), num_engines, capacity)
    most = ScheduleSettings(schedule, M, rollout_ahead="continuous", max_staleness=max_staleness).num_under_way(
        num_groups
    )
    entered, taken, num_batches = 0, Counter(), 12
    for version in range(num_batches):
        if version:
            stub.update(version)
        for is_taken in (False, True):
            room = min(most - (entered - sum(taken.values())), num_batches * num_groups - entered)
            counts = [M + (schedule == "darts") * stub.rng.randint(0, M) for _ in range(room)]
            stub.execute(stub.scheduler.add([GroupPlan(entered + i, n) for i, n in enumerate(counts)], 0.0))
            entered += room
            for group in () if is_taken else stub.take(FreshGroups(num_groups, version - max_staleness), version):
                taken[group.plan.group_id] += 1
                for row in group.candidates:
                    assert row.versions == runs_of(stub.truth.get(row.candidate_id, [])), "versions_exact"
                for row in group.rows:
                    assert version - row.versions[0][0] <= max_staleness, "bounded"
        for _ in range(stub.rng.randint(0, 30)):  # while the trainer trains
            if stub.requests:
                stub.step()
    assert taken == dict.fromkeys(range(num_batches * num_groups), 1), "trained_once"
    assert not stub.scheduler.ledger.groups
    assert not stub.scheduler.ledger.candidates


@pytest.mark.parametrize("rule", [FreshGroups(1, -1), FinishedGroups(1)], ids=str)
def test_auto_keeps_the_long_end_decoding_until_the_batch_is_taken(rule):
    """A group with enough complete answers goes on while the trainer is busy."""
    stub = Stub("darts", random.Random(0), 1, 8)
    stub.execute(stub.scheduler.add([GroupPlan(0, M + 1), GroupPlan(1, M + 1)], 0.0))
    for candidate_id in (0, 1):
        request = stub.requests.pop(candidate_id)
        request.sampled = [0] * 5
        stub.report(request, FinishReason.STOP)
    assert rule.choose(stub.scheduler) == [0]
    assert 2 in stub.requests  # its third candidate
    stub.execute(stub.scheduler.select([0], 0.0))
    assert 2 not in stub.requests
    (group,) = stub.scheduler.take([0], 0.0).groups
    assert group.selected == [0, 1]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), num_engines=st.integers(1, 3), capacity=st.integers(1, 6))
def test_a_group_that_nobody_waits_for_any_longer(seed, num_engines, capacity):
    """Dropped at any moment, waiting, running or complete: it ends, the others go on, and nothing is left of it."""
    stub = Stub("grpo", random.Random(seed), num_engines, capacity)
    scheduler, rng = stub.scheduler, stub.rng
    stub.execute(scheduler.add([GroupPlan(i, M) for i in range(8)], 0.0))
    dropped = set(rng.sample(range(8), rng.randint(1, 8)))
    for group_id in dropped:
        for _ in range(rng.randint(0, 6)):
            if stub.requests:
                stub.step()
        stub.execute(scheduler.drop(group_id, "nobody waits for it", 0.0))
        assert scheduler.has_ended([group_id])
        assert group_id in scheduler.takeable
        assert not any(request.command.group_id == group_id for request in stub.requests.values())
        scheduler.take([group_id], 0.0)
    while stub.requests:
        stub.step()
    others = sorted(set(range(8)) - dropped)
    assert scheduler.takeable == others
    assert [group.plan.group_id for group in scheduler.take(others, 0.0).groups] == others
    assert scheduler.error is None
    assert scheduler.done
    assert not scheduler.ledger.groups


def test_a_moment_without_a_group_is_not_the_end():
    """All groups of the moment are dropped, and further prompts follow."""
    stub = Stub("grpo", random.Random(0), 1, 8)
    stub.scheduler.drop_failed_groups = True
    stub.execute(stub.scheduler.add([GroupPlan(0, M), GroupPlan(1, M)], 0.0))
    for candidate_id in (0, M):
        segment = stub.requests.pop(candidate_id).command.segment
        stub.execute(stub.scheduler.handle(CandidateFailed(candidate_id, segment, "too long", 1.0)))
    assert stub.scheduler.error is None
    result = stub.scheduler.take([0, 1], 2.0)
    assert (result.groups, list(result.dropped)) == ([], [0, 1])
    stub.execute(stub.scheduler.add([GroupPlan(2, M)], 3.0))
    assert len(stub.requests) == M


def test_a_deadline_that_leaves_no_group_is_the_end():
    """Otherwise, a run whose servers are all lost would train on filler rows for ever."""
    stub = Stub("grpo", random.Random(0), 1, 8)
    stub.scheduler.drop_failed_groups = True
    stub.execute(stub.scheduler.add([GroupPlan(0, M), GroupPlan(1, M)], 0.0))
    for candidate_id in range(M):
        request = stub.requests.pop(candidate_id)
        request.sampled = [0] * 5
        stub.report(request, FinishReason.STOP)
    stub.execute(stub.scheduler.handle(RolloutExpired("All servers are lost", 1.0)))
    assert stub.scheduler.error is None  # there is one to train on
    assert [group.plan.group_id for group in stub.take(FreshGroups(1, -1), 0)] == [0]
    stub.scheduler.take([1], 0.0)
    stub.execute(stub.scheduler.add([GroupPlan(2, M)], 2.0))
    stub.execute(stub.scheduler.handle(RolloutExpired("All servers are lost", 3.0)))
    assert stub.scheduler.error == "All servers are lost"


def test_nothing_grows_with_the_groups_that_were_taken():
    stub = Stub("grpo", random.Random(0), 2, 8)
    for group_id in range(50):
        stub.execute(stub.scheduler.add([GroupPlan(group_id, M)], 0.0))
        stub.take(FreshGroups(1, -1), 0)
    scheduler = stub.scheduler
    kept = [scheduler.policies.placement._homes, scheduler._waiting, scheduler._ready, scheduler._selected]
    assert [len(each) for each in [*kept, scheduler._dropped, scheduler.ledger.groups]] == [0] * 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_staleness": 0}, r"`max_staleness` \(0\) must be at least 1"),
        ({"rollout_ahead": 1, "max_staleness": 2}, r"`max_staleness` \(2\) has no effect with `rollout_ahead` \(1\)"),
        ({"rollout_ahead": 0, "kv_after_update": "keep"}, r"`kv_after_update` \('keep'\) has no effect with"),
        ({"kv_after_update": "drop"}, r"`kv_after_update` \('drop'\) must be one of"),
        ({"rollout_ahead": "always"}, r"`rollout_ahead` \('always'\) must be 0, 1 or 'continuous'"),
        ({"rollout_ahead": None}, r"`rollout_ahead` \(None\) must be 0, 1 or 'continuous'"),
        ({"schedule": "partial_rollout"}, r"`schedule` \('partial_rollout'\) does not run with .*carries tokens over"),
        ({"schedule": "tail_batching"}, r"`schedule` \('tail_batching'\) does not run with"),
        ({"schedule": "sorted"}, r"`schedule` \('sorted'\) does not run with"),
        ({"drop_uniform_groups": True}, r"`drop_uniform_groups` \(True\) does not run with"),
        ({"defer_unsettled_groups": True}, r"`defer_unsettled_groups` \(True\) does not run with"),
        ({"audit_share": 0.1}, r"`audit_share` \(0.1\) does not run with"),
        ({"long_end_every": 4}, r"`long_end_every` \(4\) does not run with"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        ScheduleSettings(**{"rollout_ahead": "continuous", **fields})


def test_values_of_a_command_line():
    assert ScheduleSettings(rollout_ahead="1").rollout_ahead == 1
    assert ScheduleSettings(rollout_ahead="continuous").max_staleness == 4
