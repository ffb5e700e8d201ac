"""The trainer's engine on servers: rollouts that are launched before anybody waits for them."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from types import SimpleNamespace

from aiohttp import web

from tests.engines.fake_server import answer, completion, fake_server
from trl_darts.engines import VLLMServerEngine
from trl_darts.engines.batch import PromptBatch
from trl_darts.engines.engine import RolloutPlan
from trl_darts.engines.main_process import MainProcess
from trl_darts.engines.preflight import ServerFacts
from trl_darts.engines.servers import ServerEngine
from trl_darts.scheduling import Scheduler, UniformAdmission, make_policies


M = 2
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "structured_outputs_regex")


class Gate:
    """A server that answers with its `version`, as it is when a request comes, once it is `open`."""

    def __init__(self, is_open: bool = True) -> None:
        self.open = is_open
        self.version = 0
        self.num_waiting = 0

    async def completions(self, request: web.Request) -> web.Response:
        version = self.version
        self.num_waiting += 1
        try:
            while not self.open and not request.transport.is_closing():
                await asyncio.sleep(0.005)
        finally:
            self.num_waiting -= 1
        return await answer(completion([version] * 3))

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()


@contextmanager
def server_engine(*gates: Gate):
    if gates:
        routes = {"GET /health": gates[0].health, "POST /v1/completions": gates[0].completions}
        with fake_server(routes) as url, server_engine(*gates[1:]) as urls:
            yield [url, *urls]
    else:
        yield []


@contextmanager
def engine_of(*gates: Gate):
    """A [`ServerEngine`] of a single process."""
    main = MainProcess(SimpleNamespace(process_index=0, num_processes=1, is_main_process=True))
    with server_engine(*gates) as urls:
        own = dict.fromkeys(SAMPLING) | {"max_completion_length": 8, "generation_kwargs": {}}
        servers = VLLMServerEngine(urls)
        facts = ServerFacts(model="m", max_model_len=100)
        try:
            yield ServerEngine(SimpleNamespace(main=main, engine=servers, facts=facts, bring_back=lambda: None, **own))
        finally:
            servers.close()


def rollout() -> tuple[RolloutPlan, PromptBatch]:
    batch = PromptBatch.alone([[5]] * M, M)
    admission = UniformAdmission(M).plan(batch.infos)
    return RolloutPlan(admission, admission.plans(batch.infos), Scheduler(make_policies("grpo", M, M, 0), M)), batch


def versions(result) -> list[int]:
    return [token for group in result.groups for row in group.rows for token in row.tokens]


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_was_launched_is_kept_until_it_is_taken():
    """An evaluation comes between: what was launched ends before it, and is of the version before it."""
    gate = Gate(is_open=False)
    with engine_of(gate) as engine:
        ahead, evaluation = rollout(), rollout()
        engine.launch(*ahead)
        until(lambda: gate.num_waiting == M)
        gate.open = True
        engine.drain()
        assert gate.num_waiting == 0
        engine.drain()  # there is nothing left to wait for
        gate.version = 1
        assert versions(engine.run(*evaluation)) == [1] * 6
        assert versions(engine.run(*ahead)) == [0] * 6
        engine.launch(*(after := rollout()))
        assert versions(engine.run(*after)) == [1] * 6


def test_cancelled_requests_leave_the_server():
    gate = Gate(is_open=False)
    with engine_of(gate) as engine:
        engine.launch(*rollout())
        until(lambda: gate.num_waiting == M)
        engine.cancel()
        until(lambda: gate.num_waiting == 0)
        gate.open = True
        assert versions(engine.run(*rollout())) == [0] * 6


def test_a_server_can_leave_while_a_rollout_is_under_way():
    stays, leaves = Gate(), Gate(is_open=False)
    with engine_of(stays, leaves) as engine:
        ahead = rollout()
        engine.launch(*ahead)
        until(lambda: leaves.num_waiting == 1)
        servers = engine._generation.engine
        servers.remove(servers.base_urls[1])
        assert versions(engine.run(*ahead)) == [0] * 6
