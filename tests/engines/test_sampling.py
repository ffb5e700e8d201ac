"""Sampling options that another request can't continue, and seeds: each visit of a prompt has its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import ExitStack
from dataclasses import fields
from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.builders import make_args
from tests.engines.fake_server import answer, completion, fake_server
from tests.engines.test_preflight import CONFIG, check, needs, routes
from trl_darts.checks import _check_seed
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.pool import State
from trl_darts.engines.sampling import PER_REQUEST, RolloutSeed, not_carried, user_seed
from trl_darts.engines.servers import ServerEngine
from trl_darts.errors import ConfigurationError
from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings


def test_no_two_candidates_have_the_same_seed():
    rollouts = itertools.product((0, 1, 2**63), (0, 1), (0, 1, 50), (1, 2))
    seeds = [
        RolloutSeed(base, rollout).of(*candidate)
        for base, *rollout in rollouts
        for candidate in itertools.product((0, 1, 31), (0, 1, 7), (0, 1))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert RolloutSeed(3, (0, 1)).of(2, 1) == RolloutSeed(3, (0, 1), always=True).of(2, 1, segment=0)


def test_a_users_seed(tmp_path):
    assert [user_seed(given) for given in (None, {}, {"seed": None}, {"seed": -1}, {"seed": -5})] == [None] * 4 + [-5]
    for wrong in (1.5, "3", True):
        with pytest.raises(ConfigurationError, match=r"`generation_kwargs\['seed'\]` \(.*\) must be a whole number"):
            make_args(tmp_path, use_vllm=True, generation_kwargs={"seed": wrong})
    with pytest.raises(ConfigurationError, match=r"`generation_kwargs` \('seed'\) must have names of transformers'"):
        make_args(tmp_path, generation_kwargs={"seed": 3})


def test_later_turns_that_trl_generates_have_no_seed():
    args = SimpleNamespace(colocates=True, generation_kwargs={"seed": 3})
    _check_seed(SimpleNamespace(args=args, tools=None, environment_factories=None))
    with pytest.raises(ConfigurationError, match=r"`generation_kwargs\['seed'\]` \(3\) does not run with tools"):
        _check_seed(SimpleNamespace(args=args, tools=[print], environment_factories=None))


class Seeded:
    """A server that records the seeds of its requests, and may be an older one on a CPU."""

    def __init__(self, seed: int | None = 0, copies: int = 1, on_cpu: bool = False, cured: bool = False) -> None:
        self.config = {
            "model_config": {"logprobs_mode": "processed_logprobs", "model": "served", "seed": seed},
            "parallel_config": {"data_parallel_size": copies},
            "device_config": {"device": "cpu" if on_cpu else "cuda"},
            "scheduler_config": {"max_num_seqs": 4},
        }
        self.cured = cured
        self.seeds: list[int | None] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "stream" not in body:
            return await routes(self.config)["POST /v1/completions"](request)
        self.seeds.append(body.get("seed"))
        return await answer(completion([7] * 3))

    async def rpc(self, request: web.Request) -> web.Response:
        results = [{"trl_darts": "0.1.0", "seeds": True}, {"trl_darts": "0.1.0", "seeds": self.cured}]
        return await answer({"results": results})

    @property
    def routes(self) -> dict:
        own = {"POST /v1/completions": self.completions, "POST /collective_rpc": self.rpc}
        return routes(self.config) | own


def sampled(*servers: Seeded, always: bool = False, joins: Seeded | None = None) -> list[list[int | None]]:
    """Runs rollouts of one prompt, after a server may have joined, and returns the seeds that each server got."""
    with ExitStack() as stack:
        urls = [stack.enter_context(fake_server(server.routes)) for server in servers]
        engine = VLLMServerEngine(urls)
        if joins is not None:

            async def nothing(server):
                return None

            engine.add(stack.enter_context(fake_server(joins.routes)), nothing)
            servers = (*servers, joins)
            engine.call(_until_up(engine))
        prompts, body = {0: [ServerPrompt([5])]}, {"model": "m", "max_tokens": 8}
        scheduler = Scheduler(ScheduleSettings("grpo", 8).policies(), 8)
        engine.run(scheduler, [GroupPlan(0, 8)], prompts, body, seed=RolloutSeed(5, (0, 0, 1), always))
        engine.close()
    return [server.seeds for server in servers]


async def _until_up(engine):
    members = (await engine.pool()).members.values()
    async with asyncio.timeout(10):
        while any(member.sampling is None or member.state is not State.UP for member in members):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "servers",
    [
        [Seeded(), Seeded()],
        [Seeded(seed=3), Seeded(seed=3, copies=2)],
        [Seeded(copies=2)],  # data parallelism spreads the candidates of a prompt by itself
        [Seeded(seed=None)],
        [Seeded(on_cpu=True, cured=True), Seeded(on_cpu=True, cured=True)],
    ],
)
def test_requests_have_seeds_where_engines_sample_alike(servers):
    seeds = [seed for own in sampled(*servers) for seed in own]
    assert len(seeds) == len(set(seeds)) == 8
    assert None not in seeds


@pytest.mark.parametrize("servers", [[Seeded()], [Seeded(seed=1), Seeded(seed=2)]])
def test_others_sample_in_batches(servers, caplog):
    """A request with a seed takes time of the server's sampler."""
    assert {seed for own in sampled(*servers) for seed in own} == {None}
    for server in servers:
        server.seeds.clear()
    given = [seed for own in sampled(*servers, always=True) for seed in own]
    assert len(set(given)) == len(given) == 8
    assert None not in given
    assert not [record for record in caplog.records if "may be equal" in record.message]


