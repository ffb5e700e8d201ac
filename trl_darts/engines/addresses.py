"""
Addresses of vLLM servers, and keys of those on loopback addresses, which every user of a machine can reach.

`trl-darts serve` makes such a key, and writes it to a file that only its user can read. Trainers of that user find it
there by the server's port.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigurationError


API_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's servers read their key from this variable


def split_addresses(text: str) -> list[str]:
    return [url.strip().rstrip("/") for url in text.split(",") if url.strip()]


def check_address(name: str, url: str) -> None:
    """Raises if a URL is malformed. A client would only notice at its first request, or use another host."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.count("://") == 1
    except ValueError:  # the port is not a number, or an IPv6 address has no brackets
        valid = False
    if not valid:
        raise ConfigurationError(
            f"`{name}` ({url!r}) must be an address with a scheme and a host. Write it like 'http://127.0.0.1:8000'."
        )


def is_this_machine(host: str) -> bool:
    """Whether `host` is an address of this machine, tested by binding a socket to it."""
    for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.bind(address)
        except OSError:
            continue
        return True
    return False


def key_path(url: str) -> Path | None:
    """Returns the file of a server's key, `None` unless its address is a loopback address."""
    parts = urlsplit(url)
    try:
        if parts.hostname != "localhost" and not ipaddress.ip_address(parts.hostname or "").is_loopback:
            return None
    except ValueError:  # another name
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache, "trl_darts", "keys", f"{socket.gethostname()}-{parts.port}")  # machines may share the directory


def key_of(url: str) -> str | None:
    """Returns the key of a server that this user has started, if there is one."""
    path = key_path(url)
    if path is None:
        return None
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
            return file.read().strip() or None if is_private else None
    except OSError:
        return None


def publish(url: str, key: str) -> None:
    """Writes a server's key for its user's trainers."""
    path = key_path(url)
    assert path is not None
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
        partial.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"The servers' key can't be written to {path}: {error.strerror}. Set {API_KEY_VARIABLE} for the servers "
            "and the trainer, or XDG_CACHE_HOME to a directory of yours."
        ) from error


def withdraw(url: str) -> None:
    """Removes the key of a server that has ended."""
    path = key_path(url)
    if path is not None:
        with suppress(OSError):
            path.unlink()


@contextmanager
def published(key: str | None, urls: Sequence[str]) -> Iterator[None]:
    """Publishes the key of servers, if they have one of their own, while the context runs."""
    try:
        for url in urls if key is not None else ():
            publish(url, key or "")
        yield
    finally:
        for url in urls if key is not None else ():
            withdraw(url)
