"""Addresses of vLLM servers."""

import socket
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