def test_one_server_with_seeds_differs_from_one_without(caplog):
    old, new = sampled(Seeded(on_cpu=True), Seeded())
    assert {*old} == {None}
    assert None not in new
    assert "may be equal" not in caplog.text


def test_a_server_that_joins_samples_like_another():
    one, other = sampled(Seeded(seed=1), joins=Seeded(seed=1))
    assert None not in (*one, *other)
    assert len({*one, *other}) == 8
    one, other = sampled(Seeded(seed=1), joins=Seeded(seed=2))
    assert {*one, *other} == {None}


@pytest.mark.parametrize("servers", [[Seeded(on_cpu=True), Seeded(on_cpu=True)], [Seeded(on_cpu=True, copies=2)]])
def test_servers_that_seeds_would_end_get_none_and_one_warning(servers, caplog):
    with caplog.at_level(logging.WARNING):
        assert {seed for own in sampled(*servers) for seed in own} == {None}
    (message,) = [record.message for record in caplog.records if "may be equal" in record.message]
    assert "pip install -U trl-darts" in message
    assert "`trl-darts serve`" in message


def test_a_users_seed_is_refused_where_it_would_end_the_server():
    with fake_server(Seeded(on_cpu=True).routes) as url:
        check(url, needs(CONFIG, weight_transfer=None))
        for continuous in (False, True):
            with pytest.raises(ConfigurationError, match=r"`generation_kwargs\['seed'\]` \(3\) would end .* on a CPU"):
                check(url, needs(CONFIG, weight_transfer=None, sampling={"seed": 3}, continuous=continuous))
    for server in (Seeded(on_cpu=True, cured=True), Seeded()):
        with fake_server(server.routes) as url:
            check(url, needs(CONFIG, weight_transfer=None, sampling={"seed": 3}))


def engine_of(process: int = 0, seed: int = 42, given: int | None = None) -> ServerEngine:
    kwargs = {} if given is None else {"seed": given}
    settings, main = SimpleNamespace(seed=seed), SimpleNamespace(index=process, is_here=process == 0)
    return ServerEngine(SimpleNamespace(main=main, settings=settings, generation_kwargs=kwargs))


@pytest.mark.parametrize("given", [None, 7])
def test_every_rollout_of_a_run_has_another_seed(given):
    """On each process, which have later turns of their own, and after the run was resumed."""
    seeds = []
    for engine, steps in ((engine_of(given=given), (0, 0, 1, 49)), (engine_of(1, given=given), (0, 49))):
        for step in steps:
            engine.drain(step)
            seeds.append(engine._next_seed())
    resumed = engine_of(given=given)
    resumed.drain(50)
    seeds += [resumed._next_seed(), resumed._next_seed()]
    assert len({seed.of(0, 0) for seed in seeds}) == len(seeds)
    assert {seed.always for seed in seeds} == {given is not None}
    assert {seed.base for seed in seeds} == {42 if given is None else given}
    assert engine_of(seed=1)._next_seed().of(0, 0) != engine_of(seed=2)._next_seed().of(0, 0)


# Options


def test_options_that_are_not_set_do_not_count():
    assert not_carried({"stop": None, "presence_penalty": 0.0, "bad_words": [], "repetition_penalty": 1.1}) == {}
    assert not_carried({"stop": "\n\n", "temperature": 0.7}) == {"stop": "\n\n"}


@pytest.mark.vllm
def test_every_option_is_known_to_vllm():
    """Contract: a renamed option would be ignored silently. `response_format` is an option of the API only."""
    from vllm import SamplingParams

    names = set(SamplingParams.__struct_fields__) if hasattr(SamplingParams, "__struct_fields__") else set()
    names = names or {field.name for field in fields(SamplingParams)}
    assert set(PER_REQUEST) - {"response_format"} <= names
