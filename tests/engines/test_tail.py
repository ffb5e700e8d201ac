"""
The end of a rollout moves between servers of two layouts. No token is lost or doubled, whatever fails, and servers
that share GPUs never decode at the same time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from aiohttp import web

from tests.engines.fake_server import fake_server
from tests.engines.stub_servers import BODY, Stub, event_stream, send
from tests.policies import make_policies
from trl_darts.engines import ServerPrompt, VLLMServerEngine, aborts, monitor, vllm_server
from trl_darts.engines.pool import State
from trl_darts.engines.waiting import Deadlines
from trl_darts.scheduling import FinishReason, GroupPlan, Scheduler, TailPolicy, TailServers


LENGTHS = [[4, 60], [6, 90], [5, 5]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(vllm_server, "PROGRESS_INTERVAL_S", 0.004)
    monkeypatch.setattr(aborts, "ABORT_RESEND_S", 0.01)


class Decoder(Stub):
    """
    Token t of a completion is t, its log-prob -t. Candidate `index` of prompt `[group, index]` has its scripted
    length.
    """

    def __init__(self) -> None:
        super().__init__(more_routes={"POST /sleep": self.sleep, "POST /wake_up": self.wake_up})
        self.peers: list[Decoder] = []  # on the same GPUs
        self.asleep = False
        self.wakes = True
        self.dead = False
        self.life = 0
        self.num_running = 0
        self.num_tokens = 0
        self.waits_at: int | None = None  # a token before which a request waits until it is aborted
        self.aborted: set[str] = set()
        self.problems: list[str] = []

    def die(self) -> None:
        """Ends all that the server decodes, even if it is available again before the next token."""
        self.dead, self.life, self.num_running = True, self.life + 1, 0

    async def decode(self, request: web.Request, body: dict) -> web.StreamResponse:
        group, index, *prior = body["prompt"]
        if self.dead:
            return hang_up(request)
        if self.asleep or prior != list(range(len(prior))):
            self.problems.append(f"{group} {index}: asleep {self.asleep}, {prior}")
        self.num_running += 1
        life = self.life
        try:
            return await self._stream(request, body["request_id"], range(len(prior), LENGTHS[group][index]))
        finally:
            self.num_running -= life == self.life

    async def _stream(self, request: web.Request, request_id: str, tokens: range) -> web.StreamResponse:
        life = self.life
        response = await event_stream(request)
        for token in tokens:
            await asyncio.sleep(0.004)
            while token == self.waits_at and f"cmpl-{request_id}-0" not in self.aborted:
                await asyncio.sleep(0.004)
            if self.life != life:
                return hang_up(request)
            if any(peer.num_running for peer in self.peers):
                self.problems.append("it decodes beside one on the same GPUs")
            self.num_tokens += 1
            stopped = f"cmpl-{request_id}-0" in self.aborted
            reason = "stop" if token == tokens[-1] else "abort" if stopped else None
            choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-float(token)]}, "finish_reason": reason}
            await send(response, {"choices": [{"index": 0, **choice}]})
            if reason is not None:
                break
        return response

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted |= set((await request.json())["request_ids"])
        return web.json_response({})

    async def sleep(self, request: web.Request) -> web.Response:
        self.problems += ["it was put to sleep while it decodes"] if self.num_running else []
        self.asleep = True
        return web.Response()

    async def wake_up(self, request: web.Request) -> web.Response:
        if not self.wakes:
            return web.Response(status=500, text="out of memory")
        self.asleep = False
        return web.Response()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=500 if self.dead else 200)


def hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:  # the client may have done so before
        request.transport.close()
    return web.Response()


@contextmanager
def two_kinds(takes_turns: bool, num_main: int = 1) -> Iterator[tuple[VLLMServerEngine, list[Decoder], list[str]]]:
    """Main servers, and a tail server as the last one."""
    decoders: list[Decoder] = [Decoder() for _ in range(num_main + 1)]
    *main, tail = decoders
    if takes_turns:
        tail.peers = main
        for own in main:
            own.peers = [tail]
    with ExitStack() as stack:
        urls = [stack.enter_context(fake_server(own.routes)) for own in decoders]
        engine = VLLMServerEngine(urls, Deadlines(return_s=5.0), None, urls[-1:], takes_turns)
        stack.callback(engine.close)
        yield engine, decoders, urls
    assert [own.problems for own in decoders] == [[]] * len(decoders)


def run(engine, switch_at=2, takes_turns=False, on_progress=lambda: None):
    """Runs a rollout and checks every row."""
    policies = make_policies("grpo", 2, tail=TailPolicy(TailServers(takes_turns=takes_turns), switch_at))
    scheduler = Scheduler(policies, 2)
    prompts = {group: [ServerPrompt([group, index]) for index in range(2)] for group in range(len(LENGTHS))}
    plans = [GroupPlan(group, 2, num_prompt_tokens=2) for group in range(len(LENGTHS))]
    result = engine.run(scheduler, plans, prompts, BODY, on_progress=lambda _: on_progress())
    for group, lengths in zip(result.groups, LENGTHS, strict=True):
        assert [row.tokens for row in group.rows] == [list(range(length)) for length in lengths]
        assert [row.logprobs for row in group.rows] == [[-float(t) for t in range(length)] for length in lengths]
    ledger = scheduler.ledger
    assert (ledger.num_open, ledger.num_running) == (0, 0)
    assert all(candidate.finish_reason is not FinishReason.ABORT for candidate in ledger.candidates)
    return result


def test_what_is_left_moves_with_its_tokens():
    with two_kinds(takes_turns=False, num_main=2) as (engine, (one, other, tail), _):
        one.waits_at = other.waits_at = 20
        result = run(engine)
        assert result.tail_switch.num_moved == 2
        assert result.num_resumed == 0
        assert tail.num_tokens > 100  # of 150: a main server has at most 21 of each
        assert one.num_tokens + other.num_tokens + tail.num_tokens == sum(map(sum, LENGTHS))
        one.waits_at = other.waits_at = None
        tail.num_tokens = 0
        assert run(engine, switch_at=0).tail_switch is None
        assert tail.num_tokens == 0


def test_servers_on_the_same_gpus_take_turns():
    with two_kinds(takes_turns=True, num_main=2) as (engine, (one, other, tail), _):
        for _ in range(2):
            assert run(engine, takes_turns=True).tail_switch.num_moved == 2
            assert tail.asleep
            assert not one.asleep
            assert not other.asleep
        assert tail.num_tokens > 200


def test_a_tail_server_that_does_not_wake_is_left_alone():
    with two_kinds(takes_turns=True) as (engine, (main, tail), urls):
        tail.wakes = False
        assert run(engine, takes_turns=True).tail_switch.num_moved == 2
        assert tail.num_tokens == 0
        assert not main.asleep
        assert engine.num_losses == 1
        assert engine.states()[urls[0]] is State.UP


@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_tail_server_that_dies_gives_back(takes_turns):
    with two_kinds(takes_turns) as (engine, (main, tail), _):

        def die_and_return():
            if tail.num_tokens > 40 and not tail.life:
                tail.die()
            elif main.num_tokens > 60:
                tail.dead = False

        result = run(engine, takes_turns=takes_turns, on_progress=die_and_return)
        assert result.num_resumed == 2
        assert main.num_tokens > 60
        assert tail.num_tokens < 60  # it is back, and has had its turn
        assert (main.asleep, tail.asleep) == (False, takes_turns)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_twenty_kills_of_either_kind(takes_turns):
    """Servers are killed at random moments and available again a moment later."""
    rng, kills = random.Random(0), 0
    with two_kinds(takes_turns, num_main=2) as (engine, decoders, _):

        def kill():
            nonlocal kills
            for own in decoders:
                if own.dead and rng.random() < 0.2:
                    own.dead = own.asleep = False
                elif not own.dead and not own.asleep and rng.random() < 0.02:
                    own.die()
                    kills += 1

        while kills < 20:
            run(engine, switch_at=rng.choice([1, 2, 4]), takes_turns=takes_turns, on_progress=kill)
            for own in decoders:
                own.dead = False
