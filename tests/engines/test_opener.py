"""
Candidates that share an HTTP request: each has its own tokens, its own end and its own failure. On stubs; the other
tests with a real server share requests too.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from tests.engines.fake_server import completion
from tests.engines.stub_servers import BODY, Stub, engine_on, event_stream, run, send, tokens_of
from tests.policies import make_policies
from tests.waits import wait_for
from trl_darts.engines import ServerPrompt, monitor, vllm_rollout
from trl_darts.engines.opener import MAX_CONSIDERED, MAX_SHARED, CandidateStream, Opener
from trl_darts.engines.vllm_api import CompletionRequest
from trl_darts.scheduling import GroupPlan, Scheduler


LENGTH = 8


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr(vllm_rollout, "RETRY_S", 0.001)
    monkeypatch.setattr(vllm_rollout, "CLOCK_S", 0.02)


def right_tokens(group: int) -> list[int]:
    return [100 * (group + 1) + position for position in range(LENGTH)]


async def connected(request, seconds):
    """Sleeps while the client is connected."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(0.004)
        if request.transport is None:
            raise ConnectionError


class SharingServer(Stub):
    """
    Decodes the prompts of a request together, like vLLM: an aborted one ends with a chunk if it has tokens, and
    without any chunk otherwise. Group i has `right_tokens(i)`.
    """

    def __init__(self, seed=0, step_s=0.005, **methods):
        super().__init__(64)
        self.seed, self.step_s = seed, step_s
        self.running, self.aborted, self.cut_off = set(), set(), set()
        self.silent = lambda group, place, position: False  # who gets no more tokens until it is aborted
        self.late_s = lambda group, place: 0.0  # how long who does not yet run, so that no abort ends it
        self.error_at = {}  # position of an error in the stream, by group
        self.refused = set()  # groups
        self.cuts = False  # whether connections are cut after half of the tokens
        vars(self).update(methods)

    async def server_info(self, request):
        config = {"scheduler_config": {"max_num_seqs": 64}, "model_config": {"seed": self.seed}}
        return web.json_response({"vllm_config": config})

    async def abort(self, request):
        self.aborts.append((await request.json())["request_ids"])
        self.aborted |= self.running & set(self.aborts[-1])
        return web.json_response({})

    @property
    def sizes(self) -> list[int]:
        return [len(self.prompts_of(body)) for body in self.requests]

    @staticmethod
    def prompts_of(body):
        return body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]

    async def decode(self, request, body):
        prompts = self.prompts_of(body)
        if self.refused & {prompt[0] for prompt in prompts}:
            return web.json_response({"error": {"message": "what a prompt", "code": 400}}, status=400)
        response = await event_stream(request)
        names = [f"cmpl-{body['request_id']}-{place}" for place in range(len(prompts))]
        try:
            choices = zip(names, range(len(prompts)), prompts, strict=True)
            await asyncio.gather(*(self._choice(request, response, *each) for each in choices))
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass
        finally:
            self.running.difference_update(names)
        return response

    async def _choice(self, request, response, name, place, prompt):
        group, *prior = prompt
        assert prior == right_tokens(group)[: len(prior)]
        await connected(request, self.late_s(group, place))
        self.running.add(name)
        for position in range(len(prior), LENGTH):
            await connected(request, self.step_s)
            while self.silent(group, place, position) and name not in self.aborted:
                await connected(request, self.step_s)
            if name in self.aborted:
                self.cut_off.add((group, place, position))
                if position > len(prior):
                    await self._send(response, place, [], "abort")
                break
            if position == self.error_at.get(group):
                await send(response, {"error": {"message": "it broke", "code": 500}})
                raise ConnectionError
            if self.cuts and position == LENGTH // 2:
                request.transport.abort()
                raise ConnectionError
            is_last = position == LENGTH - 1
            await self._send(
                response, place, right_tokens(group)[position : position + 1], "stop" if is_last else None
            )
        self.running.discard(name)

    @staticmethod
    async def _send(response, place, tokens, reason):
        message = completion(tokens, reason)
        message["choices"][0]["index"] = place
        await send(response, message)


def check_rows(result, groups):
    assert [{tuple(tokens) for tokens in group} for group in tokens_of(result)] == [
        {tuple(right_tokens(group))} for group in groups
    ]


# Who shares


def test_candidates_of_several_prompts_share_requests():
    server = SharingServer()
    with engine_on(server) as engine:
        check_rows(run(engine, 10, 4), range(10))
    assert server.sizes == [16, 16, 8]
    assert not server.aborts
    assert not server.running


def test_with_a_seed_each_candidate_has_a_request_of_its_own():
    """With one seed, candidates of a prompt would be equal."""
    server = SharingServer()
    with engine_on(server) as engine:
        check_rows(run(engine, 2, 4, overrides=lambda command: {"seed": 3}), range(2))
    assert server.sizes == [1] * 8


def test_on_a_server_of_unknown_sampling_too():
    server = SharingServer(seed=None)
    with engine_on(server) as engine:
        check_rows(run(engine, 2, 4), range(2))
    assert server.sizes == [1] * 8


def test_candidates_with_other_options_do_not_share():
    server = SharingServer()
    with engine_on(server) as engine:
        check_rows(run(engine, 2, 4, overrides=lambda command: {"temperature": command.index % 2 / 2}), range(2))
    assert server.sizes == [4, 4]
    assert [body["temperature"] for body in server.requests] == [0.0, 0.5]


