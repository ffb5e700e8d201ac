"""
One measurement on one server: a batch that decodes, or a prompt.

Invariant: only tokens after the last sequence's first one count, so prefill and partly filled batches are excluded.
"""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
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
    """Result of decoding a batch."""

    seconds: float  # per token of each sequence
    completion_tokens: float  # that all sequences together had generated in the middle of the measurement


class ServerProbe:
    """
    Measures one server.

    Sequence i of every batch is a prefix of one fixed row of random tokens. After the first batch, most of each prompt
    is in the server's prefix cache, so repetitions need no prefill. No two sequences share a prefix.
    """

    def __init__(self, server: VLLMServer, described: ProfiledServer, rng: np.random.Generator) -> None:
        self.server = server
        self.described = described
        self._rng = rng
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self._num_requests = 0
        self._name = f"profile-{uuid.uuid4().hex}"

    async def warm_up(self, point: GridPoint) -> None:
        """Caches a batch's prompts and decodes it once, so that the server compiles kernels and captures graphs."""
        requests = [self._request(prompt, max_tokens=1) for prompt in self._prompts(point)]
        await asyncio.gather(*(self.server.complete(request, REQUEST_TIMEOUT_S) for request in requests))
        await self.decode(point)

    async def decode(self, point: GridPoint) -> Decoded | None:
        """
        Decodes a batch until each sequence has been timed, then aborts it.

        Returns `None` if the sequences did not decode together and alone: the server takes fewer, preempted some, or
        had other requests. Raises [`ServerRefusedError`] if the server refuses a request or fails.
        """
        batch = _Batch(self.server, [self._request(prompt, point.max_tokens) for prompt in self._prompts(point)])
        try:
            if not await batch.reach(1):
                return None
            before, first = await read_clock(self.server), batch.counts.copy()
            if not await batch.reach(first + WINDOW_TOKENS):
                return None
            completion_tokens = float(first.sum() + batch.counts.sum()) / 2
            after = await read_clock(self.server)
        finally:
            await batch.end()
        alone = before.num_running == after.num_running == point.batch_size
        if not alone or after.num_preemptions > before.num_preemptions:
            return None
        return Decoded(after.seconds_per_token_since(before), completion_tokens)

    async def prefill(self, num_tokens: int) -> float:
        """Returns the seconds from sending a prompt that is not cached to its first token."""
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


class _Batch:
    """Streaming requests that decode together."""

    def __init__(self, server: VLLMServer, requests: Sequence[CompletionRequest]) -> None:
        self.server = server
        self.requests = requests
        self.counts = np.zeros(len(requests), int)  # tokens of each sequence
        self._one_finished = False
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self.tasks = [asyncio.create_task(self._follow(i, request)) for i, request in enumerate(requests)]

    async def _follow(self, sequence: int, request: CompletionRequest) -> None:
        try:
            async for chunk in await self.server.open(request, STREAM_INTERVAL, REQUEST_TIMEOUT_S):
                self.counts[sequence] += len(chunk.tokens)
                self._one_finished |= chunk.finish_reason is not None
                self._changed.set()
        except Exception as error:
            self._error = error
            self._changed.set()

    async def reach(self, num_tokens: int | np.ndarray) -> bool:
        """Waits until each sequence has this many tokens. Returns `False` if one finishes before."""
        while not (self.counts >= num_tokens).all():
            if self._error is not None:
                raise self._error
            if self._one_finished:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def end(self) -> None:
        """Aborts the requests, or closes their connections if the server has no endpoint for that."""
        try:
            names = [name for request in self.requests for name in request.internal_ids]
            if await self.server.abort(names, ABORT_GRACE_S):
                await asyncio.wait(self.tasks, timeout=ABORT_GRACE_S)
        except (aiohttp.ClientError, ServerRefusedError, TimeoutError):
            pass  # the server is gone, and the requests have failed already
        finally:
            pending = [task for task in self.tasks if not task.done()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await asyncio.sleep(CLOSE_S if pending else 0.0)
