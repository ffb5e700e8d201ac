"""vLLM servers without a model, and a communicator whose broadcast needs its peer, in place of NCCL."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from aiohttp import web

from tests.engines.fake_server import fake_server


INFO = {"vllm_config": {"device_config": {"device": "cpu"}}}


class WeightServer:
    """Records POSTs as `(path, body)`, and answers 200, or `answers[path]`: `(status, JSON)`."""

    def __init__(self) -> None:
        self.url = ""
        self.posts: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {"/server_info": (200, INFO), "/get_world_size": (200, world(1))}
        self.acts: dict[str, Callable[[], Awaitable[None]]] = {}  # what happens before an answer
        self.barrier: threading.Barrier | None = None  # see `answer_together`
        self.num_answers = 0
        self.weight_version = "default"
        self.communicator: BlockingCommunicator | None = None  # whose broadcast `/update_weights` takes part in
        self.received: list[torch.Tensor] = []

    @property
    def paths(self) -> list[str]:
        """Returns the POSTs' paths in order."""
        return [path for path, _ in self.posts]

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        self.num_answers += 1
        if self.barrier is not None:
            await asyncio.to_thread(self.barrier.wait)
        answer: Any = {"weight_version": self.weight_version}
        if request.method == "POST":
            body = await request.json()
            self.posts.append((path if path != "/wake_up" else request.path_qs, body))
            answer = {"success": True, "results": [{"trl_darts": "1"}]}
        status, answer = self.answers.get(path, (200, answer))
        if path in self.acts:
            await self.acts[path]()
        if path == "/update_weights" and status == 200 and self.communicator is not None:
            self.received.append(await asyncio.to_thread(self.communicator.take_part))
        if path == "/update_weight_version" and status == 200:
            self.weight_version = body["new_version"]
        if isinstance(answer, str):
            return web.Response(status=status, text=answer)
        return web.json_response(answer, status=status)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serves and yields the address."""
        with fake_server({"GET /{path:.*}": self.handle, "POST /{path:.*}": self.handle}) as url:
            self.url = url
            yield url


def world(size: int) -> dict[str, int]:
    """Returns the answer of `/get_world_size`."""
    return {"world_size": size}


def answer_together(servers: list[WeightServer]) -> None:
    """
    Makes servers answer only after all of them have a request. A client that asks them one by one gets no answer.
    """
    barrier = threading.Barrier(len(servers), timeout=10)
    for server in servers:
        server.barrier = barrier


class RecordingCuda:
    """Streams and events that record their calls as `(stream, what)`. The main thread's stream is `"main"`."""

    def __init__(self, monkeypatch: Any) -> None:
        self.log: list[tuple[Any, ...]] = []
        names = itertools.count()
        cuda = self

        class Event:
            def __init__(self) -> None:
                self.number = next(names)

            def record(self) -> None:
                cuda.log.append(("main", "record", self.number))

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = f"stream{next(names)}"

            def wait_event(self, event: Event) -> None:
                cuda.log.append((self.name, "wait", event.number))

            def synchronize(self) -> None:
                cuda.log.append((self.name, "synchronize"))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)


class BlockingCommunicator:
    """Behaves like `PyNcclCommunicator`: a broadcast blocks until its peer takes part, or it is destroyed."""

    device = torch.device("cpu")

    def __init__(self, cuda: RecordingCuda | None = None) -> None:
        self.cuda = cuda
        self.comm = "comm"
        self.disabled = False
        self.group: Any = object()
        self.threads: list[threading.Thread] = []  # that sent
        self._offered: list[torch.Tensor] = []
        self._changed = threading.Condition()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        self.threads.append(threading.current_thread())
        if self.cuda is not None:
            self.cuda.log.append((stream.name, "broadcast"))
        with self._changed:
            self._offered.append(tensor)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._offered or self.disabled)
            if self.disabled:
                raise RuntimeError("NCCL error: unhandled system error")

    def take_part(self) -> torch.Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._offered or self.disabled, timeout=10)
            tensor = self._offered.pop().clone()
            self._changed.notify_all()
            return tensor

    def destroy(self) -> None:
        with self._changed:
            self.disabled = True
            self._changed.notify_all()
