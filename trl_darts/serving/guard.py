"""
The process between us and a server: it ends the server, and everything that the server started, when we are gone.

Its standard input is a pipe to which nothing is ever written. The kernel closes it when `trl-darts serve` closes its
end *or dies*, SIGKILL included: stopping on purpose and dying are one mechanism. On that end, on a signal, or when the
server ends by itself, the guard sends the server SIGTERM, waits, and kills what is left of it.

It leads the server's process session and is the "subreaper" of its descendants: a process whose parent died becomes a
child of the guard, also if it opened a session of its own. vLLM's engine process outlives its API process otherwise.

What this can't cover: the guard killed by SIGKILL at the same time as the process that started it. The API process
then still dies with the guard (PR_SET_PDEATHSIG), but its engine processes may stay.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil


POLL_S = 0.1
KILL_TIMEOUT_S = 10.0  # a process in an uninterruptible wait, of a GPU's driver say, may need some of it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)  # loaded here, since nothing should be loaded between fork and exec


def family(leader: int) -> list[psutil.Process]:
    """The running processes of a leader's session, and its descendants. Without the leader."""
    found = set()
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.getsid(process.pid) == leader:
                found.add(process)
    with suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(leader).children(recursive=True))
    return [process for process in found if process.pid != leader and runs(process)]


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that its parent did not collect yet has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_family(leader: int) -> None:
    """Kill the leader's family until none of it is left, or time is up."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (members := family(leader)) and time.monotonic() < deadline:
        for process in members:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(POLL_S / 10)


def run(grace_s: float, argv: list[str]) -> int:
    """Run a server to its end or ours, and return its exit code; 128 + signal if one killed it, as in a shell."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))  # not SIG_IGN: the server would inherit that
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server: subprocess.Popen[Any] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while server.poll() is None and not asked and not select.select([0], [], [], POLL_S)[0]:
        pass
    server.terminate()  # it alone: vLLM's API process ends its engine in order
    with suppress(subprocess.TimeoutExpired):
        server.wait(grace_s)
    kill_family(os.getpid())
    code = server.wait()
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
