"""
All servers together: start, wait until healthy, watch, start a dead one again, end all.

    WAITING ── its time comes ──> STARTING ── /health ──> HEALTHY
       ^                             │                       │
       └──────── it died, with `restart` and once all were healthy ┘

Single-threaded: one look at every server, then a short sleep.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import FrameType, TracebackType
from typing import Any, Protocol

from .processes import ServerFailedError, ServerProcess


POLL_S = 0.2
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
# A server that stays healthy this long did not fail because of how it was started: its failures are counted anew.
STABLE_S = 10.0
MAX_FAILURES = 5  # in a row. With the backoff, the last start comes 15 s of waiting after the first failure
KILL_MARGIN_S = 15.0  # what a guard may need beyond its grace period, to kill and to collect


class State(str, Enum):
    """What a server is doing."""

    WAITING = "waiting to restart"
    STARTING = "starting"
    HEALTHY = "healthy"


@dataclass
class Watched:
    """
    A server and its history.

    Args:
        process ([`ServerProcess`]):
            The server.
        state ([`State`], *optional*):
            What it is doing.
        since (`float`, *optional*):
            When it began to.
        failures (`int`, *optional*):
            How often it failed in a row.
        restart_at (`float`, *optional*):
            When it is to be started again.
    """

    process: ServerProcess
    state: State = State.STARTING
    since: float = 0.0
    failures: int = 0
    restart_at: float = 0.0

    def enter(self, state: State, now: float) -> None:
        """Take a state."""
        self.state, self.since = state, now


class Reporter(Protocol):
    """Who is told what happens."""

    def progress(self, servers: Sequence[Watched], now: float) -> None:
        """A look at the servers while not all are healthy; called often."""

    def ready(self) -> None:
        """All servers are healthy, for the first time."""

    def event(self, text: str) -> None:
        """Something happened that a user wants to know."""


class StopRequest(AbstractContextManager["StopRequest"]):
    """Counts SIGINT, SIGTERM and SIGHUP instead of dying of them: the first asks to stop, the second to hurry."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._before: list[Any] = []

    def __enter__(self) -> StopRequest:
        self._before = [signal.signal(number, self._count) for number in self.SIGNALS]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class Supervisor:
    """
    Runs servers until it is told to stop, or until one fails for good.

    Args:
        servers (`Sequence[ServerProcess]`):
            The servers, not started yet.
        timeout_s (`float`):
            Seconds in which a server must be healthy after a start.
        restart (`bool`, *optional*, defaults to `False`):
            Whether a server that dies after all were healthy is started again. One that dies before is not: a second
            try would not make a wrong flag right.
        clock (`Callable`, *optional*):
            Seconds, from anywhere.
    """

    def __init__(
        self,
        servers: Sequence[ServerProcess],
        timeout_s: float,
        restart: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = [Watched(server) for server in servers]
        self.timeout_s = timeout_s
        self.restart = restart
        self.clock = clock
        self.was_ready = False

    def run(self, reporter: Reporter, stop: StopRequest) -> None:
        """
        Start all, watch until `stop` counts a signal, and end all, whatever happens.

        Raises:
            [`ServerFailedError`]: If a server died or did not become healthy, and is not to be started again.
        """
        try:
            for watched in self.servers:
                self._start(watched)
            while not stop.count:
                self.look(reporter)
                time.sleep(POLL_S)
            reporter.event("Stopping. Once more to kill." if stop.count == 1 else "Killing.")
        finally:
            self.stop(stop)

    def look(self, reporter: Reporter) -> None:
        """One look at every server, and what follows from it."""
        for watched in self.servers:
            if watched.state is State.WAITING:
                if self.clock() >= watched.restart_at:
                    self._start(watched)
                continue
            code = watched.process.poll()
            if code is not None:
                self._failed(watched, reporter, f"ended with exit code {code}", code)
            elif watched.state is State.STARTING:
                self._look_at_start(watched, reporter)
        if all(watched.state is State.HEALTHY for watched in self.servers):
            if not self.was_ready:
                self.was_ready = True
                reporter.ready()
        else:
            reporter.progress(self.servers, self.clock())

    def stop(self, stop: StopRequest) -> None:
        """End all servers at the same time: politely, then surely; surely at once if asked twice."""
        running = [watched.process for watched in self.servers]
        for process in running:
            process.ask_to_stop()
        deadline = self.clock() + max((process.grace_s for process in running), default=0.0) + KILL_MARGIN_S
        while any(process.pid and process.poll() is None for process in running):
            if stop.count > 1 or self.clock() > deadline:
                break
            time.sleep(POLL_S / 4)
        for process in running:
            process.kill()

    def _start(self, watched: Watched) -> None:
        watched.process.start()
        watched.enter(State.STARTING, self.clock())

    def _look_at_start(self, watched: Watched, reporter: Reporter) -> None:
        if watched.process.is_healthy():
            seconds = self.clock() - watched.since
            watched.enter(State.HEALTHY, self.clock())
            reporter.event(f"{watched.process.command.base_url} is healthy after {seconds:.0f} s.")
        elif self.clock() - watched.since > self.timeout_s:
            watched.process.kill()
            self._failed(watched, reporter, f"was not healthy within `timeout` ({self.timeout_s:g} s)", 1)

    def _failed(self, watched: Watched, reporter: Reporter, what: str, exit_code: int) -> None:
        now = self.clock()
        stable = watched.state is State.HEALTHY and now - watched.since >= STABLE_S
        watched.failures = 1 if stable else watched.failures + 1
        what = f"The vLLM server at {watched.process.command.base_url} {what}"
        log = f"The end of its log, {watched.process.log_path}:\n{watched.process.log_tail()}"
        if not (self.restart and self.was_ready):
            raise ServerFailedError(f"{what}. {log}", exit_code)
        if watched.failures > MAX_FAILURES:
            raise ServerFailedError(
                f"{what}, {watched.failures} times in a row and each within {STABLE_S:g} s of being healthy. {log}",
                exit_code,
            )
        delay_s = min(FIRST_BACKOFF_S * 2 ** (watched.failures - 1), MAX_BACKOFF_S)
        watched.restart_at = now + delay_s
        watched.enter(State.WAITING, now)
        reporter.event(f"{what}; it is started again in {delay_s:g} s. Log: {watched.process.log_path}")
