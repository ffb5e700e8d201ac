"""Files that a command is to write, checked before it does the work for them."""

import os
from pathlib import Path

from ..errors import ConfigurationError


def check_writable(name: str, path: Path) -> None:
    """Refuses a file that can't be written, and names the argument. The file is left as it was."""
    if os.path.isdir(path):  # unlike `Path.is_dir`, it takes names that are too long
        raise not_writable(name, path, "it is a directory")
    if not os.path.isdir(path.parent):
        raise not_writable(name, path, f"the directory {str(path.parent)!r} does not exist")
    target = Path(os.path.realpath(path))  # a link that leads nowhere must not be taken for a file of our own
    is_new = not os.path.exists(target)
    if not is_new and not os.path.isfile(target):
        return  # to open a pipe is to wait for its reader
    try:
        # Permissions alone don't tell: not of /proc, of a read-only mount, nor of a name that is too long.
        with target.open("ab"):
            pass
        if is_new:
            target.unlink()
    except OSError as error:
        raise not_writable(name, path, error.strerror) from error


def check_directory(name: str, path: Path) -> None:
    """Makes a directory if it is not there, and names the argument if it can't be made."""
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
