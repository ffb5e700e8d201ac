"""Checks, before minutes of work are done, that a command can write its file."""

import os
from pathlib import Path

from ..errors import ConfigurationError


def check_writable(name: str, path: Path) -> None:
    """Raises [`ConfigurationError`] if the file of an argument can't be written. Leaves the file unchanged."""
    target = Path(os.path.realpath(path))  # the target of a broken link would be created, and must be removed
    try:
        is_new = not target.exists()
        if not is_new and not (target.is_file() or target.is_dir()):
            return  # opening a pipe waits for its reader
        with target.open("ab"):  # permissions don't show a read-only mount, or a name that is too long
            pass
    except OSError as error:
        raise ConfigurationError(
            f"`{name}` ({str(path)!r}) must be a file that can be written: {error.strerror}. Choose another."
        ) from error
    if is_new:
        target.unlink()
