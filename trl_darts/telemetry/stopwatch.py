"""A stopwatch for work that is done in parts."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Stopwatch:
    """Sums the seconds inside `running`, except those inside `paused`. Blocks nest, and the innermost decides."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._is_running = False
        self._since = 0.0

    def running(self) -> AbstractContextManager[None]:
        return self._while(True)

    def paused(self) -> AbstractContextManager[None]:
        return self._while(False)

    @contextmanager
    def _while(self, runs: bool) -> Iterator[None]:
        before = self._is_running
        self._switch(runs)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, runs: bool) -> None:
        now = time.perf_counter()
        if self._is_running:
            self._seconds += now - self._since
        self._is_running, self._since = runs, now

    def pop(self) -> float:
        """Returns the sum of the blocks that have ended, and resets it."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
