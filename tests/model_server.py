"""A slow stub of a vLLM server in this process, which samples with the weights of the last sync."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from tests.engines.fake_server import fake_server
from trl_darts.engines import VLLMServerEngine, vllm_generation
from trl_darts.engines.preflight import ServerFacts


class ModelServer:
    """
    The server and the client for weights. `events` records `"sync"`, and one `"rollout"` for all requests before the
    next sync. No request may be open during a sync.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.events: list[str] = []
        self.num_bytes = 0
        self.open: set[str] = set()  # requests
        self.aborted: set[str] = set()
        self.step_s = 0.001  # shortest time between two tokens of a request
        self._rng = torch.Generator().manual_seed(0)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted |= set((await request.json())["request_ids"])
        return web.Response()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if self.events[-1:] != ["rollout"]:
            self.events.append("rollout")
        body = await request.json()
        name = f"cmpl-{body['request_id']}-0"
        self.open.add(name)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            async for choice in self._decode(name, list(body["prompt"]), body["max_tokens"]):
                if choice["finish_reason"] is not None:
                    self.open.discard(name)
                await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:  # the client has disconnected
            pass
        finally:
            self.open.discard(name)
        return response

    async def _decode(self, name: str, tokens: list[int], max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        for left in reversed(range(max_tokens)):
            with torch.no_grad():
                logprobs = self.model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._rng))
            tokens.append(token)
            is_end = token == self.model.config.eos_token_id
            reason = "stop" if is_end else "abort" if name in self.aborted else None if left else "length"
            own = {"token_logprobs": [float(logprobs[token])]}
            yield {"index": 0, "token_ids": [token], "logprobs": own, "finish_reason": reason}
            if reason is not None:
                return
            await asyncio.sleep(self.step_s)

    # Client for weights, see `FleetVLLMClient`

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        assert not self.open, "weights changed under a rollout"
        self.events.append("sync")
        self.model.load_state_dict(dict(named_params), strict=False)

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    init_communicator = close_communicator = reset_prefix_cache = _nothing


@contextmanager
def model_server(model_dir: Path, monkeypatch: Any) -> Iterator[tuple[ModelServer, dict[str, Any]]]:
    """Inside this context, trainers with the yielded settings use the yielded server."""
    server = ModelServer(model_dir)
    routes = {
        "GET /health": server.health,
        "POST /v1/completions": server.completions,
        "POST /abort_requests": server.abort,
    }
    with fake_server(routes) as url:
        facts = ServerFacts("letters", 512)
        engines: list[VLLMServerEngine] = []

        def connect(settings: Any) -> tuple[VLLMServerEngine, ServerFacts]:
            engines.append(VLLMServerEngine([url], settings.deadlines))
            return engines[-1], facts

        monkeypatch.setattr(vllm_generation, "connect", connect)
        monkeypatch.setattr(vllm_generation, "FleetVLLMClient", lambda *args, **kwargs: server)
        yield server, {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        for engine in engines:
            engine.close()
