"""A stopwatch for work that is done in parts."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Stopwatch:
    """Sums the seconds inside `running`, except those inside a nested `paused`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def running(self) -> AbstractContextManager[None]:
        return self._counted(1)

    def paused(self) -> AbstractContextManager[None]:
        return self._counted(-1)

    @contextmanager
    def _counted(self, sign: int) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += sign * (time.perf_counter() - begin)

    def pop(self) -> float:
        """Returns the sum and resets it."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
