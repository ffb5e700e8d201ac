"""Checks, before any work is done, that a command can write its files."""

import os
from pathlib import Path

from ..errors import ConfigurationError


def check_writable(name: str, path: Path) -> None:
    """Refuses a file that can't be written, and names the argument. Leaves the file unchanged."""
    if os.path.isdir(path):  # unlike `Path.is_dir`, it accepts names that are too long
        raise not_writable(name, path, "it is a directory")
    if not os.path.isdir(path.parent):
        raise not_writable(name, path, f"the directory {str(path.parent)!r} does not exist")
    target = Path(os.path.realpath(path))  # the target of a broken link would be created, and must be removed
    is_new = not os.path.exists(target)
    if not is_new and not os.path.isfile(target):
        return  # opening a pipe waits for its reader
    try:
        # Permissions say nothing of /proc, a read-only mount, or a name that is too long.
        with target.open("ab"):
            pass
        if is_new:
            target.unlink()
    except OSError as error:
        raise not_writable(name, path, error.strerror) from error


def check_directory(name: str, path: Path) -> None:
    """Creates a directory where it is missing, and names the argument if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"`{name}` ({str(path)!r}) must be a directory that can be made: {error.strerror}. Choose another."
        ) from error


def not_writable(name: str, path: Path, reason: str | None) -> ConfigurationError:
    """The error of a file that can't be written; `reason` may be an `OSError`'s `strerror`."""
    return ConfigurationError(
        f"`{name}` ({str(path)!r}) must be a file that can be written: {reason}. Choose another."
    )
