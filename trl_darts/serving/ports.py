"""Addresses: which are public, which ports are free, and under which name others reach them."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

from ..errors import ConfigurationError


WILDCARDS = ("0.0.0.0", "::")
MAX_PORT = 65535
NUM_TRIES = 1000  # how far the next free ports are looked for, to name them in an error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name counts if all its addresses are."""
    try:
        return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in _addresses(host))
    except OSError:
        return False


def check_ports(host: str, ports: range) -> None:
    """
    Tries each port.

    Raises:
        [`ConfigurationError`]: If one is taken, or the address is not one of this machine.
    """
    if ports[0] < 1 or ports[-1] > MAX_PORT:
        raise ConfigurationError(
            f"`port` ({ports[0]}) must leave {len(ports)} port(s), one per server, between 1 and {MAX_PORT}."
        )
    try:
        taken = [port for port in ports if not _is_free(host, port)]
    except PermissionError as error:
        raise ConfigurationError(
            f"`port` ({ports[0]}) must be one that this user may open. Choose a `--port` of 1024 or more."
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"`host` ({host!r}) must be an address of this machine: {error.strerror}. Use 127.0.0.1 for trainers here."
        ) from error
    if taken:
        start = _next_free(host, ports)
        remedy = "Choose another `--port`" if start is None else f"`--port {start}` is free"
        raise ConfigurationError(
            f"`port` ({ports[0]}) must be the first of {len(ports)} free port(s), one per server, and something "
            f"listens on {', '.join(map(str, taken))} already. {remedy}, or end what runs there."
        )


def local_url(host: str, port: int) -> str:
    """How this process reaches a server."""
    return _url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def public_url(host: str, port: int) -> str:
    """How the trainer reaches a server: by the machine's name where it listens on every address."""
    return _url(socket.gethostname() if host in WILDCARDS else host, port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _addresses(host: str) -> Iterable[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def _is_free(host: str, port: int) -> bool:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        # As vLLM does, so that a server which ended a moment ago does not count. vLLM also sets SO_REUSEPORT: two
        # servers would then share one port without an error, which is why nobody but us finds a port that is taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _next_free(host: str, ports: range) -> int | None:
    length = len(ports)
    for start in range(ports[-1] + 1, min(ports[-1] + NUM_TRIES, MAX_PORT - length)):
        if all(_is_free(host, port) for port in range(start, start + length)):
            return start
    return None
