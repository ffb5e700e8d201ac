"""
The server engine against a server that does everything wrong, 2,000 times; as a slow test, 10,000 times.

- clear_error_or_resume: each request ends in a row, in a resume, or in an error that names the server and the problem.
- never_a_hang: each rollout ends in bounded time.
- never_a_wrong_row: what is known of a candidate is always a beginning of its right answer, and a row is all of it.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from tests.engines.fake_server import fake_server
from tests.engines.hostile_server import (
    ERRORS,
    MAX_TOKENS,
    PAGE,
    RESUMES,
    ROWS,
    STALLS,
    HostileServer,
    right_answer,
)
from tests.policies import make_policies
from trl_darts.engines import ServerPrompt, VLLMServerEngine, aborts, monitor, vllm_rollout, vllm_server
from trl_darts.engines.waiting import Deadlines
from trl_darts.errors import GenerationError
from trl_darts.scheduling import CandidateState, GroupPlan, Scheduler, ScheduleSettings


BODY = {"model": "m", "max_tokens": MAX_TOKENS, "logprobs": 0}
LONG_S = 20.0  # of a rollout in which nothing is waited for: a machine may be busy
# So often a candidate may be lost without a new token before it is given up.
MAX_DISTURBANCES = 8
PATIENT = Deadlines(first_token_s=10.0, token_s=10.0, return_s=10.0)
# Of tokens alone, so that a busy machine does not lose the server for its health.
STALLING = Deadlines(first_token_s=0.3, token_s=0.3, request_s=15.0, health_s=10.0, return_s=10.0, rollout_s=15.0)
CALLED_OFF, OPEN = "called off", "open"
WORD_OF_STATE = {
    CandidateState.FINISHED: "row",
    CandidateState.LOST: "error",
    CandidateState.ABORTED: CALLED_OFF,
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(vllm_server, "PROGRESS_INTERVAL_S", 0.004)
    monkeypatch.setattr(vllm_rollout, "RETRY_S", 0.001)
    monkeypatch.setattr(vllm_rollout, "BUSY_S", 0.01)


@contextmanager
def hostile_servers(server: HostileServer, deadlines: Deadlines, num_servers: int) -> Iterator[list[VLLMServerEngine]]:
    """An engine on several hostile servers, and one on a hostile and a good one."""
    good = HostileServer(1)
    names = [f"s{i}" for i in range(num_servers)]
    routes = {f"POST /{name}/v1/completions": server.completions for name in names}
    with fake_server(routes) as url, fake_server({"POST /v1/completions": good.completions}) as good_url:
        urls = [f"{url}/{name}" for name in names]
        engines = [VLLMServerEngine(urls, deadlines), VLLMServerEngine([urls[0], good_url], deadlines)]
        yield engines
        for engine in engines:
            engine.close()
    assert not server.problems + good.problems


class Rollouts:
    """Runs rollouts, checks their ends, and counts how each request ended."""

    def __init__(self, server: HostileServer) -> None:
        self.server = server
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.num_groups = 0

    def run(self, engine: VLLMServerEngine, num_groups: int, size: int, long_s: float = LONG_S) -> str | None:
        """Runs one rollout. Returns the message of its error, if any."""
        scheduler, error = Scheduler(ScheduleSettings("grpo", size).policies(), size), None
        first, self.num_groups = self.num_groups, self.num_groups + num_groups
        plans = [GroupPlan(i, size) for i in range(num_groups)]
        prompts = {i: [ServerPrompt([first + i, index]) for index in range(size)] for i in range(num_groups)}
        start = time.perf_counter()
        try:
            engine.run(scheduler, plans, prompts, BODY)
        except GenerationError as problem:
            error = str(problem)
            assert "http://127.0.0.1:" in error
        assert time.perf_counter() - start < long_s
        check_tokens(scheduler, first, complete=error is None)
        self._count(scheduler, first, error)
        return error

    def _count(self, scheduler: Scheduler, first: int, error: str | None) -> None:
        candidates = {(first + c.group_id, c.index): c for c in scheduler.ledger.candidates}
        # A request of an earlier rollout may have come after its end: nobody waits for its answer.
        played = {key: kind for key, kind in self.server.played.copy().items() if key[:2] in candidates}
        self.server.played.clear()
        for (group, index, segment), kind in played.items():
            candidate = candidates[group, index]
            outcome = WORD_OF_STATE.get(candidate.state, OPEN) if segment == candidate.segment else "resumed"
            self.outcomes[kind, outcome] += 1
            if outcome == "error":
                assert error is not None
                assert f"candidate {candidate.index} of prompt {candidate.group_id}" in error
                if kind in ERRORS:
                    assert re.search(ERRORS[kind][1], error), (kind, error)

    def ends(self, kind: str) -> set[str]:
        """Returns how the requests of a kind ended."""
        return {outcome for (k, outcome), count in self.outcomes.items() if k == kind and count}


def check_tokens(scheduler: Scheduler, first_group: int, complete: bool) -> None:
    """Checks that all known tokens of each candidate are right, and that complete ones are whole."""
    for candidate in scheduler.ledger.candidates:
        tokens, logprobs, reason = right_answer(first_group + candidate.group_id, candidate.index)
        assert candidate.tokens == tokens[: candidate.length]
        given = [
            right if math.isnan(value) else value
            for value, right in zip(candidate.logprobs or [], logprobs, strict=False)
        ]
        assert given == logprobs[: candidate.length]
        if complete or candidate.state is CandidateState.FINISHED:
            assert candidate.length == len(tokens)
            assert candidate.finish_reason.value == reason


def disturb(server: HostileServer, rng: random.Random) -> None:
    """Plans a rollout that succeeds: most answers are cut at first."""
    left = rng.randint(0, MAX_DISTURBANCES)

    def plan(group: int, index: int, segment: int) -> str:
        nonlocal left
        if left and rng.random() < 0.6:
            left -= 1
            return rng.choice(["cut at a byte", rng.choice(list(RESUMES))])
        return rng.choice(["good", rng.choice(list(ROWS))])

    server.plan = plan


def spoil(server: HostileServer, rng: random.Random, kind: str) -> None:
    """Plans a rollout that fails: one candidate's answer is invalid, at once or after a cut."""
    at = rng.choice([0, 0, 1])

    def plan(group: int, index: int, segment: int) -> str:
        if index or segment > at:
            return "good"
        return kind if segment == at else "cut at a byte"

    server.plan = plan


