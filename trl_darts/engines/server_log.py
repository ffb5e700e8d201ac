"""Finds a vLLM server's log on this machine, and the reason of a failure in it."""

import asyncio
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from .addresses import is_this_machine


TAIL_BYTES = 1 << 17
MAX_LENGTH = 300  # of a reason: some errors print their whole input
# `ValueError: …`, `torch.OutOfMemoryError: …`, `api_server.py: error: …`, and pydantic's `Value error, …`.
_EXCEPTION = re.compile(r"(?:^|\s)(?P<message>(?:[A-Za-z_][\w.]*(?:Error|Exception)|[\w.-]+: error): \S.*)")
_INVALID = re.compile(r"^\s*Value error, (?P<message>.+?)(?: \[type=.*)?$")
# Errors that vLLM logs without an exception, such as a killed process.
_LOGGED = re.compile(r"\bERROR \S+ \S+ \[\S+\] (?P<message>(?!Traceback|Exception caught)\S.*)")
# Lines that refer to a reason elsewhere, and an exception whose message follows in the next lines.
_POINTER = re.compile(r"stack trace|root cause|EngineDeadError|\d+ validation errors? for")
# The API process answers with this message if its engine process has died and written the error to the log.
_API_POINTER = re.compile(r"See stack trace \(above\) for the root cause")


class ServerLogs:
    """The files of servers' outputs, found while they run: after a loss, the process may be gone."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self._wanted: list[str] = []
        self._search: asyncio.Task[None] | None = None

    def find(self, base_urls: Iterable[str]) -> None:
        """Starts a search. Servers that return during one need one more, not one each."""
        self._wanted = list(base_urls)
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._find())

    async def _find(self) -> None:
        while self._wanted:
            urls, self._wanted = self._wanted, []
            self.paths |= await asyncio.to_thread(find_logs, urls)


def find_logs(base_urls: Iterable[str]) -> dict[str, Path]:
    """
    Returns the files of servers' outputs, in one scan: it reads all connections of the machine. Those that have none,
    or are on another machine or of another user, are left out.
    """
    try:
        ports = {url: port for url in base_urls if (port := _local_port(url)) is not None}
        connections = psutil.net_connections("tcp") if ports else []
        listening = {c.laddr.port: c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.pid}
        logs = {url: _output_of(listening[port]) for url, port in ports.items() if port in listening}
        return {url: log for url, log in logs.items() if log is not None}
    except (OSError, psutil.Error):  # access is denied
        return {}


def _local_port(base_url: str) -> int | None:
    """Returns a server's port if it is on this machine."""
    parts = urlsplit(base_url)
    try:
        if not is_this_machine(parts.hostname or ""):
            return None
    except OSError:  # its name has no address
        return None
    return parts.port or (443 if parts.scheme == "https" else 80)


def _output_of(pid: int) -> Path | None:
    try:
        log = Path(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:  # the process has just ended
        return None
    return log if log.is_file() else None


def explain(reason: str, log: Path | None) -> str:
    """Returns the reason of a loss with the log's path, and with the cause from the log if the server refers to it."""
    if _API_POINTER.search(reason):
        cause = None if log is None else last_error(log)
        reason = _API_POINTER.sub(lambda _: cause or "Its log has the cause", reason)
    return reason if log is None else f"{reason.rstrip('.')}. Its log: {log}"


def last_error(path: Path, offset: int = 0) -> str | None:
    """Returns the last exception after `offset`, or else the last logged error. `None` if there is neither."""
    lines = _tail(path, offset)
    for patterns in ((_INVALID, _EXCEPTION), (_LOGGED,)):
        for line in reversed(lines):
            found = next((match for pattern in patterns if (match := pattern.search(line))), None)
            if found is not None and not _POINTER.search(line):
                message = found["message"]
                return message if len(message) <= MAX_LENGTH else f"{message[:MAX_LENGTH]} […]"
    return None


def last_message(path: Path, offset: int = 0) -> str:
    """Returns the last error, or else the last line."""
    return last_error(path, offset) or next((line for line in reversed(_tail(path, offset)) if line), "it is empty")


def _tail(path: Path, offset: int) -> list[str]:
    try:
        with path.open("rb") as log:
            log.seek(max(offset, path.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
