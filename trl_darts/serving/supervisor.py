"""
Starts servers as processes, waits until they are healthy, monitors and restarts them, and stops them all.

    WAITING ── delay is over ───> STARTING ── /health ──> HEALTHY
       ^                             │                       │
       └──────── it died, with `restart` and once all were healthy ┘

Servers that take turns on the same GPUs start in two sets: the tail servers once the main servers are healthy and
asleep. The supervisor is single-threaded: it polls every server, then sleeps briefly.
"""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import aiohttp

from ..engines.addresses import API_KEY_VARIABLE
from ..engines.server_log import last_message
from ..engines.vllm_api import TURN_TIMEOUT_S, ServerRefusedError, VLLMServer, new_session
from ..errors import TRLDARTSError
from . import guard
from .command import ServerCommand


POLL_S = 0.2
GRACE_S = 10.0  # from SIGTERM to SIGKILL: vLLM takes about 2 s when idle
KILL_MARGIN_S = 15.0  # additional time for a guard to kill and collect processes
HEALTH_TIMEOUT_S = 2.0
FIRST_BACKOFF_S = 1.0
STABLE_S = 10.0  # a server that was healthy for this long did not fail at its start; its failure count is reset
MAX_FAILURES = 5  # in a row: with the backoff, the last restart is 31 s of waiting after the first failure
NO_ANSWER = (aiohttp.ClientError, TimeoutError, ServerRefusedError)

T = TypeVar("T")


class ServerFailedError(TRLDARTSError, RuntimeError):
    """Raised when a server died or did not become healthy. Has the exit code for the command."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code or 1  # a server's exit code of 0 is also a failure


class ProcessState(StrEnum):
    """State of a server's process."""

    WAITING = "waiting to start"
    STARTING = "starting"
    HEALTHY = "healthy"
    GONE = "gone"  # permanently


