"""Finds the log of a server on this machine, and adds the cause of a loss to its message."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ..serving.log import last_error
from ..weights.files import is_this_machine


# An engine process that dies writes its error to the log, and the API process answers with this message.
_POINTER = re.compile(r"See stack trace \(above\) for the root cause")


def find_log(base_url: str) -> Path | None:
    """Returns the file of a server's output. `None` if there is none, or on another machine, or of another user."""
    parts = urlsplit(base_url)
    try:
        if not is_this_machine(parts.hostname or ""):
            return None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                log = Path(os.readlink(f"/proc/{connection.pid}/fd/1"))
                return log if log.is_file() else None
    except (OSError, psutil.Error):  # the process has just ended, or access is denied
        pass
    return None


def explain(reason: str, log: Path | None) -> str:
    """Returns the reason of a loss with the log's path, and with the cause from the log if the server refers to it."""
    if _POINTER.search(reason):
        cause = None if log is None else last_error(log)
        reason = _POINTER.sub(lambda _: cause or "Its log has the cause", reason)
    return reason if log is None else f"{reason.rstrip('.')}. Its log: {log}"
