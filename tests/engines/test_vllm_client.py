"""The server engine against servers that misbehave: a clear error or a clean end, never a hang."""

import asyncio
import concurrent.futures
import gc

import pytest

from tests.engines.fake_server import answer, completion
from tests.engines.stub_servers import Stub, engine_on, hangs, rollout_of, run
from tests.policies import make_policies
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.vllm_api import CompletionRequest, parse_choice
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.scheduling import GroupPlan, Scheduler


def darts(**kwargs) -> Scheduler:
    return Scheduler(make_policies("darts", 2, **kwargs), 2)


def test_abort_that_overtakes_its_request_is_sent_again():
    released = asyncio.Event()

    async def decode(request, body):
        if "-0-0" in body["request_id"] or "-1-0" in body["request_id"]:
            return await answer(completion([4, 5, 6]))
        await released.wait()
        return await answer(completion([4], "abort"))

    async def abort(request):
        if len(server.aborts) == 2:  # the first two came too early
            released.set()
        return await Stub.abort(server, request)

    server = Stub(decode=decode, abort=abort)
    with engine_on(server, request_s=5.0, return_s=1.0) as engine:
        (group,) = engine.run(*rollout_of(size=4, scheduler=darts())).groups
    assert len(server.aborts) >= 3
    assert all(name.startswith("cmpl-") and name.endswith("-0") for name in server.aborts[0])
    assert [c.length for c in group.candidates[2:]] == [1, 1]


def test_error_after_an_abort_ends_the_asking():
    """Each aborted candidate answers with an error, and the rollout continues with another group."""

    async def decode(request, body):
        if "-4-0" in body["request_id"]:  # of the other group
            await asyncio.sleep(1.0)
        elif "-2-0" in body["request_id"] or "-3-0" in body["request_id"]:
            while not server.aborts:
                await asyncio.sleep(0.01)
            return await answer({"error": {"message": "gone"}}, 400)
        return await answer(completion([4, 5, 6]))

    server = Stub(decode=decode)
    with engine_on(server) as engine:
        _, _, prompts, body = rollout_of(num_groups=2)
        plans = [GroupPlan(0, 4), GroupPlan(1, 2)]
        first, second = engine.run(darts(num_longest=0), plans, prompts, body).groups
    assert (first.selected, second.selected) == ([0, 1], [0, 1])
    assert 1 <= len(server.aborts) <= 2  # before, ten times a second


def test_requests_of_a_lost_server_are_closed_and_go_on_elsewhere():
    async def one_breaks(request, body):
        if "-0-" in body["request_id"]:
            await asyncio.sleep(0.2)
            request.transport.close()
        return await hangs(request)

    async def waits(request, body):
        while broken.num_open and body["request_id"].endswith("-1"):  # a second request of a candidate
            await asyncio.sleep(0.01)
        return await answer(completion([4, 5, 6]))

    broken = Stub(decode=one_breaks)
    with engine_on(broken, Stub(decode=waits), rollout_s=10.0) as engine:
        (group,) = run(engine, size=6).groups
        assert {c.engine_id for c in group.candidates} == {engine.base_urls[1]}
        assert sorted(c.segment for c in group.candidates) == [0, 0, 0, 1, 1, 1]
        engine.query(lambda server: server.get("/health"))  # the loop has taken a turn since
        assert not [task for task in asyncio.all_tasks(engine._loop) if "_decode" in repr(task)]


def test_result_that_comes_with_the_poll_is_not_lost():
    """The result arrives between the timeout of the poll and the next check."""
    engine = VLLMServerEngine(["http://127.0.0.1:9"])

    class Future:
        calls = 0

        def result(self, timeout=None):
            self.calls += 1
            if self.calls == 1:
                raise concurrent.futures.TimeoutError
            return "rows"

        def done(self):
            return True

        def cancel(self):
            raise AssertionError("cancelled")

    assert engine.wait(Future(), on_poll=lambda: None) == "rows"
    engine.close()


def test_cut_by_the_servers_repetition_detection_is_a_truncation():
    server = Stub(decode=lambda request, body: answer(completion([4, 4, 4], "repetition")))
    with engine_on(server) as engine:
        (group,) = engine.run(*rollout_of(size=3, scheduler=darts())).groups
    assert not any(c.complete for c in group.candidates)
    assert len(group.rows) == 2


def test_dropped_engine_ends_its_thread():
    engine = VLLMServerEngine(["http://127.0.0.1:9"])
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_no_server_is_refused():
    with pytest.raises(ConfigurationError, match="at least one server"):
        VLLMServerEngine([])


def test_token_ids_are_read_from_log_probs():
    """Without `return_token_ids`, which sends the prompt back."""
    request = CompletionRequest.of("x", ServerPrompt([5]), [6], {"model": "m", "logprobs": 0})
    assert request.body["prompt"] == [5, 6]
    assert request.body["return_tokens_as_token_ids"]
    assert "return_token_ids" not in request.body
    assert CompletionRequest.of("x", ServerPrompt([5]), [], {"model": "m"}).body["return_token_ids"]
    logprobs = {"tokens": ["token_id:7", "token_id:0"], "token_logprobs": [-1.0, None]}
    chunk = parse_choice({"choices": [{"token_ids": None, "logprobs": logprobs, "finish_reason": None}]})
    assert (chunk.tokens, chunk.logprobs[0]) == ([7, 0], -1.0)
    assert parse_choice({"choices": [{"logprobs": {"tokens": [], "token_logprobs": []}}]}).tokens == []
    for tokens in (["the"], ["token_id:7.0"], ["token_id:-1"], ["token_id:true"], [7]):
        with pytest.raises((ValueError, TypeError, GenerationError)):
            parse_choice({"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": [-1.0]}}]})
