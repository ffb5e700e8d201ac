"""One measurement against a server over HTTP: what is sent, how it ends, and when it counts."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engines.fake_server import fake_server
from trl_darts.engines.vllm_api import VLLMServer, new_session
from trl_darts.errors import GenerationError
from trl_darts.profiling import GridPoint, ServerProbe
from trl_darts.profiling.measure import WINDOW_TOKENS

from .builders import FakeVLLM, facts, rng


POINT = GridPoint(batch_size=3, context_length=8, max_tokens=200)


@contextmanager
def served(server: FakeVLLM, **changes: Any) -> Iterator[Callable[[Callable[[ServerProbe], Coroutine]], Any]]:
    """Runs a coroutine function on a probe of the server."""
    with fake_server(server.routes()) as url:

        async def run(function: Callable[[ServerProbe], Coroutine]) -> Any:
            async with new_session() as session:
                return await function(ServerProbe(VLLMServer(url, session), facts(**changes), rng()))

        yield lambda function: asyncio.run(run(function))


def test_measures_the_servers_step_and_ends_the_batch() -> None:
    server = FakeVLLM(step_s=0.003)
    with served(server) as run:
        decoded = run(lambda probe: probe.decode(POINT))
    assert decoded.seconds == pytest.approx(0.003)
    assert 3 * WINDOW_TOKENS / 2 <= decoded.completion_tokens <= 3 * 100
    assert len(set(server.aborted)) == 3
    assert server.running == server.closed == 0


def test_the_time_until_the_batch_is_full_does_not_count() -> None:
    """While a prompt is read, the others take ten times as long per token, and they have decoded many by then."""
    server = FakeVLLM(step_s=0.002)
    server.late_s = 0.3
    with served(server) as run:
        decoded = run(lambda probe: probe.decode(GridPoint(3, 8, max_tokens=4000)))
    assert decoded.seconds == pytest.approx(0.002)
    assert server.seconds / server.generated > 0.004  # all in all
    assert decoded.completion_tokens < server.generated


def test_warm_up_reads_the_prompts_that_are_measured() -> None:
    server = FakeVLLM(step_s=0.001)

    async def warm_up_and_measure(probe: ServerProbe) -> None:
        await probe.warm_up(POINT)
        await probe.decode(POINT)

    with served(server) as run:
        run(warm_up_and_measure)
    read, decoded, again = (server.requests[start : start + 3] for start in (0, 3, 6))
    assert [body["max_tokens"] for body in read] == [1, 1, 1]
    prompts = [sorted(body["prompt"] for body in bodies) for bodies in (read, decoded, again)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_requests_ask_for_what_the_trainer_asks_and_share_no_prefix() -> None:
    server = FakeVLLM(step_s=0.001)
    with served(server, vocab_size=400) as run:
        run(lambda probe: probe.decode(POINT))
    bodies = server.requests[:3]
    assert all(b["ignore_eos"] and b["logprobs"] == 0 and b["max_tokens"] == 200 for b in bodies)
    prompts = [body["prompt"] for body in bodies]
    assert [len(prompt) for prompt in prompts] == [8, 8, 8]
    assert len({prompt[0] for prompt in prompts}) == 3
    assert all(100 <= token < 300 for prompt in prompts for token in prompt)  # the middle of the vocabulary
    assert len({body["request_id"] for body in server.requests}) == len(server.requests)


def test_prompts_of_smaller_points_are_prefixes() -> None:
    async def prompts(probe: ServerProbe) -> list[list[list[int]]]:
        return [probe._prompts(GridPoint(size, length, 1)) for size, length in [(2, 5), (3, 9), (1, 3)]]

    with served(FakeVLLM()) as run:
        small, large, least = run(prompts)
    assert small == [row[:5] for row in large[:2]]
    assert least == [large[0][:3]]


def test_fewer_slots_than_sequences_measure_nothing() -> None:
    server = FakeVLLM(step_s=0.001, max_num_seqs=2)
    with served(server) as run:
        assert run(lambda probe: probe.decode(POINT)) is None


def test_requests_of_others_spoil_the_measurement() -> None:
    server = FakeVLLM(step_s=0.001)
    server.others = 1
    with served(server) as run:
        assert run(lambda probe: probe.decode(POINT)) is None


def test_a_completion_that_ends_too_early_measures_nothing() -> None:
    with served(FakeVLLM(step_s=0.001)) as run:
        assert run(lambda probe: probe.decode(GridPoint(2, 8, max_tokens=WINDOW_TOKENS))) is None


def test_a_preemption_spoils_the_measurement() -> None:
    server = FakeVLLM(step_s=0.001)
    server.preempts = True
    with served(server) as run:
        assert run(lambda probe: probe.decode(POINT)) is None


def test_without_the_abort_endpoint_connections_are_closed() -> None:
    server = FakeVLLM(step_s=0.002, abortable=False)
    with served(server) as run:
        assert run(lambda probe: probe.decode(POINT)) is not None
    assert server.closed == 3


def test_an_interrupted_measurement_leaves_no_request_behind() -> None:
    server = FakeVLLM(step_s=0.01)

    async def interrupted(probe: ServerProbe) -> int:
        task = asyncio.create_task(probe.decode(POINT))
        while server.running < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return server.running

    with served(server) as run:
        assert run(interrupted) == 0
    assert len(server.aborted) == 3


def test_a_prompt_is_new_each_time() -> None:
    server = FakeVLLM(step_s=0.02)

    async def twice(probe: ServerProbe) -> list[float]:
        return [await probe.prefill(16) for _ in range(2)]

    with served(server) as run:
        seconds = run(twice)
    first, second = (body["prompt"] for body in server.requests)
    assert len(first) == len(second) == 16
    assert first[0:4] != second[0:4]
    assert all(0.02 <= time < 1.0 for time in seconds)


def test_a_refusal_is_told() -> None:
    from aiohttp import web

    class Refusing(FakeVLLM):
        async def completions(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"message": "too long"}}, status=400)

    with served(Refusing()) as run, pytest.raises(GenerationError, match="too long"):
        run(lambda probe: probe.decode(POINT))
