"""Servers that are removed or lost during a launched rollout. `tests/test_rollout_ahead.py` has its other cases."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.engines.fake_server import answer, completion, fake_server
from trl_darts.engines import VLLMServerEngine, monitor
from trl_darts.engines.batch import PromptBatch
from trl_darts.engines.engine import RolloutPlan
from trl_darts.engines.main_process import MainProcess
from trl_darts.engines.pool import Member
from trl_darts.engines.preflight import ServerFacts
from trl_darts.engines.servers import ServerEngine
from trl_darts.engines.waiting import Deadlines
from trl_darts.errors import ConfigurationError, WeightsLostError
from trl_darts.scheduling import Scheduler, ScheduleSettings, UniformAdmission


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


class Breaks:
    """Cuts its first completions like a server that dies, and is available again at once."""

    def __init__(self, num_cut: int) -> None:
        self.num_left = num_cut
        self.prompts: list[list[int]] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.prompts.append((await request.json())["prompt"])
        if not self.num_left:
            return await answer(completion([7] * 3))
        self.num_left -= 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(completion([7], None)).encode() + b"\n\n")
        await asyncio.sleep(0.05)
        request.transport.close()
        return response


def launched(
    servers: VLLMServerEngine, rows: Sequence[list[int]] = ([5],) * M, **fields
) -> tuple[ServerEngine, tuple[RolloutPlan, PromptBatch]]:
    """Returns the engine of a single process, and the rollout that it has launched."""
    main = MainProcess(SimpleNamespace(process_index=0, num_processes=1, is_main_process=True))
    own = dict.fromkeys(SAMPLING) | {"max_completion_length": 8, "generation_kwargs": {}}
    facts = ServerFacts(model="m", max_model_len=100)
    own |= {"main": main, "own_engine": servers, "settings": SimpleNamespace(seed=42)}
    engine = ServerEngine(SimpleNamespace(facts=facts, bring_back=lambda: None, **own))
    batch = PromptBatch.alone(list(rows), M)
    admission = UniformAdmission(M).plan(batch.infos)
    scheduler = Scheduler(ScheduleSettings("grpo", M).policies(), M, **fields)
    plan = RolloutPlan(admission, admission.plans(batch.infos), scheduler)
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


def test_a_server_comes_back_while_nobody_waits_for_the_rollout(monkeypatch):
    """During a long optimizer step, the engine's thread updates the server's weights."""
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    server = Breaks(num_cut=M)
    with fake_server(routes(server.completions)) as url:
        servers = VLLMServerEngine([url], Deadlines(return_s=0.5))
        engine, ahead = launched(servers)
        time.sleep(1.5)  # longer than a rollout waits for a server
        (group,) = engine.run(*ahead).groups
        assert [row.tokens for row in group.rows] == [[7] * 4] * M
        servers.close()


@pytest.mark.parametrize("drains", [False, True])
def test_a_launched_rollout_ends_whose_weights_no_server_has_any_more(monkeypatch, drains):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)

    async def can_not_be_sent(member: Member, version: int) -> bool:
        return False

    server = Breaks(num_cut=M)
    with fake_server(routes(server.completions)) as url:
        servers = VLLMServerEngine([url], refresh=can_not_be_sent)
        engine, ahead = launched(servers)
        if drains:  # before a weight sync
            engine.drain(0)
        with pytest.raises(WeightsLostError, match="reconnected without the weights"):
            engine.run(*ahead)
        assert len(server.prompts) == M
        servers.join(url)  # the sync
        engine, ahead = launched(servers)
        assert engine.run(*ahead).groups
        servers.close()


@pytest.mark.parametrize("carries_tokens", [True, False])
def test_tokens_go_along_only_where_the_sampling_options_let_them(monkeypatch, carries_tokens):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    server = Breaks(num_cut=M)
    with fake_server(routes(server.completions)) as url:
        servers = VLLMServerEngine([url])
        engine, ahead = launched(servers, carries_tokens=carries_tokens)
        (group,) = engine.run(*ahead).groups
        servers.close()
    assert server.prompts[M:] == [[5, 7] if carries_tokens else [5]] * M
    assert [row.tokens for row in group.rows] == [[7] * (3 + carries_tokens)] * M


def test_an_over_long_prompt_of_a_stream_drops_its_group():
    """A data set with a length is checked before the run. `max_model_len` is 100, and answers may have 8 tokens."""
    rows = [[5] * length for length in (92, 92, 93, 93, 3, 3)]
    asked = []

    async def completions(request):
        asked.append(len((await request.json())["prompt"]))
        return await answer(completion([7] * 3))

    with fake_server(routes(completions)) as url:
        servers = VLLMServerEngine([url])
        engine, ahead = launched(servers, rows, drop_failed_groups=True)
        result = engine.run(*ahead)
        with pytest.raises(ConfigurationError, match=r"1 prompts of this batch are longer than 92 tokens .*has 93"):
            launched(servers, rows)
        servers.close()
    assert [group.plan.group_id for group in result.groups] == [0, 2]
    assert sorted(asked) == [3, 3, 92, 92]
    (reason,) = result.dropped.values()
    assert "of prompt 1 on" in reason
    assert "it has 93 tokens, and may have 92: 8 more (of `max_completion_length`, 8) would exceed" in reason
