"""
Runs between `trl-darts serve` and a server, and stops the server and all its descendants when `serve` has ended.

Its standard input is a pipe to which nothing is ever written. The kernel closes it when `trl-darts serve` closes its
end *or dies*, even by SIGKILL, so one mechanism covers both cases. When the pipe closes, on a signal, or when the
server exits, the guard sends the server SIGTERM, waits, and kills all remaining processes.

The guard leads the server's process session and is the "subreaper" of its descendants: a process whose parent died
becomes a child of the guard, even in a session of its own. Otherwise vLLM's engine process outlives its API process.

Not covered: the guard and the process that started it are killed by SIGKILL at the same time. The API process then
still dies with the guard (PR_SET_PDEATHSIG), but its engine processes may survive.
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
KILL_TIMEOUT_S = 10.0  # a process may be in an uninterruptible wait, for example of a GPU driver
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)  # loaded at import, because nothing should be loaded between fork and exec


def family(leader: int) -> list[psutil.Process]:
    """Returns the running processes of a leader's session and its descendants, without the leader."""
    found = set()
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.getsid(process.pid) == leader:
                found.add(process)
    with suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(leader).children(recursive=True))
    return [process for process in found if process.pid != leader and runs(process)]


def runs(process: psutil.Process) -> bool:
    """Whether a process is running. A zombie is not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_family(leader: int) -> None:
    """Kills the leader's family until no process remains, or the timeout expires."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (members := family(leader)) and time.monotonic() < deadline:
        for process in members:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(POLL_S / 10)


def run(grace_s: float, argv: list[str]) -> int:
    """Runs a server until it or `serve` ends. Returns its exit code, or 128 + signal as in a shell."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))  # the server would inherit SIG_IGN
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server: subprocess.Popen[Any] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while server.poll() is None and not received and not select.select([0], [], [], POLL_S)[0]:
        pass
    server.terminate()  # only the API process, which shuts its engine down in order
    with suppress(subprocess.TimeoutExpired):
        server.wait(grace_s)
    kill_family(os.getpid())
    code = server.wait()
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
