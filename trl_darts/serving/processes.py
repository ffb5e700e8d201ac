"""One server: start it behind its guard, ask how it is, end it with everything that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from ..errors import TRLDARTSError
from . import guard
from .command import ServerCommand


GRACE_S = 10.0  # from SIGTERM to SIGKILL: vLLM takes about 2 s when idle
HEALTH_TIMEOUT_S = 2.0
TAIL_LINES = 30
TAIL_BYTES = 64 * 1024

_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy in the environment is not for us


class ServerFailedError(TRLDARTSError, RuntimeError):
    """
    A server died, or did not become healthy. Carries the end of its log.

    Args:
        message (`str`):
            What happened.
        exit_code (`int`):
            What the command should end with.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code or 1  # a server that ended with 0 was not asked to


class ServerProcess:
    """
    One server, which can be started again.

    Args:
        command ([`ServerCommand`]):
            What to run.
        log_path (`Path`):
            File for everything that the server prints.
        grace_s (`float`, *optional*, defaults to `10.0`):
            Seconds between SIGTERM and SIGKILL when it is stopped.
    """

    def __init__(self, command: ServerCommand, log_path: Path, grace_s: float = GRACE_S) -> None:
        self.command = command
        self.log_path = log_path
        self.grace_s = grace_s
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again; the log then goes on."""
        self.ask_to_stop()  # the ended guard's lifeline is still open here
        with self.log_path.open("wb" if self._guard is None else "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, str(self.grace_s), *self.command.argv],
                stdin=subprocess.PIPE,  # the guard's lifeline: never written to, closed by `ask_to_stop` or our death
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.command.env},
                start_new_session=True,  # Ctrl-C in the terminal is for us
            )

    @property
    def pid(self) -> int:
        """The guard, leader of the server's session. `0` before the first start."""
        return self._guard.pid if self._guard is not None else 0

    def poll(self) -> int | None:
        """The exit code, 128 + signal if one killed it. `None` while it runs, or if it was never started."""
        if self._guard is None:
            return None
        ended_before = self._guard.returncode is not None
        code = self._guard.poll()
        if code is None:
            return None
        if code < 0 and not ended_before:
            guard.kill_family(self._guard.pid)  # someone killed the guard, which would have done this
        return code if code >= 0 else 128 - code

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200."""
        try:
            with _LOCAL.open(f"{self.command.health_url}/health", timeout=HEALTH_TIMEOUT_S) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def ask_to_stop(self) -> None:
        """Let the guard end the server. Returns at once; safe to call twice."""
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()

    def kill(self) -> None:
        """End every process of the server now, the guard included."""
        if self._guard is None:
            return
        self.ask_to_stop()
        if self._guard.poll() is None:
            # While the guard lives, all descendants are found, and none can start anew under another parent.
            guard.kill_family(self._guard.pid)
            self._guard.kill()
        self._guard.wait()
        guard.kill_family(self._guard.pid)

    def log_tail(self) -> str:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
        except OSError as error:
            return f"(no log: {error})"
