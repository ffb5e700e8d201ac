"""Fake servers that start at once."""

from __future__ import annotations

import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.vllm_server import free_port
from tests.waits import wait_for
from trl_darts.errors import ConfigurationError
from trl_darts.serving.build import VLLMBuild
from trl_darts.serving.command import ServerCommand
from trl_darts.serving.guard import runs
from trl_darts.serving.options import check_ports
from trl_darts.serving.supervisor import Server


FAKE_SERVER = Path(__file__).with_name("fake_server.py")
CPU = VLLMBuild("0.31.0", cpu=True)
CUDA = VLLMBuild("0.31.0", cpu=False, devices=("0", "1", "2", "3"))


def free_ports(count: int) -> range:
    """Returns adjacent ports that are free now."""
    while True:
        first = free_port()
        with suppress(ConfigurationError):
            check_ports("127.0.0.1", range(first, first + count))
            return range(first, first + count)


def fake_command(*options: str) -> ServerCommand:
    """Returns a command of the fake server with a free port."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    return ServerCommand(url, url, (sys.executable, str(FAKE_SERVER), "--port", str(port), *options))


def fake_server(tmp_path: Path, *options: str, grace_s: float = 10.0) -> Server:
    """Returns a fake server that is not started yet."""
    command = fake_command(*options)
    return Server(command, tmp_path / f"{command.argv[3]}.log", grace_s)


def make_exit(server: Server, code: int) -> None:
    """Makes a fake server exit."""
    with suppress(OSError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"{server.command.health_url}/exit?{code}", timeout=5
        )


def family(pid: int) -> list[psutil.Process]:
    """Returns a process and all its descendants."""
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def assert_ended(processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    """Asserts that all processes end in time."""
    assert processes
    wait_for(lambda: not any(map(runs, processes)), timeout_s)
