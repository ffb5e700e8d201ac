"""The reason in a vLLM server's log."""

import re
from pathlib import Path


TAIL_BYTES = 1 << 17
MAX_LENGTH = 300  # of a reason: some errors print what they were given
# `ValueError: …`, `torch.OutOfMemoryError: …`, `api_server.py: error: …`, and pydantic's `Value error, …`.
_EXCEPTION = re.compile(r"(?:^|\s)(?P<words>(?:[A-Za-z_][\w.]*(?:Error|Exception)|[\w.-]+: error): \S.*)")
_INVALID = re.compile(r"^\s*Value error, (?P<words>.+?)(?: \[type=.*)?$")
# What vLLM logs without an exception, such as the end of a process that was killed.
_LOGGED = re.compile(r"\bERROR \S+ \S+ \[\S+\] (?P<words>(?!Traceback|Exception caught)\S.*)")
# Remarks that the reason stands elsewhere, and an exception whose words follow in the next lines.
_POINTER = re.compile(r"stack trace|root cause|EngineDeadError|\d+ validation errors? for")


def last_error(path: Path, offset: int = 0) -> str | None:
    """The last exception from `offset` on, or else the last logged error. `None` without one, or without a file."""
    lines = _tail(path, offset)
    for patterns in ((_INVALID, _EXCEPTION), (_LOGGED,)):
        for line in reversed(lines):
            found = next((match for pattern in patterns if (match := pattern.search(line))), None)
            if found is not None and not _POINTER.search(line):
                words = found["words"]
                return words if len(words) <= MAX_LENGTH else f"{words[:MAX_LENGTH]} […]"
    return None


def last_words(path: Path, offset: int = 0) -> str:
    """The last error, or else the last line."""
    return last_error(path, offset) or next((line for line in reversed(_tail(path, offset)) if line), "no word in it")


def _tail(path: Path, offset: int) -> list[str]:
    try:
        with path.open("rb") as log:
            log.seek(max(offset, path.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
