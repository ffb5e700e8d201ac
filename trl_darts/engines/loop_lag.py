"""Measures how late the event loop is: a timeout only counts against a server if our own loop was on time."""

import asyncio
import time


TICK_S = 0.1
LATE_S = 1.0


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