@pytest.mark.parametrize("num_cases", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzz(num_cases):
    server, rng = HostileServer(0), random.Random(0)
    rollouts = Rollouts(server)
    with hostile_servers(server, PATIENT, num_servers=4) as engines:
        while sum(rollouts.outcomes.values()) < num_cases:
            engine = engines[rng.random() < 0.2]
            for kind in rng.sample(list(ERRORS), 10):
                spoil(server, rng, kind)
                rollouts.run(engine, 1, rng.randint(1, 3))
            for _ in range(4):
                disturb(server, rng)
                assert rollouts.run(engine, rng.randint(1, 4), 5) is None
    report(rollouts)
    for kind in ROWS:  # one that is cut short is so by a neighbour's fault, or by its rollout's end
        assert "row" in rollouts.ends(kind), kind
        assert rollouts.ends(kind) <= {"row", "resumed", CALLED_OFF}, kind
    for kind in RESUMES:  # a cut may come after the end
        assert "resumed" in rollouts.ends(kind), kind
        assert rollouts.ends(kind) <= {"row", "resumed"}, kind
    for kind in ERRORS:  # an answer may be whole before it is spoilt
        assert "error" in rollouts.ends(kind), kind
        assert rollouts.ends(kind) <= {"error"}, kind


def report(rollouts: Rollouts) -> None:
    """Prints how each kind ended. pytest shows it if a check fails, or with `-s`."""
    for (kind, outcome), count in sorted(rollouts.outcomes.items()):
        print(f"{kind:40} {outcome:12} {count:6}")
    print(f"{sum(rollouts.outcomes.values())} cases")


@pytest.mark.parametrize("kind", STALLS)
def test_stalled_candidates_are_resumed(kind):
    server = HostileServer(2)
    rollouts = Rollouts(server)
    server.plan = lambda group, index, segment: kind if segment == 0 else "good"
    with hostile_servers(server, STALLING, num_servers=2) as engines:
        for engine in engines:
            assert rollouts.run(engine, 1, 2) is None
    assert rollouts.outcomes[kind, "resumed"] >= 2


@pytest.mark.parametrize("kind", STALLS)
def test_candidate_that_always_stalls_is_an_error(kind):
    server = HostileServer(3)
    rollouts = Rollouts(server)
    server.plan = lambda group, index, segment: kind
    with hostile_servers(server, STALLING, num_servers=1) as (engine, _):
        error = rollouts.run(engine, 1, 1)
    assert rollouts.ends(kind) <= {"error", "resumed"}
    assert "no tokens within `vllm_" in error


def test_candidate_that_is_always_cut_is_an_error():
    server = HostileServer(4)
    server.plan = lambda group, index, segment: "cut after the headers"
    with hostile_servers(server, PATIENT, num_servers=2) as (engine, _):
        error = Rollouts(server).run(engine, 1, 1)
    assert "its engine was lost 9 times in a row before a new token came" in error


def test_candidate_that_never_ends_is_an_error():
    server = HostileServer(5)
    server.plan = lambda group, index, segment: "empty chunks for ever"
    with hostile_servers(server, STALLING, num_servers=1) as (engine, _):
        error = Rollouts(server).run(engine, 1, 1)
    assert "no tokens within `vllm_first_token_timeout_s` (0.3 s)" in error


@pytest.mark.parametrize("status", [200, 404, None])
def test_badly_answered_aborts_do_not_hold_the_rollout_up(monkeypatch, status):
    monkeypatch.setattr(aborts, "ABORT_GRACE_S", 0.3)
    server = HostileServer(6)
    server.plan = lambda group, index, segment: "good" if index < 2 else "hangs within the stream"

    async def abort(request: web.Request) -> web.Response:
        while status is None:
            await asyncio.sleep(0.1)
        return web.Response(status=status, body=PAGE)

    routes = {"POST /v1/completions": server.completions, "POST /abort_requests": abort}
    scheduler = Scheduler(make_policies("darts", 2, num_longest=0), 2)
    with fake_server(routes) as url:
        engine = VLLMServerEngine([url], PATIENT)
        start = time.perf_counter()
        (group,) = engine.run(scheduler, [GroupPlan(0, 4)], {0: [ServerPrompt([0, i]) for i in range(4)]}, BODY).groups
        assert time.perf_counter() - start < 2.0
        engine.close()
    assert group.selected == [0, 1]
    check_tokens(scheduler, 0, complete=False)
