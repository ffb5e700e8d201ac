"""Logs what the trainer is waiting for, every ten seconds, with the elapsed time and the limit."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


INTERVAL_S = 10.0
POLL_S = 0.5

logger = logging.getLogger(__name__)


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
