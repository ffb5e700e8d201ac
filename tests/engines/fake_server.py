"""A server with vLLM's API that can misbehave, to test the client's decisions. Other tests use the real server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEALTHY = {
    "model_config": {"logprobs_mode": "processed_logprobs", "model": "served"},
    "weight_transfer_config": {"backend": "nccl"},
    "scheduler_config": {"max_num_seqs": 128},
    "parallel_config": {"data_parallel_size": 2},
}


def completion(tokens: list[int], finish_reason: str | None = "stop", logprobs: list[float] | None = None) -> dict:
    """Returns the JSON of a completion."""
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    choice = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": finish_reason,
    }
    return {"choices": [choice]}


async def answer(payload: dict, status: int = 200) -> web.Response:
    """Returns a JSON response, or a stream for a completion."""
    if status == 200 and "choices" in payload:
        body = f"data: {json.dumps(payload)}\n\ndata: [DONE]\n\n"
        return web.Response(body=body.encode(), content_type="text/event-stream")
    return web.Response(status=status, body=json.dumps(payload), content_type="application/json")


@contextmanager
def fake_server(routes: dict[str, Handler]) -> Iterator[str]:
    """Serves handlers by `"METHOD /path"` on a free port, in a thread. Other paths answer 404. Yields the base URL."""
    loop, ready, box = asyncio.new_event_loop(), threading.Event(), {}

    async def serve() -> None:
        app = web.Application()
        for route, handler in routes.items():
            method, path = route.split()
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        box["runner"], box["port"] = runner, site._server.sockets[0].getsockname()[1]
        ready.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(serve()), loop.run_forever()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{box['port']}"
    finally:
        asyncio.run_coroutine_threadsafe(box["runner"].cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
