"""
The process between us and a server: it ends the server, and everything that the server started, when we are gone.

It reads its standard input, a pipe whose other end only the starting process holds, and to which nothing is ever
written. The kernel closes that end when its owner closes it *or dies*, SIGKILL included: stopping on purpose and dying
are one mechanism, which is so tested every time. On that end, on SIGTERM, or when the server ends by itself, the guard
sends the server SIGTERM, waits, and kills what is left of it.

It leads the process session of the server and is the "subreaper" of its descendants: a process whose parent died
becomes a child of the guard, also if it opened a session of its own. vLLM's engine process outlives its API process
otherwise.

What this can't cover: the guard killed by SIGKILL (or by the kernel for want of memory) *at the same time* as the
process that started it. The API process then still dies with the guard (PR_SET_PDEATHSIG), but its engine processes
may stay. If the guard alone is killed, the process that started it ends the session; only a process that had left the
session would stay, and vLLM starts none.

Run as a file in isolated mode, with nothing but the standard library: it is there before the server's imports are, and
costs 10 MB.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType


POLL_S = 0.1
KILL_TIMEOUT_S = 10.0  # a process in an uninterruptible wait, of a GPU's driver say, may need some of it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_LIBC = ctypes.CDLL(None)  # loaded here, since nothing should be loaded between fork and exec


def processes() -> dict[int, tuple[int, int]]:
    """(parent, session) of every process that runs. Those that ended and were not collected yet are left out."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            # The name before the last parenthesis may hold anything. After it: state, parent, group, session.
            state, parent, _, session = stat.read().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                found[int(pid)] = (int(parent), int(session))
    return found


def family(leader: int) -> set[int]:
    """The processes of a leader's session and all its descendants, without the leader."""
    table = processes()
    members = {pid for pid, (_, session) in table.items() if session == leader} | {leader}
    size = 0
    while size < len(members):
        size = len(members)
        members |= {pid for pid, (parent, _) in table.items() if parent in members}
    return members - {leader}


def kill_family(leader: int) -> None:
    """Kill the leader's family until none of it is left, or time is up."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (members := family(leader)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S / 10)


class Guard:
    """
    One server, and the wish to end it.

    Args:
        argv (`list[str]`):
            The server's program and arguments.
        grace_s (`float`):
            Seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, argv: list[str], grace_s: float) -> None:
        self.grace_s = grace_s
        self.asked = False
        # Handlers, not SIG_IGN: the server would inherit that.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._ask)
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)

    def run(self) -> int:
        """Wait, end everything, and return the server's exit code; 128 + signal if one killed it, as in a shell."""
        while self.server.poll() is None and not self.asked and not _input_closed():
            pass
        if self.server.poll() is None:
            self.server.terminate()  # it alone: vLLM's API process ends its engine in order
            with suppress(subprocess.TimeoutExpired):
                self.server.wait(self.grace_s)
        if self.server.poll() is None:
            self.server.kill()
        kill_family(os.getpid())
        code = self.server.wait()
        return code if code >= 0 else 128 - code

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def _input_closed() -> bool:
    readable, _, _ = select.select([0], [], [], POLL_S)
    return bool(readable) and not os.read(0, 1)


def _die_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(Guard(sys.argv[2:], float(sys.argv[1])).run())
