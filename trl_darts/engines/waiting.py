"""
Waits for servers: their deadlines, the log of what the trainer is waiting for, with the elapsed time and the limit,
and whether our own event loop was on time, because only then a timeout counts against a server.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass


INTERVAL_S = 10.0
POLL_S = 0.5
TICK_S = 0.1
LATE_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of requests to vLLM servers, in seconds. [`DARTSGRPOConfig`] declares and checks them."""

    connect_s: float = 10.0  # to open a connection
    first_token_s: float = 600.0  # until the first tokens of a server, or of a candidate that is not queued
    token_s: float = 300.0  # between tokens of a server, or of a candidate that is not queued
    request_s: float = 3600.0  # between tokens of a candidate, wherever it waits
    rollout_s: float = 14400.0  # for a rollout
    health_s: float = 15.0  # for a health check, which is repeated every two seconds
    info_s: float = 30.0  # to get a server's configuration, which inspects its machine
    return_s: float = 240.0  # that a rollout without servers waits for one to reconnect


class Waiting:
    """One wait that starts now, with an optional limit."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s
        self._start = time.monotonic()
        self._num_logged = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def log(self, message: str) -> None:
        """Logs the message if ten seconds have passed since the last one."""
        seconds = self.seconds
        if seconds >= (self._num_logged + 1) * INTERVAL_S:
            self._num_logged = int(seconds // INTERVAL_S)
            limit = "" if self.limit_s is None else f" of {self.limit_s:.0f}"
            logger.warning("%s (%.0f%s s)", message, seconds, limit)


@contextmanager
def repeated(action: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Repeats an action in another thread while the context runs, for calls that block."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(interval_s):
            action()

    thread = threading.Thread(target=watch, name="trl_darts-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@asynccontextmanager
async def log_while_waiting(message: str, limit_s: float | None = None) -> AsyncIterator[None]:
    """Logs the message every ten seconds while the context runs."""
    waiting = Waiting(limit_s)

    async def watch() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            waiting.log(message)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class LoopLag:
    """Notes when the loop was late to run its timers, while `watch` runs. Times are those of `time.perf_counter`."""

    def __init__(self) -> None:
        self._ticked = time.perf_counter()
        self._late = -float("inf")  # last time at which it was late

    async def watch(self) -> None:
        while True:
            self._ticked = time.perf_counter()
            await asyncio.sleep(TICK_S)
            if self._is_late:
                self._late = time.perf_counter()

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() - self._ticked > TICK_S + LATE_S

    def was_late_since(self, time_s: float) -> bool:
        """Whether the loop was late by more than a second at any time since then."""
        return self._late >= time_s or self._is_late
