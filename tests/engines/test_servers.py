"""
A server that leaves while a rollout is under way that nobody waits for yet. What else becomes of one that was launched
ahead, its evaluations and its end: `tests/test_rollout_ahead.py`.
"""

from __future__ import annotations

import asyncio
import time
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


class Mute:
    """A server that does not answer."""

    def __init__(self) -> None:
        self.num_waiting = 0

    async def completions(self, request: web.Request) -> web.Response:
        self.num_waiting += 1
        while not request.transport.is_closing():
            await asyncio.sleep(0.005)
        return web.Response()


async def answers(request: web.Request) -> web.Response:
    return await answer(completion([7] * 3)) if request.method == "POST" else web.Response()


def routes(completions) -> dict:
    return {"GET /health": answers, "POST /v1/completions": completions}


def launched(servers: VLLMServerEngine) -> tuple[ServerEngine, tuple[RolloutPlan, PromptBatch]]:
    """The engine of a single process, and a rollout that it has launched."""
    main = MainProcess(SimpleNamespace(process_index=0, num_processes=1, is_main_process=True))
    own = dict.fromkeys(SAMPLING) | {"max_completion_length": 8, "generation_kwargs": {}}
    facts = ServerFacts(model="m", max_model_len=100)
    engine = ServerEngine(SimpleNamespace(main=main, engine=servers, facts=facts, bring_back=lambda: None, **own))
    batch = PromptBatch.alone([[5]] * M, M)
    admission = UniformAdmission(M).plan(batch.infos)
    plan = RolloutPlan(admission, admission.plans(batch.infos), Scheduler(make_policies("grpo", M, M, 0), M))
    engine.launch(plan, batch)
    return engine, (plan, batch)


def test_a_server_can_leave_while_a_rollout_is_under_way():
    leaves = Mute()
    with fake_server(routes(answers)) as url, fake_server(routes(leaves.completions)) as other:
        servers = VLLMServerEngine([url, other])
        engine, ahead = launched(servers)
        deadline = time.monotonic() + 10
        while leaves.num_waiting < 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        servers.remove(other)
        (group,) = engine.run(*ahead).groups
        assert [row.tokens for row in group.rows] == [[7] * 3] * M
        servers.close()
