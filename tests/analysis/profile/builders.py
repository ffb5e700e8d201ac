"""A described server, a grid, probes with a known latency, and a fake vLLM server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from aiohttp import web

from tests.engines.fake_server import completion
from trl_darts.analysis.profile.grid import Grid, GridPoint
from trl_darts.analysis.profile.probe import Decoded
from trl_darts.analysis.profile.profiled_server import ProfiledServer


FACTS = ProfiledServer(
    "http://localhost:8000", "tiny", max_model_len=4096, vocab_size=1000, kv_cache_tokens=100_000, max_num_seqs=64
)
GRID = Grid(tuple(GridPoint(2**i, length, 256) for length in (128, 512, 2048) for i in range(6)), (128, 512, 2048))
METRICS = """
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:num_requests_running{engine="0"} %(running)d.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_preemptions_total{engine="0"} %(preemptions)d.0
vllm:inter_token_latency_seconds_sum{engine="0"} %(seconds)f
vllm:inter_token_latency_seconds_count{engine="0"} 7.0
vllm:generation_tokens_total{engine="0"} %(generated)d.0
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="%(tokens)s",num_gpu_blocks="100"} 1.0
"""


def metrics(
    running: int = 0, preemptions: int = 0, tokens: str = "50000", seconds: float = 0, generated: int = 0
) -> str:
    """Returns the text of `/metrics`, as far as it is read."""
    values = {"running": running, "preemptions": preemptions, "tokens": tokens, "seconds": seconds}
    return METRICS % {**values, "generated": generated}


def facts(**changes: Any) -> ProfiledServer:
    """Describes a small idle server."""
    return replace(FACTS, **changes)


def seconds_of(point: GridPoint) -> float:
    """Returns the latency that fake probes measure."""
    return 0.004 + 2e-4 * point.batch_size + 1e-7 * point.batch_size * (point.context_length + 20)


class FakeProbe:
    """Measures `seconds_of` times `noise`, and logs each call. `impossible` points can't be measured."""

    def __init__(
        self,
        log: list[Any],
        noise: Callable[[], float] = lambda: 1.0,
        impossible: Callable[[GridPoint], bool] = lambda point: False,
    ) -> None:
        self.log, self.noise, self.impossible = log, noise, impossible

    async def decode(self, point: GridPoint) -> Decoded | None:
        self.log.append((self, point))
        return None if self.impossible(point) else Decoded(seconds_of(point) * self.noise(), point.batch_size * 20)

    async def warm_up(self, point: GridPoint) -> None:
        self.log.append((self, point))

    async def prefill(self, num_tokens: int) -> float:
        self.log.append((self, num_tokens))
        return (0.003 + num_tokens / 20_000) * self.noise()


class FakeVLLM:
    """
    Answers like a server that decodes one token per sequence and step, at most `max_num_seqs` sequences at once. Its
    clock counts exactly `step_s` per step, and ten times that while a request waits for its first token.
    """

    def __init__(self, step_s: float = 0.004, max_num_seqs: int = 1000, abortable: bool = True) -> None:
        self.step_s, self.abortable = step_s, abortable
        self.slots = asyncio.Semaphore(max_num_seqs)
        self.requests: list[dict] = []  # bodies of the completion requests
        self.aborted: list[str] = []
        self.keys: set[str | None] = set()  # the `Authorization` headers that came
        self.closed = 0  # streams whose connection was closed
        self.preemptions = self.others = self.running = self.generated = 0
        self.num_silent = self.num_streams = 0
        self.seconds = 0.0
        self.late_s = 0.0  # that every third streamed request waits for its first token
        self.preempts = False
        self.stale = 0  # that its metrics still count, until it decodes again

    def routes(self) -> dict[str, Any]:
        routes = {
            "GET /v1/models": self.models,
            "GET /version": self.version,
            "GET /metrics": self.metrics,
            "POST /v1/completions": self.completions,
        }
        if self.abortable:
            routes["POST /abort_requests"] = self.abort
        return {path: self._noting_keys(handler) for path, handler in routes.items()}

    def _noting_keys(self, handler: Any) -> Any:
        async def noted(request: web.Request) -> web.StreamResponse:
            self.keys.add(request.headers.get("Authorization"))
            return await handler(request)

        return noted

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 4096}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.31.0"})

    async def metrics(self, request: web.Request) -> web.Response:
        self.preemptions += self.preempts
        running = self.running + self.others + self.stale
        text = metrics(running, self.preemptions, seconds=self.seconds, generated=self.generated)
        return web.Response(text=text)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        return web.json_response({})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "logit_bias" in body:
            return web.json_response({"error": {"message": "Vocabulary size: 200"}}, status=400)
        self.requests.append(body)
        self.stale = 0
        if not body.get("stream"):
            await asyncio.sleep(self.step_s)
            return web.json_response(completion([7], "length"))
        async with self.slots:
            self.running += 1
            try:
                return await self._stream(request, body)
            except (ConnectionError, asyncio.CancelledError):
                self.closed += 1
                raise
            finally:
                self.running -= 1

    async def _stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        name = f"cmpl-{body['request_id']}-0"
        interval, left = body["stream_interval"], body["max_tokens"]
        size, reason, silent = 1, None, True
        self.num_silent += 1
        self.num_streams += 1
        await asyncio.sleep(self.late_s if self.num_streams % 3 == 0 else 0.0)
        while reason is None:
            await asyncio.sleep(self.step_s * size)
            left -= size
            self.num_silent -= silent
            silent = False
            self.generated += size
            self.seconds += self.step_s * size * (10 if self.num_silent else 1)
            reason = "abort" if name in self.aborted else "length" if left <= 0 else None
            data = json.dumps(completion([7] * size, reason)).encode()
            await response.write(b"data: " + data + b"\n\n")
            size = min(interval, left)
        await response.write(b"data: [DONE]\n\n")
        return response


def rng() -> np.random.Generator:
    """Returns a generator with a fixed seed."""
    return np.random.default_rng(0)
