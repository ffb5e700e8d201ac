"""`Stopwatch`: seconds of something that is done in parts, without what is done in between."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Sums the seconds inside `running`, but for those inside `paused`, which is used within it."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds -= time.perf_counter() - begin

    def pop(self) -> float:
        """The sum until now, which begins again."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
