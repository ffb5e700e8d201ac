"""How a server fails, and how that reads in a message."""

import errno

import aiohttp

from .vllm_api import ServerRefusedError


OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
FAILURES = (aiohttp.ClientError, TimeoutError, ServerRefusedError)


def is_our_own(error: BaseException) -> bool:
    """Whether a connection failed because this process or machine has too many, which says nothing of the server."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in OWN_ERRORS


def describe(error: BaseException | None, waited_for: str) -> str:
    """Returns a message for an error. `waited_for` describes a timeout, which has no message."""
    if isinstance(error, ServerRefusedError):
        return str(error)
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
        return "nothing listens there"
    reset = isinstance(error, OSError) and error.errno == errno.ECONNRESET
    if reset or isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "it closed the connection in the middle of an answer"
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer to {waited_for}"
    return f"{type(error).__name__}: {error}"
