"""Checks, before minutes of work are done, that a command can write its file."""

from pathlib import Path

from ..errors import ConfigurationError


def check_writable(name: str, path: Path) -> None:
    """Raises [`ConfigurationError`] if the file of an argument can't be written. Leaves the file unchanged."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        return  # opening a pipe waits for its reader
    is_new = not path.exists()
    try:
        with path.open("ab"):  # permissions don't show a read-only mount, or a name that is too long
            pass
    except OSError as error:
        raise ConfigurationError(
            f"`{name}` ({str(path)!r}) must be a file that can be written: {error.strerror}. Choose another."
        ) from error
    if is_new:
        path.unlink()
