"""A rollout without an end on stub servers: what a batch or a wave waits for, and what it remembers."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.engines.fake_server import completion
from tests.engines.stub_servers import BODY, TOKENS, Stub, engine_on, event_stream, send
from tests.waits import wait_for
from trl_darts.engines import ServerPrompt
from trl_darts.engines.continuous_run import ContinuousRun
from trl_darts.scheduling import FinishedGroups, FinishReason, GroupPlan, Scheduler, ScheduleSettings
from trl_darts.scheduling.continuous import Continuous


M = 2


class DeafServer(Stub):
    """Each prompt's third candidate has one token and no end. An abort is answered after `release` alone."""

    def __init__(self):
        super().__init__(64)
        self.release = asyncio.Event()
        self.counts = Counter()

    async def abort(self, request):
        await self.released(request)
        return await super().abort(request)

    async def decode(self, request, body):
        response, prompt = await event_stream(request), body["prompt"][0]
        self.counts[prompt] += 1
        if self.counts[prompt] <= M:
            await send(response, completion(TOKENS))
            return response
        await send(response, completion([7], None))
        await self.released(request)
        await send(response, completion([8], "abort"))  # late: nobody waits for it any more
        return response

    async def released(self, request):
        """Waits for `release`, while the client is connected."""
        while not self.release.is_set() and request.transport is not None:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("answers", [True, False], ids=["the abort is answered", "it never is"])
def test_a_wave_does_not_wait_for_the_end_of_what_it_aborts(answers):
    """Aborted candidates end with what has arrived, and late tokens belong to nobody."""
    server = DeafServer()
    policies = ScheduleSettings("darts", M, rollout_ahead="continuous").policies(batch_stop=Continuous())
    scheduler = Scheduler(policies, M)
    with engine_on(server) as engine:
        run, _ = engine.open(scheduler, BODY, None, step=0, keeps_kv=False)
        wait_for(lambda: run.has_begun)
        plans, prompts = [GroupPlan(i, M + 1) for i in range(2)], {i: [ServerPrompt([i])] for i in range(2)}
        engine.call(add(run, plans, prompts))
        wait_for(lambda: len(scheduler.takeable) == 2 and sum(c.length == 1 for c in scheduler.ledger.candidates) == 2)
        for group_id in range(2):
            (group,) = engine.submit(run.take(FinishedGroups(1))).result(timeout=3).groups
            assert group.plan.group_id == group_id
            assert [row.tokens for row in group.rows] == [TOKENS] * M
            (aborted,) = [own for own in group.candidates if own.finish_reason is FinishReason.ABORT]
            assert aborted.tokens == [7]
        assert not scheduler.ledger.candidates
        if answers:
            server.release.set()
            wait_for(lambda: server.aborts and not run.requests and not server.num_open)
            assert aborted.tokens == [7]
            assert run.error is None
    wait_for(lambda: not server.num_open)


async def add(run, plans, prompts):
    run.add(plans, prompts)


def test_what_a_rollout_without_end_knows_does_not_grow():
    """One entry for each version of the weights that a server has, however many syncs there were."""
    members = {"a": SimpleNamespace(version=0), "b": SimpleNamespace(version=0)}
    own = SimpleNamespace(version=0, members=members)
    run = object.__new__(ContinuousRun)
    run.pool, run.step, run._steps = own, 0, {0: 0}
    for sync in range(1, 100):
        own.version, run.step = sync, 10 * sync
        members["a"].version = sync  # the other one is lost
        assert run._step_of(sync) == 10 * sync
    assert run._steps == {0: 0, 99: 990}
    assert run._step_of(0) == 0