@pytest.mark.parametrize("num", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("num_kinds", [1, 2, 40])
def test_each_that_waits_is_sent_once_and_the_first_at_once(num, num_kinds):
    opener = Opener(None, lambda: None)
    options = [{"model": "m", "temperature": index % num_kinds} for index in range(num)]
    requests = [CompletionRequest.of(str(i), ServerPrompt([i]), [], own) for i, own in enumerate(options)]
    waiting = [CandidateStream(request, True) for request in requests]
    opener._waiting = dict.fromkeys(waiting)
    seen = []
    while opener._waiting:
        first = next(iter(opener._waiting))
        before = list(opener._waiting)
        sent = opener._next()
        assert sent[0] is first
        assert len({stream.kind for stream in sent}) == 1
        alike = [stream for stream in before[:MAX_CONSIDERED] if stream.kind == first.kind]
        assert sent == alike[:MAX_SHARED]
        seen += sent
    assert sorted(map(waiting.index, seen)) == list(range(num))


# Aborts. Of four groups of four candidates, of which two are rows, the first eight places are those of rows


def four_groups(engine, **kwargs):
    plans, prompts = [GroupPlan(i, 4) for i in range(4)], {i: [ServerPrompt([i])] for i in range(4)}
    return engine.start(Scheduler(make_policies("darts", 2, num_longest=0), 2), plans, prompts, BODY, **kwargs)


def test_spare_candidates_without_tokens_end_at_once():
    """The server says nothing of an aborted request without tokens, and would go on with the others for a minute."""
    server = SharingServer(silent=lambda group, place, position: place >= 8 and group == 0)
    server.late_s = lambda group, place: 60.0 * (place == 9)
    with engine_on(server) as engine:
        start = time.monotonic()
        result = engine.wait(four_groups(engine))
        assert time.monotonic() - start < 2.0
        check_rows(result, range(4))
        wait_for(lambda: not server.running, 2.0)
    assert server.sizes == [16]


def test_aborted_candidates_keep_their_tokens_and_others_go_on():
    server = SharingServer(silent=lambda group, place, position: place >= 8 and position == 3)
    server.late_s = lambda group, place: 0.5 * (place < 8) + 0.5 * (group == 3)
    with engine_on(server) as engine:
        result = engine.wait(four_groups(engine))
    check_rows(result, range(4))
    for group in result.groups:
        assert [list(row.tokens) for row in group.candidates[2:]] == [right_tokens(group.plan.group_id)[:3]] * 2
    assert server.sizes == [16]


def test_an_abort_that_overtakes_its_candidate_is_sent_again():
    """The spare ones of the first groups run when they were aborted already. They are aborted at their first token."""
    server = SharingServer(step_s=0.02)
    server.late_s = lambda group, place: 0.4 * (place >= 8) + 0.8 * (group == 3)
    with engine_on(server) as engine:
        result = engine.wait(four_groups(engine))
    check_rows(result, range(4))
    spare = {(group, place) for group, place, _ in server.cut_off if group < 3}
    assert len(spare) == 6
    assert all(1 <= position <= 4 for group, _, position in server.cut_off if group < 3)


def test_an_interrupted_rollout_leaves_nothing_behind():
    server = SharingServer(silent=lambda group, place, position: True)
    with engine_on(server) as engine:
        future = four_groups(engine)
        wait_for(lambda: len(server.running) == 16)
        start = time.monotonic()
        future.cancel()
        engine.call(engine.idle())
        assert time.monotonic() - start < 2.0
        wait_for(lambda: not server.running, 2.0)


# Failures


def test_a_prompt_that_is_refused_fails_alone():
    server = SharingServer(refused={2})
    with engine_on(server) as engine:
        result = run(engine, 6, 2, drops=True)
        assert list(result.dropped) == [2]
        assert "what a prompt" in result.dropped[2]
        check_rows(result, [0, 1, 3, 4, 5])
        assert engine.num_losses == 0
    assert server.sizes[0] == 12
    assert set(server.sizes[1:]) == {1}


def test_what_breaks_a_stream_costs_no_server_and_no_token():
    """The candidates of all groups go on from their tokens, and the cause is found: it fails by itself."""
    server = SharingServer(error_at={2: 4})
    with engine_on(server) as engine:
        result = run(engine, 6, 2, drops=True)
        assert engine.num_losses == 0
    assert list(result.dropped) == [2]
    assert "it broke" in result.dropped[2]
    check_rows(result, [0, 1, 3, 4, 5])
    prior = [len(body["prompt"]) - 1 for body in server.requests[1:] if body["prompt"][0] != 2]
    assert len(prior) == 10
    assert min(prior) >= 3


def test_a_connection_that_is_cut_loses_its_server_once():
    server, other = SharingServer(cuts=True), SharingServer(seed=1)
    with engine_on(server, other) as engine:
        result = run(engine, 8, 4)
        assert engine.members[engine.base_urls[0]].num_losses == 1
    check_rows(result, range(8))
    assert result.num_resumed == 16
    assert sum(other.sizes) == 32


def test_a_candidate_that_stalls_is_tried_elsewhere_and_the_others_go_on():
    server, other = SharingServer(step_s=0.2), SharingServer(seed=1)
    server.silent = lambda group, place, position: place == 0 and position == 3
    with engine_on(server, other, first_token_s=0.6, token_s=0.6) as engine:
        result = run(engine, 8, 4)
        assert engine.num_losses == 0
        wait_for(lambda: not server.running, 2.0)
    check_rows(result, range(8))
    assert result.num_resumed == 1
    assert server.cut_off == {(0, 0, 3)}
