"""
One measurement on one server: a batch that decodes, or a prompt.

Invariant: only tokens after the last sequence's first one count, so prefill and partly filled batches are excluded.
"""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from ...engines.vllm_api import CompletionRequest, ServerPrompt, ServerRefusedError, VLLMServer
from .grid import GridPoint
from .profiled_server import ProfiledServer, read_clock


WINDOW_TOKENS = 32  # PAT decodes 60; repetitions, which are minutes apart, say more than longer windows
STREAM_INTERVAL = 8  # tokens per chunk: streaming each one would slow the server down by a tenth and more
REQUEST_TIMEOUT_S = 300.0
ABORT_GRACE_S = 5.0
CLOSE_S = 0.2  # until a server notices that connections were closed: 13 to 72 ms, measured


@dataclass(frozen=True, slots=True)
class Decoded:
    """Seconds per token of each sequence, and how many tokens all had generated in the middle of the measurement."""

    seconds: float
    completion_tokens: float


class ServerProbe:
    """
    Measures one server.

    Sequence i of every batch is a prefix of one fixed row of random tokens. So after the first time most
    of a prompt is in the server's prefix cache, and repetitions cost no prefill. No two sequences share a prefix.
    """

    def __init__(self, server: VLLMServer, described: ProfiledServer, rng: np.random.Generator) -> None:
        self.server = server
        self.described = described
        self._rng = rng
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self._num_requests = 0
        self._name = f"profile-{uuid.uuid4().hex}"

    async def warm_up(self, point: GridPoint) -> None:
        """Reads a batch's prompts and decodes it once: the server compiles kernels and captures graphs."""
        requests = [self._request(prompt, max_tokens=1) for prompt in self._prompts(point)]
        await asyncio.gather(*(self.server.complete(request, REQUEST_TIMEOUT_S) for request in requests))
        await self.decode(point)

    async def decode(self, point: GridPoint) -> Decoded | None:
        """
        Decodes a batch until each sequence has been timed, then aborts it.

        Returns `None` if the sequences never decoded all at once, and alone: the server takes fewer, preempted some,
        or had other requests. Raises [`ServerRefusedError`] if the server refuses a request or breaks.
        """
        batch = _Batch(self.server, [self._request(prompt, point.max_tokens) for prompt in self._prompts(point)])
        window = batch.window
        try:
            await batch.until(lambda: window.began or window.over)
            before = await read_clock(self.server)
            window.open()
            await batch.until(lambda: window.over)
            after = await read_clock(self.server)
        finally:
            await batch.end()
        alone = before.num_running == after.num_running == point.batch_size
        if window.failed or not alone or after.num_preemptions > before.num_preemptions:
            return None
        return Decoded(after.seconds_per_token_since(before), window.completion_tokens)

    async def prefill(self, num_tokens: int) -> float:
        """Seconds from sending a prompt that is not cached to its first token."""
        request = self._request(self._random(num_tokens), max_tokens=1)
        start = time.perf_counter()
        await self.server.complete(request, REQUEST_TIMEOUT_S)
        return time.perf_counter() - start

    def _request(self, prompt: Sequence[int], max_tokens: int) -> CompletionRequest:
        # With log-probs, as the trainer asks for them. The salt keeps the prompts of an earlier profile with the same
        # seed out of the prefix cache.
        options = {"model": self.described.model, "cache_salt": self._name, "max_tokens": max_tokens}
        options |= {"ignore_eos": True, "temperature": 1.0, "logprobs": 0}
        self._num_requests += 1
        return CompletionRequest.of(f"{self._name}-{self._num_requests}", ServerPrompt(prompt), [], options)

    def _prompts(self, point: GridPoint) -> list[list[int]]:
        rows = [self._rows[i] for i in range(point.batch_size)]
        for row in rows:
            row += self._random(max(0, point.context_length - len(row)))
        return [row[: point.context_length] for row in rows]

    def _random(self, num_tokens: int) -> list[int]:
        # Special tokens, such as those of images, are at the ends of a vocabulary.
        size = self.described.vocab_size
        tokens: list[int] = self._rng.integers(size // 4, max(size // 4 + 1, 3 * size // 4), num_tokens).tolist()
        return tokens


class DecodeWindow:
    """
    The time in which all sequences of a batch decode, and when to read the server's clock.

    ```
    waiting for first tokens → (all began) → open → (each decoded enough) → complete
                    └────────── a sequence ends early ──────┴──────────────→ failed
    ```
    """

    def __init__(self, num_sequences: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.failed = False
        self._counts = np.zeros(num_sequences, int)
        self._at_open: np.ndarray | None = None

    def add(self, sequence: int, num_tokens: int, finished: bool = False) -> None:
        """Counts tokens of a sequence. The window fails if one finishes before the window is complete."""
        if not self.over:
            self._counts[sequence] += num_tokens
            self.failed = finished and not self.complete

    def open(self) -> None:
        """The clock was read: tokens count from here on."""
        self._at_open = self._counts.copy()

    @property
    def began(self) -> bool:
        return bool(self._counts.all())

    @property
    def complete(self) -> bool:
        return self._at_open is not None and bool((self._counts - self._at_open).min() >= self.num_tokens)

    @property
    def over(self) -> bool:
        return self.failed or self.complete

    @property
    def completion_tokens(self) -> float:
        """Tokens that all sequences together had generated in the middle of the window."""
        return float(self._counts.sum() + (0 if self._at_open is None else self._at_open.sum())) / 2


class _Batch:
    """Streaming requests, and the window over them."""

    def __init__(self, server: VLLMServer, requests: Sequence[CompletionRequest]) -> None:
        self.server = server
        self.requests = requests
        self.window = DecodeWindow(len(requests), WINDOW_TOKENS)
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self.tasks = [asyncio.create_task(self._follow(i, request)) for i, request in enumerate(requests)]

    async def _follow(self, sequence: int, request: CompletionRequest) -> None:
        try:
            async for chunk in self.server.stream(request, STREAM_INTERVAL, REQUEST_TIMEOUT_S):
                self.window.add(sequence, len(chunk.tokens), chunk.finish_reason is not None)
                self._changed.set()
        except Exception as error:
            self._error = error
            self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Waits, or raises the error of a request. An error after the last wait does not matter."""
        while not reached():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        """Aborts the requests, which answer at once, or closes their connections where that endpoint is missing."""
        try:
            if await self.server.abort([request.internal_id for request in self.requests], ABORT_GRACE_S):
                await asyncio.wait(self.tasks, timeout=ABORT_GRACE_S)
        except (aiohttp.ClientError, ServerRefusedError, TimeoutError):
            pass  # the server is gone, and the requests have failed already
        finally:
            pending = [task for task in self.tasks if not task.done()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await asyncio.sleep(CLOSE_S if pending else 0.0)
