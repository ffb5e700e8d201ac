"""
Sends candidates' requests to one server, in their order. Those that differ only in their prompt share an HTTP request.

A server's API process works as long for an HTTP request as for several prompts in one. With 384 candidates, the last
one had its first tokens after 1.5 s with a request for each, and after 0.5 s with 16 in each.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from itertools import islice

import aiohttp

from .vllm_api import CompletionChunk, CompletionRequest, ServerRefusedError, VLLMServer


MAX_SHARED = 16  # candidates in one HTTP request
MAX_CONSIDERED = 64  # of those that wait, from the first one on
# HTTP requests that are opened on a server at once. All that are connected in one turn of the loop delay its timers:
# 10,000 on 64 servers took 6 s, after which each connection seemed to have taken as long.
MAX_OPENING = 16
MAX_OPENING_S = 1.0  # a request counts as opened then: a proxy may hold the headers back until the first token
# Streaming every token costs the server and this thread 3 to 20 times as much as one response at the end. With chunks
# of 16 tokens there is no difference. A bounded wait ends at most 16 tokens late, and a lost server loses at most 16.
STREAM_INTERVAL = 16


class CandidateStream:
    """A candidate's part of an HTTP request: its chunks, in their order."""

    def __init__(self, request: CompletionRequest, may_share: bool) -> None:
        self.request = request
        self.kind = request.kind if may_share else None
        self.shared: SharedRequest | None = None  # `None` until it is its turn to be sent
        self.index = 0  # in `shared`
        self.sent = False  # whether it has reached the server
        self._arrived: asyncio.Queue[CompletionChunk | Exception] = asyncio.Queue()

    @property
    def internal_id(self) -> str | None:
        """The server's ID of it, `None` until it is its turn to be sent."""
        return None if self.shared is None else self.shared.internal_ids[self.index]

    @property
    def has_companions(self) -> bool:
        """Whether others were sent with it."""
        return self.shared is not None and len(self.shared.internal_ids) > 1

    def put(self, arrived: CompletionChunk | Exception) -> None:
        self._arrived.put_nowait(arrived)

    async def next(self) -> CompletionChunk:
        """Waits for the next chunk. Raises the error with which the HTTP request has ended."""
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived


class SharedRequest:
    """An HTTP request of one or several candidates, which is read until the last of them has ended or left."""

    def __init__(self, server: VLLMServer, streams: list[CandidateStream], on_opened: Callable[[bool], None]) -> None:
        self.began = time.perf_counter()
        self._server = server
        self._request = CompletionRequest.together([stream.request for stream in streams])
        self.internal_ids = self._request.internal_ids
        self._reading = dict(enumerate(streams))  # those that have neither ended nor left
        self._has_left = False  # whether one of them has
        self._on_opened = on_opened  # called with whether the server has accepted it
        self._to_abort: list[str] = []  # internal IDs
        self._aborter: asyncio.Task[None] | None = None
        for index, stream in self._reading.items():
            stream.shared, stream.index = self, index
        self._reader = asyncio.create_task(self._read())

    async def leave(self, index: int) -> None:
        """Ends a candidate's part unless it has ended, and with the last one the connection."""
        if self._reading.pop(index, None) is None:
            return
        self._has_left = True
        if self._reading:
            self._abort(index)
        else:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            async with aclosing(await self._open()) as chunks:
                async for chunk in chunks:
                    self._pass_on(chunk)
                    if self._has_left and not self._reading:
                        break  # those that left may still be decoded, until the connection ends
        except Exception as error:
            for stream in self._reading.values():
                stream.put(error)

    async def _open(self) -> AsyncGenerator[CompletionChunk]:
        is_accepted = False
        try:
            chunks = await self._server.open(self._request, STREAM_INTERVAL, on_sent=self._note_sent)
            is_accepted = True
            return chunks
        finally:
            self._on_opened(is_accepted)

    def _note_sent(self) -> None:
        for stream in self._reading.values():
            stream.sent = True

    def _pass_on(self, chunk: CompletionChunk) -> None:
        if (stream := self._reading.get(chunk.index)) is not None:
            stream.put(chunk)
            if chunk.finish_reason is not None:
                del self._reading[chunk.index]
        elif chunk.finish_reason is None:  # it has left, and its abort had overtaken the request
            self._abort(chunk.index)

    def _abort(self, index: int) -> None:
        self._to_abort.append(self.internal_ids[index])
        if self._aborter is None or self._aborter.done():
            self._aborter = asyncio.create_task(self._send_aborts())

    async def _send_aborts(self) -> None:
        await asyncio.sleep(0)  # others may leave too
        while self._to_abort and self._reading:  # without any, the connection ends, and the server aborts all
            names, self._to_abort = self._to_abort, []
            with suppress(ServerRefusedError, aiohttp.ClientError, TimeoutError):
                await self._server.abort(names)


class Opener:
    """Sends the requests of one server. `on_accepted` is called whenever it accepts one."""

    def __init__(self, server: VLLMServer, on_accepted: Callable[[], None]) -> None:
        self._server = server
        self._on_accepted = on_accepted
        self._waiting: dict[CandidateStream, None] = {}  # in their order
        self._turns = asyncio.Semaphore(MAX_OPENING)
        self._sender: asyncio.Task[None] | None = None

    async def chunks(self, stream: CandidateStream) -> AsyncGenerator[CompletionChunk]:
        """
        Waits for the candidate's turn to be sent, and yields its chunks. Its request ends with them, or when the
        generator is closed.
        """
        self._waiting[stream] = None
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())  # runs when all that are submitted with it wait too
        try:
            is_over = False
            while not is_over:
                chunk = await stream.next()
                is_over = chunk.finish_reason is not None
                yield chunk
        finally:
            self._waiting.pop(stream, None)
            if stream.shared is not None:
                await stream.shared.leave(stream.index)

    async def _send(self) -> None:
        while self._waiting:
            await self._turns.acquire()
            turn = ExitStack()
            turn.callback(self._turns.release)
            if self._waiting:
                timer = asyncio.get_running_loop().call_later(MAX_OPENING_S, turn.close)
                turn.callback(timer.cancel)
                SharedRequest(self._server, self._next(), partial(self._end_turn, turn))
            else:  # they have left
                turn.close()

    def _end_turn(self, turn: ExitStack, is_accepted: bool) -> None:
        turn.close()
        if is_accepted:
            self._on_accepted()

    def _next(self) -> list[CandidateStream]:
        """Returns the first one that waits, with the next ones that can share its request."""
        first, *others = islice(self._waiting, MAX_CONSIDERED)
        alike = [own for own in others if first.kind is not None and own.kind == first.kind]
        streams = [first, *alike[: MAX_SHARED - 1]]
        for stream in streams:
            del self._waiting[stream]
        return streams
