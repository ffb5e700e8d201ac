"""
Reads the list of servers on a Ray cluster.

Ray runs in a child process, `ray_reader`. A driver of Ray ends when Ray's head node is lost, and it replaces signal
handlers. Neither may happen to a trainer, whose servers do not need Ray to decode.
"""

import json
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

from ..errors import ConfigurationError
from ..import_utils import is_ray_available
from . import ray_reader
from .server_list import RAY_PREFIX, ServerList, ServerListError, taken, this_process


START_S = 60.0  # for the child process to connect to Ray
RESTART_S = 10.0  # between two starts of it, each of which takes half a second of a core


class RaySource:
    """A named actor of `trl-darts serve --on ray`. The trainer claims it by reading it."""

    def __init__(self, name: str) -> None:
        if not is_ray_available():
            raise ConfigurationError(
                f"`vllm_server_list` ({RAY_PREFIX + name!r}) needs Ray. Install it with `pip install "
                "'trl-darts[ray]'`, or use a file of `trl-darts serve --on ray --output`."
            )
        self.name = name
        self._owner = f"{this_process()} ({uuid.uuid4().hex[:8]})"
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._last: dict[str, Any] | None = None
        self._read_at = 0.0
        self._started_at = 0.0

    def read(self) -> ServerList:
        """See `ServerSource`."""
        process = self._process
        if process is None or (process.poll() is not None and time.monotonic() - self._started_at > RESTART_S):
            process = self._start()
        with self._changed:
            self._changed.wait_for(lambda: self._last is not None, START_S)
            last, age_s = self._last, time.monotonic() - self._read_at
        if last is None or age_s > 2 * ray_reader.ANSWER_S:
            last = {"error": "Ray does not answer"}
            process.kill()  # waiting for a lost cluster takes most of a core; the next call starts another
        if "taken" in last:
            raise taken(RAY_PREFIX + self.name, last["taken"])
        if "error" in last:
            raise ServerListError(f"`vllm_server_list` ({RAY_PREFIX + self.name!r}) can't be read: {last['error']}.")
        return ServerList.of(last)

    def _start(self) -> "subprocess.Popen[str]":
        self._last, self._started_at = None, time.monotonic()
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", ray_reader.__file__, self.name, self._owner],
            stdin=subprocess.PIPE,  # never written to, closed by `close` or our death
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the trainer
        )
        threading.Thread(target=self._receive, args=(process,), daemon=True).start()
        return process

    def _receive(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                with suppress(ValueError), self._changed:  # Ray may print something else
                    self._last, self._read_at = json.loads(line), time.monotonic()
                    self._changed.notify_all()
        with self._changed:
            self._last = self._last or {"error": "the process that reads it has ended"}
            self._changed.notify_all()

    def close(self) -> None:
        """See `ServerSource`."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
