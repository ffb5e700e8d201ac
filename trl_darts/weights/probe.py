"""What a server's workers can see of the trainer. Runs in the servers' processes, so it imports nothing heavy."""

import hashlib
import socket
from pathlib import Path


CONNECT_S = 5.0
MAX_BYTES = 1024
PREFIX = ".trl_darts-check-"  # of the files that are read: a server must not tell what other files hold


def probe(
    path: str | None = None, digest: str = "", address: tuple[str, int] | None = None, nonce: str = ""
) -> dict[str, str | bool | None]:
    """
    Returns this package's version, whether a file of `trl-darts check` has the digest, and whether who listens at an
    address sends the nonce. `None` for what was not asked. Nothing else is told of the file or the address.
    """
    from .. import __version__

    return {
        "trl_darts": __version__,
        "reads": None if path is None else _reads(Path(path), digest),
        "connects": None if address is None else _connects((address[0], address[1]), nonce.encode()),
    }


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _reads(path: Path, digest: str) -> bool:
    try:
        if not path.name.startswith(PREFIX):
            return False
        with path.open("rb") as file:
            return digest_of(file.read(MAX_BYTES)) == digest
    except OSError:
        return False


def _connects(address: tuple[str, int], nonce: bytes) -> bool:
    try:
        with socket.create_connection(address, CONNECT_S) as connection:
            return bool(nonce) and connection.makefile("rb").read(len(nonce)) == nonce
    except OSError:
        return False
