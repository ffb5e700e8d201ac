"""Finds the reason of a failure in a vLLM server's log."""

import re
from pathlib import Path


TAIL_BYTES = 1 << 17
MAX_LENGTH = 300  # of a reason: some errors print their whole input
# `ValueError: …`, `torch.OutOfMemoryError: …`, `api_server.py: error: …`, and pydantic's `Value error, …`.
_EXCEPTION = re.compile(r"(?:^|\s)(?P<message>(?:[A-Za-z_][\w.]*(?:Error|Exception)|[\w.-]+: error): \S.*)")
_INVALID = re.compile(r"^\s*Value error, (?P<message>.+?)(?: \[type=.*)?$")
# Errors that vLLM logs without an exception, such as a killed process.
_LOGGED = re.compile(r"\bERROR \S+ \S+ \[\S+\] (?P<message>(?!Traceback|Exception caught)\S.*)")
# Lines that refer to a reason elsewhere, and an exception whose message follows in the next lines.
_POINTER = re.compile(r"stack trace|root cause|EngineDeadError|\d+ validation errors? for")


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
