"""Checks, before any work is done, that a command can write its files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigurationError


def check_writable(name: str, path: Path) -> None:
    """Raises [`ConfigurationError`] if the file of an argument can't be written. Leaves the file unchanged."""
    if os.path.isdir(path):  # unlike `Path.is_dir`, it accepts names that are too long
        raise _not_writable(name, path, "it is a directory")
    if not os.path.isdir(path.parent):
        raise _not_writable(name, path, f"the directory {str(path.parent)!r} does not exist")
    target = Path(os.path.realpath(path))  # the target of a broken link would be created, and must be removed
    is_new = not os.path.exists(target)
    if not is_new and not os.path.isfile(target):
        return  # opening a pipe waits for its reader
    with writing(name, path):
        # Permissions don't show /proc, a read-only mount, or a name that is too long.
        with target.open("ab"):
            pass
        if is_new:
            target.unlink()


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` into a [`ConfigurationError`] that names the argument."""
    try:
        yield
    except OSError as error:  # such as a full disk
        raise _not_writable(name, path, error.strerror) from error


def check_directory(name: str, path: Path) -> None:
    """Creates a missing directory. Raises [`ConfigurationError`], which names the argument, if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"`{name}` ({str(path)!r}) must be a directory that can be made: {error.strerror}. Choose another."
        ) from error


def _not_writable(name: str, path: Path, reason: str | None) -> ConfigurationError:
    """Builds the error for a file that can't be written."""
    return ConfigurationError(
        f"`{name}` ({str(path)!r}) must be a file that can be written: {reason}. Choose another."
    )
