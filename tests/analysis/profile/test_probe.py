"""One measurement of a server over HTTP: its requests, its end, and when it is discarded."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.engines.fake_server import fake_server
from trl_darts.analysis.profile.grid import GridPoint
from trl_darts.analysis.profile.probe import WINDOW_TOKENS, ServerProbe
from trl_darts.engines.vllm_api import VLLMServer, new_session

from .builders import FakeVLLM, facts, rng


POINT = GridPoint(batch_size=3, context_length=8, max_tokens=200)


def probed(server: FakeVLLM, function: Callable[[ServerProbe], Coroutine], **changes: Any) -> Any:
    """Runs a coroutine function on a probe of the server."""
    with fake_server(server.routes()) as url:

        async def run() -> Any:
            async with new_session() as session:
                return await function(ServerProbe(VLLMServer(url, session), facts(**changes), rng()))

        return asyncio.run(run())


def test_measures_the_servers_step_and_ends_the_batch() -> None:
    server = FakeVLLM(step_s=0.003)
    decoded = probed(server, lambda probe: probe.decode(POINT))
    assert decoded.seconds == pytest.approx(0.003)
    assert 3 * WINDOW_TOKENS / 2 <= decoded.completion_tokens <= 3 * 100
    assert len(set(server.aborted)) == 3
    assert server.running == server.closed == 0


def test_the_time_until_the_batch_is_full_does_not_count() -> None:
    """While a prompt is read, the others take ten times as long per token, and they have decoded many by then."""
    server = FakeVLLM(step_s=0.002)
    server.late_s = 0.3
    decoded = probed(server, lambda probe: probe.decode(GridPoint(3, 8, max_tokens=4000)))
    assert decoded.seconds == pytest.approx(0.002)
    assert server.seconds / server.generated > 0.004  # all in all
    assert decoded.completion_tokens < server.generated


def test_requests_ask_for_what_the_trainer_asks_and_the_warm_up_reads_their_prompts() -> None:
    server = FakeVLLM(step_s=0.001)

    async def warm_up_and_measure(probe: ServerProbe) -> None:
        await probe.warm_up(POINT)
        await probe.decode(POINT)

    probed(server, warm_up_and_measure, vocab_size=400)
    read, decoded, again = (server.requests[start : start + 3] for start in (0, 3, 6))
    assert [body["max_tokens"] for body in read] == [1, 1, 1]
    prompts = [sorted(body["prompt"] for body in bodies) for bodies in (read, decoded, again)]
    assert prompts[0] == prompts[1] == prompts[2]
    assert all(b["ignore_eos"] and b["logprobs"] == 0 and b["max_tokens"] == 200 for b in decoded)
    assert len({prompt[0] for prompt in prompts[0]}) == 3  # no two share a prefix
    assert all(len(prompt) == 8 for prompt in prompts[0])
    assert all(100 <= token < 300 for prompt in prompts[0] for token in prompt)  # the middle of the vocabulary
    assert len({body["request_id"] for body in server.requests}) == len(server.requests)


@pytest.mark.parametrize(
    ("max_num_seqs", "others", "preempts", "max_tokens"),
    [(2, 0, False, 200), (9, 1, False, 200), (9, 0, True, 200), (9, 0, False, WINDOW_TOKENS)],
    ids=["fewer slots than sequences", "requests of others", "a preemption", "a completion that ends too early"],
)
def test_a_spoilt_measurement_does_not_count(max_num_seqs, others, preempts, max_tokens) -> None:
    server = FakeVLLM(step_s=0.001, max_num_seqs=max_num_seqs)
    server.others, server.preempts = others, preempts
    assert probed(server, lambda probe: probe.decode(GridPoint(3, 8, max_tokens))) is None


def test_without_the_abort_endpoint_connections_are_closed() -> None:
    server = FakeVLLM(step_s=0.002, abortable=False)
    assert probed(server, lambda probe: probe.decode(POINT)) is not None
    assert server.closed == 3


def test_an_interrupted_measurement_leaves_no_request_behind() -> None:
    server = FakeVLLM(step_s=0.01)

    async def interrupted(probe: ServerProbe) -> None:
        task = asyncio.create_task(probe.decode(POINT))
        while server.running < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.aborted) == 3
        async with asyncio.timeout(1):  # they would take two by themselves; the last bytes of a stream come after it
            while server.running:
                await asyncio.sleep(0.01)

    probed(server, interrupted)
    assert server.closed == 0


def test_a_prompt_is_new_each_time() -> None:
    server = FakeVLLM(step_s=0.02)

    async def twice(probe: ServerProbe) -> list[float]:
        return [await probe.prefill(16) for _ in range(2)]

    seconds = probed(server, twice)
    first, second = (body["prompt"] for body in server.requests)
    assert len(first) == len(second) == 16
    assert first[0:4] != second[0:4]
    assert all(0.02 <= time < 1.0 for time in seconds)
