"""Servers without a model, engines that use them, and rollouts, for the tests of the server engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from aiohttp import web

from tests.engines.fake_server import answer, completion, fake_server
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.waiting import Deadlines
from trl_darts.scheduling import GroupPlan, RolloutResult, Scheduler, ScheduleSettings


BODY = {"model": "m", "max_tokens": 100, "logprobs": 0}
TOKENS = [4, 5, 6]


class Stub:
    """
    A server that answers each request with `TOKENS`. `methods` replace its own; `routes` are in addition to its own.
    """

    def __init__(self, slots: int | None = None, more_routes: Mapping[str, Any] | None = None, **methods: Any) -> None:
        self.slots = slots
        self.more_routes = dict(more_routes or {})
        self.requests: list[dict[str, Any]] = []
        self.aborts: list[list[str]] = []
        self.num_probes = self.num_open = self.most_open = 0
        vars(self).update(methods)

    async def health(self, request: web.Request) -> web.StreamResponse:
        self.num_probes += 1
        return web.Response()

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        if self.slots is None:
            return web.Response(status=404)
        return web.json_response({"vllm_config": {"scheduler_config": {"max_num_seqs": self.slots}}})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self.decode(request, self.requests[-1])
        finally:
            self.num_open -= 1

    async def decode(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await answer(completion(TOKENS))

    async def abort(self, request: web.Request) -> web.StreamResponse:
        self.aborts.append((await request.json())["request_ids"])
        return web.json_response({})

    @property
    def routes(self) -> dict[str, Any]:
        return {
            "GET /health": self.health,
            "GET /server_info": self.server_info,
            "POST /v1/completions": self.completions,
            "POST /abort_requests": self.abort,
            **self.more_routes,
        }


async def event_stream(request: web.Request) -> web.StreamResponse:
    """Sends the headers of a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, chunk: Mapping[str, Any]) -> None:
    """Sends one event of a stream."""
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def stream(request: web.Request, body: dict[str, Any], length: int, step_s: float) -> web.StreamResponse:
    """Sends one token every `step_s`: token i is i."""
    response = await event_stream(request)
    for token in range(len(body["prompt"]) - 1, length):
        await asyncio.sleep(step_s)
        await send(response, completion([token], "stop" if token == length - 1 else None))
    return response


async def hangs(request: web.Request, body: dict[str, Any] | None = None) -> web.StreamResponse:
    """Answers nothing until the client closes the connection."""
    while request.transport is not None and not request.transport.is_closing():
        await asyncio.sleep(0.005)
    return web.Response()


async def is_refreshed(member: Any, version: int) -> bool:
    """For a server that gets the weights of the last sync."""
    return True


@contextmanager
def engine_on(*servers: Any, options: Mapping[str, Any] | None = None, **deadlines: float) -> Iterator[Any]:
    """An engine on URLs or on servers with `routes`. `options` are further arguments of the engine."""
    with ExitStack() as stack:
        urls = [s if isinstance(s, str) else stack.enter_context(fake_server(s.routes)) for s in servers]
        engine = VLLMServerEngine(urls, Deadlines(**deadlines), **(options or {}))
        stack.callback(engine.close)
        yield engine


def grpo(size: int, **fields: Any) -> Scheduler:
    """A scheduler that samples what it keeps."""
    return Scheduler(ScheduleSettings("grpo", size).policies(), size, **fields)


def rollout_of(
    num_groups: int = 1, size: int = 2, body: Mapping[str, Any] = BODY, scheduler: Scheduler | None = None
) -> tuple[Scheduler, list[GroupPlan], list[list[ServerPrompt]], Mapping[str, Any]]:
    """Arguments of `VLLMServerEngine.start` and `run`. The prompt of group i is `[i]`."""
    plans = [GroupPlan(i, size) for i in range(num_groups)]
    return scheduler or grpo(size), plans, {i: [ServerPrompt([i])] for i in range(num_groups)}, body


def run(engine: VLLMServerEngine, num_groups: int = 1, size: int = 2, drops: bool = False, **kwargs: Any) -> Any:
    """Runs a rollout of GRPO's schedule."""
    arguments = rollout_of(num_groups, size, scheduler=grpo(size, drop_failed_groups=drops))
    return engine.run(*arguments, **kwargs)


def start(engine: VLLMServerEngine, num_groups: int = 1, size: int = 2) -> Future[RolloutResult]:
    """Starts a rollout of GRPO's schedule."""
    return engine.start(*rollout_of(num_groups, size))


def tokens_of(result: RolloutResult) -> list[list[Sequence[int]]]:
    """The tokens of each row by group."""
    return [[row.tokens for row in group.rows] for group in result.groups]
