"""Where the log of a server on this machine is, and what it adds to the words of a loss."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ..serving.log import last_error
from ..weights.files import is_this_machine


# An engine's process that dies leaves its own message in the log, and the API's process answers with this one.
_POINTER = re.compile(r"See stack trace \(above\) for the root cause")


def find_log(base_url: str) -> Path | None:
    """The file that a server's output goes to. `None` if it is on another machine, another user's, or in no file."""
    parts = urlsplit(base_url)
    try:
        if not is_this_machine(parts.hostname or ""):
            return None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                log = Path(os.readlink(f"/proc/{connection.pid}/fd/1"))
                return log if log.is_file() else None
    except (OSError, psutil.Error):  # it ended just now, or we may not look
        pass
    return None


def explain(reason: str, log: Path | None) -> str:
    """A loss with the words of its cause, where the server only points at its log, and with the log's path."""
    if _POINTER.search(reason):
        cause = None if log is None else last_error(log)
        reason = _POINTER.sub(lambda _: cause or "Its log has the cause", reason)
    return reason if log is None else f"{reason.rstrip('.')}. Its log: {log}"
