"""
Processes that begin where the imports end. To import torch, TRL and vLLM takes a process longer than most of what is
tested in one: here they are imported once, by a process that does nothing else, and what is started is a fork of it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import IO, Any

from benchmarks.vllm_server import start_vllm_server


SERVER = "vllm.entrypoints.openai.api_server"
PRELOADED = ["tests.launches.scenarios", "tests.conformance.run", "tests.conformance.images"]
PRELOADED += ["accelerate.commands.launch", "torch.distributed.run", SERVER]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Fork:
    """`python -m module …` as `subprocess.Popen` would start it; has of its interface what tests use."""

    def __init__(
        self,
        command: list[str],
        *,
        stdout: IO[Any],
        env: dict[str, str],
        start_new_session: bool = False,
        **_: Any,  # nothing is read from stdin, and stderr is written where stdout is
    ) -> None:
        assert command[:2] == [sys.executable, "-m"]
        arguments = (command[2:], env, os.path.abspath(stdout.name), start_new_session)
        self._process = _context.Process(target=_begin, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _begin(argv: list[str], env: dict[str, str], log: str, start_new_session: bool) -> None:
    if start_new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    if argv[0] == SERVER:
        _fork_the_engine()
    become(argv, log)


def _fork_the_engine() -> None:
    """vLLM's CPU build starts the engine's process afresh, for the sake of OpenMP's threads: here it has none."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def become(argv: list[str], log: str | Path) -> None:
    """Runs a module as `python -m` does, in this process, which writes what it says to a file from now on."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


# Starts a vLLM server of which that is true.
start_server = partial(start_vllm_server, popen=Fork)


def run(*command: object, log: Path, timeout: float, **env: str) -> str:
    """Runs a module to its end; returns what it said last if it ended with an error."""
    with log.open("wb") as stdout:
        argv = [sys.executable, "-m", *map(str, command)]
        fork = Fork(argv, stdout=stdout, env={**os.environ, **env}, start_new_session=True)
    try:
        failed = fork.wait(timeout)
    finally:
        if fork.poll() is None:
            os.killpg(fork.pid, signal.SIGKILL)
    return log.read_text(errors="replace")[-5000:] if failed else ""
