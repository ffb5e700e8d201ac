"""Servers that are removed or lost during a launched rollout. `tests/test_rollout_ahead.py` has its other cases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tests.engines.fake_server import answer, completion
from tests.engines.stub_servers import TOKENS, Stub, engine_on, event_stream, grpo, hangs, send, tokens_of
from tests.waits import wait_for
from trl_darts.engines import VLLMServerEngine, monitor
from trl_darts.engines.batch import PromptBatch
from trl_darts.engines.engine import RolloutPlan
from trl_darts.engines.main_process import MainProcess
from trl_darts.engines.pool import Member
from trl_darts.engines.preflight import ServerFacts
from trl_darts.engines.servers import ServerEngine
from trl_darts.errors import ConfigurationError, WeightsLostError
from trl_darts.scheduling import UniformAdmission


M = 2
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "structured_outputs_regex")


class Breaks(Stub):
    """Cuts its first `M` completions like a server that dies, and is available again at once."""

    async def decode(self, request, body):
        if len(self.requests) > M:
            return await answer(completion(TOKENS))
        response = await event_stream(request)
        await send(response, completion([7], None))
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
    plan = RolloutPlan(admission, admission.plans(batch.infos), grpo(M, **fields))
    engine.launch(plan, batch)
    return engine, (plan, batch)


def test_a_server_can_leave_while_a_rollout_is_under_way():
    leaves = Stub(decode=hangs)
    with engine_on(Stub(), leaves) as servers:
        engine, ahead = launched(servers)
        wait_for(lambda: leaves.requests)
        servers.remove(servers.base_urls[1])
        assert tokens_of(engine.run(*ahead)) == [[TOKENS] * M]


def test_a_server_comes_back_while_nobody_waits_for_the_rollout(monkeypatch):
    """During a long optimizer step, the engine's thread updates the server's weights."""
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    with engine_on(Breaks(), return_s=0.5) as servers:
        engine, ahead = launched(servers)
        time.sleep(1.0)  # longer than a rollout waits for a server
        assert tokens_of(engine.run(*ahead)) == [[[7, *TOKENS]] * M]


@pytest.mark.parametrize("drains", [False, True])
def test_a_launched_rollout_ends_whose_weights_no_server_has_any_more(monkeypatch, drains):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)

    async def can_not_be_sent(member: Member, version: int) -> bool:
        return False

    server = Breaks()
    with engine_on(server, options={"refresh": can_not_be_sent}) as servers:
        engine, ahead = launched(servers)
        if drains:  # before a weight sync
            engine.drain(0)
        with pytest.raises(WeightsLostError, match="reconnected without the weights"):
            engine.run(*ahead)
        assert len(server.requests) == M
        servers.join(servers.base_urls[0])  # the sync
        engine, ahead = launched(servers)
        assert engine.run(*ahead).groups


@pytest.mark.parametrize("carries_tokens", [True, False])
def test_tokens_go_along_only_where_the_sampling_options_let_them(monkeypatch, carries_tokens):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    server = Breaks()
    with engine_on(server) as servers:
        engine, ahead = launched(servers, carries_tokens=carries_tokens)
        assert tokens_of(engine.run(*ahead)) == [[[7] * carries_tokens + TOKENS] * M]
    assert [body["prompt"] for body in server.requests[M:]] == [[5, 7] if carries_tokens else [5]] * M


def test_an_over_long_prompt_of_a_stream_drops_its_group():
    """A data set with a length is checked before the run. `max_model_len` is 100, and answers may have 8 tokens."""
    rows = [[5] * length for length in (92, 92, 93, 93, 3, 3)]
    server = Stub()
    with engine_on(server) as servers:
        engine, ahead = launched(servers, rows, drop_failed_groups=True)
        result = engine.run(*ahead)
        with pytest.raises(ConfigurationError, match=r"1 prompts of this batch are longer than 92 tokens .*has 93"):
            launched(servers, rows)
    assert [group.plan.group_id for group in result.groups] == [0, 2]
    assert sorted(len(body["prompt"]) for body in server.requests) == [3, 3, 92, 92]
    (reason,) = result.dropped.values()
    assert "of prompt 1 on" in reason
    assert "it has 93 tokens, and may have 92: 8 more (of `max_completion_length`, 8) would exceed" in reason