@dataclass(eq=False)
class Server:
    """One server: its guard process, its log and its state."""

    command: ServerCommand
    log_path: Path
    grace_s: float = GRACE_S
    state: ProcessState = ProcessState.STARTING
    since: float = 0.0
    failures: int = 0  # in a row
    restart_at: float = 0.0
    log_offset: int = 0  # start of the log lines written in the current state
    process: subprocess.Popen[bytes] | None = None  # the guard's

    def start(self, now: float) -> None:
        """Starts or restarts the server. A restart appends to the log."""
        self.ask_to_stop()  # closes the pipe of the previous guard
        with self.log_path.open("wb" if self.process is None else "ab") as log:
            self.enter(ProcessState.STARTING, now)
            self.process = subprocess.Popen(
                # -P keeps the file's directory out of `sys.path`.
                [sys.executable, "-P", guard.__file__, str(self.grace_s), *self.command.argv],
                stdin=subprocess.PIPE,  # never written to, closed by `ask_to_stop` or our death
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.command.env},
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process
            )

    def enter(self, state: ProcessState, now: float) -> None:
        self.state, self.since = state, now
        self.log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0

    def poll(self) -> int | None:
        """Returns the exit code, or 128 + signal. `None` while it runs, or if it was never started."""
        if self.process is None:
            return None
        if self.process.returncode is None and (self.process.poll() or 0) < 0:
            guard.kill_family(self.process.pid)  # the guard was killed and could not do this
        code = self.process.returncode
        return 128 - code if code is not None and code < 0 else code

    def is_healthy(self) -> bool:
        with suppress(*NO_ANSWER):
            return self._ask(lambda server: server.get("/health", HEALTH_TIMEOUT_S)) is not None
        return False

    def take_turn(self, asleep: bool) -> None:
        """Puts the server to sleep, or wakes it up. Raises [`ServerFailedError`] if it does not respond."""
        try:
            self._ask(lambda server: server.sleep() if asleep else server.wake_up())
        except NO_ANSWER as error:
            raise ServerFailedError(
                f"The vLLM server at {self.command.base_url} did not {'go to sleep' if asleep else 'wake up'} "
                f"(log: {self.log_path}): {str(error) or f'no answer within {TURN_TIMEOUT_S:g} s'}.",
                1,
            ) from error

    def _ask(self, request: Callable[[VLLMServer], Awaitable[T]]) -> T:
        async def ask() -> T:
            async with new_session(self.command.env.get(API_KEY_VARIABLE)) as session:
                return await request(VLLMServer(self.command.health_url, session))

        return asyncio.run(ask())

    def ask_to_stop(self) -> None:
        """Makes the guard stop the server. Returns at once and can be called twice."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        """Kills every process of the server. The guard is last, because orphans are reparented to it."""
        self.ask_to_stop()
        if self.process is not None and self.poll() is None:
            guard.kill_family(self.process.pid)
            self.process.kill()
            self.process.wait()


@contextmanager
def counted_signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP in a list. One asks to stop, a second one to kill."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class Supervisor:
    """
    Runs servers until `stop` has a signal, or until all have died.

    Before all servers have been healthy once, a server that dies ends all: a retry would not fix a wrong flag, and no
    trainer uses the servers yet. Later, the others keep running, and with `restart` the dead server is restarted.
    """

    servers: Sequence[Server]
    timeout_s: float
    restart: bool = False
    clock: Callable[[], float] = time.monotonic
    takes_turns: bool = False  # whether main and tail servers share GPUs
    was_ready: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether all servers are healthy, except those gone."""
        return all(server.state in (ProcessState.HEALTHY, ProcessState.GONE) for server in self.servers)

    @property
    def urls(self) -> list[str]:
        """Addresses of the healthy servers without the tail servers."""
        healthy = [one.command for one in self.servers if one.state is ProcessState.HEALTHY]
        return [command.base_url for command in healthy if not command.tail]

    def describe(self) -> list[str]:
        """Returns each server's state and its duration."""
        now = self.clock()
        return [f"{one.command.base_url} {one.state.value} for {now - one.since:.0f} s" for one in self.servers]

    def run(self, stop: Sequence[int], report: Callable[[list[str]], None]) -> None:
        """Starts all servers, reports changes until `stop` has a signal, and finally stops all servers."""
        try:
            for server in self.servers:
                if self.takes_turns and server.command.tail:
                    server.restart_at = math.inf
                    server.enter(ProcessState.WAITING, self.clock())
                else:
                    server.start(self.clock())
            while not stop:
                report(self.look())
                time.sleep(POLL_S)
            report(["Stopping. Repeat to kill." if len(stop) == 1 else "Killing."])
        finally:
            self.end(stop)

    def look(self) -> list[str]:
        """
        Polls every server, starts or restarts those that are due, and returns messages for the user. Raises
        [`ServerFailedError`] if a server fails before all were healthy, or if the last one fails.
        """
        messages = [message for server in self.servers if (message := self._look_at(server))]
        if self.takes_turns and not self.was_ready:
            self._take_turns()
        self.was_ready = self.was_ready or self.is_ready
        return messages

    def _take_turns(self) -> None:
        """Puts the main servers to sleep while the tail servers start, then swaps their roles."""
        main, tail = ([server for server in self.servers if server.command.tail == kind] for kind in (False, True))
        if self.is_ready:
            for server in tail:
                server.take_turn(asleep=True)
            for server in main:
                server.take_turn(asleep=False)
        elif all(server.restart_at == math.inf for server in tail) and all(
            s.state is ProcessState.HEALTHY for s in main
        ):
            for server in main:
                server.take_turn(asleep=True)
            for server in tail:
                server.restart_at = 0.0

    def end(self, stop: Sequence[int]) -> None:
        """Stops all servers at once. Kills them after the grace period, or on a second signal."""
        for server in self.servers:
            server.ask_to_stop()
        deadline = self.clock() + max(server.grace_s for server in self.servers) + KILL_MARGIN_S
        while any(server.process is not None and server.poll() is None for server in self.servers):
            if len(stop) > 1 or self.clock() > deadline:
                break
            time.sleep(POLL_S / 4)
        for server in self.servers:
            server.kill()

    def _look_at(self, server: Server) -> str | None:
        now = self.clock()
        if server.state is ProcessState.GONE:
            return None
        if server.state is ProcessState.WAITING:
            if now >= server.restart_at:
                server.start(now)
            return None
        code = server.poll()
        if code is not None:
            return self._failed(server, f"ended with exit code {code}{_signal_of(code)}", code)
        if server.state is ProcessState.HEALTHY:
            return None
        if server.is_healthy():
            seconds = now - server.since
            server.enter(ProcessState.HEALTHY, now)
            return f"{server.command.base_url} is healthy after {seconds:.0f} s."
        if now - server.since > self.timeout_s:
            server.kill()
            return self._failed(server, f"was not healthy within `timeout` ({self.timeout_s:g} s)", 1)
        return None

    def _failed(self, server: Server, what: str, exit_code: int) -> str:
        """Decides the consequence of a failure: a restart, the loss of this server, or an error."""
        now = self.clock()
        stable = server.state is ProcessState.HEALTHY and now - server.since >= STABLE_S
        server.failures = 1 if stable else server.failures + 1
        if server.failures > MAX_FAILURES:
            what += f", {server.failures} times in a row and each within {STABLE_S:g} s of being healthy"
        message = f"The vLLM server at {server.command.base_url} {what} (log: {server.log_path})"
        if exit_code != 128 + signal.SIGKILL:  # leaves no trace in the log
            message += f": {last_message(server.log_path, server.log_offset).rstrip('.')}"
        message += "."
        if self.restart and self.was_ready and server.failures <= MAX_FAILURES:
            delay_s = FIRST_BACKOFF_S * 2 ** (server.failures - 1)
            server.restart_at = now + delay_s
            server.enter(ProcessState.WAITING, now)
            return f"{message} It restarts in {delay_s:g} s."
        server.enter(ProcessState.GONE, now)
        running = [other.command.base_url for other in self.servers if other.state is not ProcessState.GONE]
        if not self.was_ready or not running:
            raise ServerFailedError(message, exit_code)
        remedy = "" if self.restart else " Use `--restart` to restart servers that die."
        return f"{message} Still running: {', '.join(running)}.{remedy}"


def _signal_of(code: int) -> str:
    try:
        return f", by {signal.Signals(code - 128).name}"
    except ValueError:
        return ""
