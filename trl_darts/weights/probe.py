"""What a server's workers can see of the trainer. Runs in the servers' processes, so it imports nothing heavy."""

import socket
from pathlib import Path


CONNECT_S = 5.0


def probe(path: str | None, address: tuple[str, int] | None) -> dict[str, str | None]:
    """
    Reads a file of the trainer's and connects to its address. Returns this package's version, and the file's text and
    the connection's error (empty without one), `None` for what was not asked.
    """
    from .. import __version__

    found: dict[str, str | None] = {"trl_darts": __version__, "text": None, "connection": None}
    if path is not None:
        try:
            found["text"] = Path(path).read_text()
        except OSError as error:
            found["text"] = f"{type(error).__name__}: {error.strerror}"
    if address is not None:
        try:
            socket.create_connection((address[0], address[1]), CONNECT_S).close()
            found["connection"] = ""
        except OSError as error:
            found["connection"] = error.strerror or str(error)
    return found
