"""Servers that start in a moment, and who is told about them."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.servers import free_port
from trl_darts.errors import ConfigurationError
from trl_darts.serving import ServerCommand, ServerProcess, VLLMBuild
from trl_darts.serving.ports import check_ports


FAKE_SERVER = Path(__file__).with_name("fake_server.py")
CPU = VLLMBuild("0.31.0", cpu=True)
CUDA = VLLMBuild("0.31.0", cpu=False, devices=("0", "1", "2", "3"))
_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_ports(count: int) -> range:
    """Ports in a row that nobody listens on at this moment."""
    while True:
        first = free_port()
        with suppress(ConfigurationError):
            check_ports("127.0.0.1", range(first, first + count))
            return range(first, first + count)


def fake_command(*options: str, env: dict[str, str] | None = None) -> ServerCommand:
    """A command of the fake server, with a free port."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    return ServerCommand(port, url, url, (sys.executable, str(FAKE_SERVER), "--port", str(port), *options), env or {})


def fake_process(tmp_path: Path, *options: str, grace_s: float = 10.0) -> ServerProcess:
    """A fake server, not started yet."""
    command = fake_command(*options)
    return ServerProcess(command, tmp_path / f"{command.port}.log", grace_s)


def make_exit(process: ServerProcess, code: int) -> None:
    """Ask a fake server to end."""
    with suppress(OSError):
        _LOCAL.open(f"{process.command.health_url}/exit?{code}", timeout=5)


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def all_ended(processes: list[psutil.Process], timeout_s: float = 20.0) -> bool:
    """Whether all processes end in time. One that nobody has collected yet has ended."""
    deadline = time.monotonic() + timeout_s
    while any(_runs(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Recorder:
    """Remembers what it is told, and asks to stop where a test wants it."""

    def __init__(self, on_ready: Callable[[], None] = lambda: None) -> None:
        self.events: list[str] = []
        self.num_ready = 0
        self._on_ready = on_ready

    def progress(self, servers: object, now: float) -> None:
        pass

    def ready(self) -> None:
        self.num_ready += 1
        self._on_ready()

    def event(self, text: str) -> None:
        self.events.append(text)
