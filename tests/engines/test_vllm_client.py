"""The server engine against servers that misbehave: a clear error or a clean end, never a hang."""

import asyncio
import concurrent.futures
import gc

import pytest
from aiohttp import web

from tests.engines.fake_server import answer, completion, fake_server
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.deadlines import Deadlines
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.scheduling import CandidateState, GroupPlan, Scheduler, make_policies


BODY = {"model": "m", "max_tokens": 100, "logprobs": 0}


def run(urls, num_candidates=3, **kwargs):
    engine = VLLMServerEngine(urls, Deadlines(request_s=5.0, return_s=1.0))
    policies = make_policies("darts", num_generations=2, max_num_generations=4, num_longest=1, **kwargs)
    try:
        return engine.run(Scheduler(policies, 2), [GroupPlan(0, num_candidates)], [[ServerPrompt([5])]], BODY)
    finally:
        engine.close()


async def complete(request: web.Request) -> web.Response:
    return await answer(completion([4, 5, 6]))


async def only_the_first_two(request: web.Request) -> web.Response:
    fields = await request.json()
    if "-0-0" in fields["request_id"] or "-1-0" in fields["request_id"]:
        return await answer(completion([4, 5, 6]))
    await asyncio.sleep(60)
    return await answer(completion([4]))


def test_server_without_abort_endpoint_is_told_by_closing_the_connection():
    with fake_server({"POST /v1/completions": only_the_first_two}) as url:
        (group,) = run([url], num_candidates=4).groups
    assert group.selected == [0, 1]
    assert [c.state for c in group.candidates[2:]] == [CandidateState.ABORTED] * 2
    assert [c.length for c in group.candidates[2:]] == [0, 0]


def test_abort_that_overtakes_its_request_is_sent_again():
    asked: list[list[str]] = []
    released = asyncio.Event()

    async def completions(request: web.Request) -> web.Response:
        fields = await request.json()
        if "-0-0" in fields["request_id"] or "-1-0" in fields["request_id"]:
            return await answer(completion([4, 5, 6]))
        await released.wait()
        return await answer(completion([4], "abort"))

    async def abort(request: web.Request) -> web.Response:
        asked.append((await request.json())["request_ids"])
        if len(asked) == 3:  # the first two came too early
            released.set()
        return await answer({"aborted": 2})

    with fake_server({"POST /v1/completions": completions, "POST /abort_requests": abort}) as url:
        (group,) = run([url], num_candidates=4).groups
    assert len(asked) >= 3
    assert all(i.startswith("cmpl-") and i.endswith("-0") for i in asked[0])
    assert [c.length for c in group.candidates[2:]] == [1, 1]


@pytest.mark.parametrize(
    ("payload", "status", "words"),
    [
        (completion([4], None), 200, "without a `finish_reason`"),
        ({"error": {"message": "engine is dead"}}, 500, "answered 500: engine is dead"),
        (completion([4, 5], "stop", [-1.0]), 200, "1 log-probs for 2 tokens"),
        (completion([]), 200, "without a single token"),
        ({"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}, 200, "too old"),
        ({"choices": []}, 200, "without a `finish_reason`"),
        (completion([4], "exploded"), 200, "could not be read"),
    ],
)
def test_bad_answers(payload, status, words):
    async def completions(request: web.Request) -> web.Response:
        return await answer(payload, status)

    with fake_server({"POST /v1/completions": completions}) as url, pytest.raises(GenerationError, match=words):
        run([url])


def stream_of(*chunks: bytes):
    async def completions(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    return completions


def event(tokens, finish_reason=None) -> bytes:
    import json

    return b"data: " + json.dumps(completion(tokens, finish_reason)).encode() + b"\n\n"


def test_stream_in_pieces_is_put_together():
    data = event([4, 5]) + event([6]) + event([7], "stop") + b"data: [DONE]\n\n"
    pieces = [data[:30], data[30:31], data[31:]]
    with fake_server({"POST /v1/completions": stream_of(*pieces)}) as url:
        (group,) = run([url], long_end_patience=2.0).groups
    assert [c.tokens for c in group.candidates] == [[4, 5, 6, 7]] * 3


def test_stream_that_ends_like_a_good_one_but_without_finish_reason():
    with (
        fake_server({"POST /v1/completions": stream_of(event([4, 5]), b"data: [DONE]\n\n")}) as url,
        pytest.raises(GenerationError, match="ended a stream without a `finish_reason`"),
    ):
        run([url], long_end_patience=2.0)


def test_unreachable_server_is_named():
    with pytest.raises(GenerationError, match=r"http://127.0.0.1:9: ClientConnectorError"):
        run(["http://127.0.0.1:9"])


def test_candidates_of_a_lost_server_go_to_the_other():
    with fake_server({"POST /v1/completions": complete}) as url:
        (group,) = run(["http://127.0.0.1:9", url]).groups
    assert [c.engine_id for c in group.candidates] == [url] * 3


def test_requests_of_a_lost_server_are_closed_and_go_on_elsewhere():
    open_requests = []

    async def one_breaks(request: web.Request) -> web.Response:
        fields = await request.json()
        if "-0-" in fields["request_id"]:
            await asyncio.sleep(0.2)
            request.transport.close()
        open_requests.append(request)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            open_requests.remove(request)
            raise
        return await answer(completion([4]))

    with (
        fake_server({"POST /v1/completions": one_breaks}) as broken,
        fake_server({"POST /v1/completions": complete}) as good,
    ):
        engine = VLLMServerEngine([broken, good])
        scheduler = Scheduler(make_policies("grpo", 6, 6, 0), 6)
        (group,) = engine.run(scheduler, [GroupPlan(0, 6)], [[ServerPrompt([5])]], BODY).groups
        assert {c.engine_id for c in group.candidates} == {good}
        assert sorted(c.segment for c in group.candidates) == [0, 0, 0, 1, 1, 1]
        engine.query(lambda server: server.get("/health"))  # the loop has taken a turn since
        assert not [task for task in asyncio.all_tasks(engine._loop) if "_decode" in repr(task)]
        engine.close()


def test_result_that_comes_with_the_poll_is_not_lost():
    """The waiting thread's poll times out, and the result arrives before it looks."""
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

    async def nothing():
        pass

    coroutine = nothing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "run_coroutine_threadsafe", lambda coroutine, loop: Future())
        assert engine._wait(coroutine, on_poll=lambda: None) == "rows"
    coroutine.close()
    engine.close()


def test_cut_by_the_servers_repetition_detection_is_a_truncation():
    async def completions(request: web.Request) -> web.Response:
        return await answer(completion([4, 4, 4], "repetition"))

    with fake_server({"POST /v1/completions": completions}) as url:
        (group,) = run([url]).groups
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
