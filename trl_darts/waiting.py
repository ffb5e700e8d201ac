"""What is waited for is said every ten seconds, with the time that is left. No wait is silent, and none is chatty."""

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
    """One wait, which begins now and ends after `limit_s` if that is known."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s
        self._start = time.monotonic()
        self._num_said = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def say(self, what: str) -> None:
        """Log what is waited for, if it is time. May be called as often as one likes."""
        seconds = self.seconds
        if seconds >= (self._num_said + 1) * INTERVAL_S:
            self._num_said = int(seconds // INTERVAL_S)
            limit = "" if self.limit_s is None else f" of {self.limit_s:.0f}"
            logger.warning("%s (%.0f%s s)", what, seconds, limit)


@contextmanager
def repeated(action: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Inside, a call may block: the action is done again and again in another thread."""
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
async def said_meanwhile(what: str, limit_s: float | None = None) -> AsyncIterator[None]:
    """Inside, what is awaited is said."""
    waiting = Waiting(limit_s)

    async def watch() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            waiting.say(what)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
