"""
Lists of servers that change during a run. `trl-darts serve` writes them, a trainer reads them.

A list is a JSON file, a directory with one such file per `trl-darts serve`, or a named Ray actor. It has the addresses
of the healthy servers. A trainer claims the list it reads: two trainers would replace each other's weights.
"""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

from ..errors import ConfigurationError, TRLDARTSError
from .addresses import check_address, split_addresses


RAY_PREFIX = "ray:"
ROOT = 0
LOCK_SUFFIX = ".trainer"  # of the file with which a trainer claims a list

logger = logging.getLogger(__name__)


class ServerListError(TRLDARTSError, OSError):
    """Raised if a list can't be read now. A later attempt may succeed."""


@dataclass(frozen=True)
class ServerList:
    """Addresses of healthy servers, and how many servers there should be."""

    urls: tuple[str, ...] = ()
    num_servers: int = 0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "ServerList":
        """Checks and returns the data of a list."""
        urls = tuple(url for text in data["servers"] for url in split_addresses(text))
        for url in urls:
            check_address("servers", url)
        return cls(urls, int(data["num_servers"]))

    def write(self, path: Path) -> None:
        """Replaces a file at once, so that no reader sees half of it."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps({"servers": self.urls, "num_servers": self.num_servers}) + "\n")
        partial.chmod(partial.stat().st_mode & 0o755)
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "ServerList":
        """Reads a file, or the files of a directory together."""
        try:
            files = sorted(path.glob("*.json")) if path.is_dir() else [path]
            access = {file: file.stat() for file in files}
            parts = [cls.of(json.loads(file.read_text())) for file in files]
        except OSError as error:  # on a network file system also while a file is replaced
            raise ServerListError(f"`vllm_server_list` ({str(path)!r}) can't be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerListError(
                f'`vllm_server_list` ({str(path)!r}) must have JSON like {{"servers": ["http://10.0.0.7:8000"], '
                f'"num_servers": 1}}: {type(error).__name__} {error}. Use a file of `trl-darts serve --output`.'
            ) from error
        for file, status in access.items():
            _check_access(file, status)
        urls = tuple(dict.fromkeys(url for part in parts for url in part.urls))
        return cls(urls, sum(part.num_servers for part in parts))


def _check_access(file: Path, status: os.stat_result) -> None:
    """Raises for a file that anyone can change: the servers that it names get the key, the prompts and the weights."""
    if status.st_mode & 0o002:
        raise ConfigurationError(
            f"`vllm_server_list` ({str(file)!r}) must not be writable by every user, who could name servers of their "
            f"own: these get the key, the prompts and the weights. Run `chmod o-w {file}`."
        )
    if status.st_uid not in (os.getuid(), ROOT):
        _warn_of_owner(file, status.st_uid)


@cache
def _warn_of_owner(file: Path, owner: int) -> None:
    logger.warning("%s belongs to user %d, whose servers get the key, the prompts and the weights.", file, owner)


class ServerSource(Protocol):
    """Where a trainer finds its servers."""

    def read(self) -> ServerList:
        """
        Returns the list of now. May block. Raises [`ServerListError`] if that fails, and [`ConfigurationError`] if
        another trainer uses the servers.
        """
        ...

    def close(self) -> None:
        """Gives up the claim."""
        ...


class FileSource:
    """A file, or a directory of files. The trainer holds a lock next to it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self._lock: IO[str] | None = None

    def read(self) -> ServerList:
        """See [`ServerSource`]."""
        found = ServerList.read(self.path)
        if self._lock is None:
            self._claim()
        return found

    def _claim(self) -> None:
        path = self.path.with_name(self.path.name + LOCK_SUFFIX)
        try:
            lock = path.open("a+")
        except OSError:  # a read-only directory
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when this process ends
        except OSError as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                raise taken(str(self.path), path.read_text().strip()) from error
            return  # a file system without locks
        lock.truncate(0)
        lock.write(this_process())
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        """See [`ServerSource`]."""
        if self._lock is not None:
            with suppress(OSError):
                Path(self._lock.name).unlink()
            self._lock.close()
            self._lock = None


def check_source(value: str) -> None:
    """Raises [`ConfigurationError`] for a value that can't be a list. Whether there is one shows at the start."""
    name = value.removeprefix(RAY_PREFIX)
    if not name or (name.startswith("/") and value != name) or value.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"`vllm_server_list` ({value!r}) must be a file or a directory of `trl-darts serve --output`, or "
            "'ray:NAME' with the `--name` of `trl-darts serve --on ray`. Addresses belong in `vllm_server_base_url`."
        )


def this_process() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def taken(value: str, owner: str) -> ConfigurationError:
    """Returns the error for a list that another trainer uses."""
    return ConfigurationError(
        f"`vllm_server_list` ({value!r}) must be used by one trainer at a time, because each replaces the servers' "
        f"weights, and is used by {owner or 'another process'}. Stop that one, or start other servers."
    )
