"""How a command or a script ends that can't do what it was asked for: one line on standard error, no traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import ConfigurationError, TRLDARTSError


USAGE_ERROR = 2


def fail(message: str, exit_code: int = USAGE_ERROR) -> NoReturn:
    """One line on standard error, and the exit code."""
    typer.echo(f"Error: {message}", err=True)
    sys.exit(exit_code)


def one_line(error: BaseException) -> str:
    """The message of an error that may have several lines."""
    return " ".join(str(error).split())


@contextmanager
def one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """
    Ends that way after our own errors and `others`: exit code 2 where it was asked for what can't work, else the
    error's own, or 1.
    """
    try:
        yield
    except TRLDARTSError as error:
        default = USAGE_ERROR if isinstance(error, ConfigurationError) else 1
        fail(str(error), getattr(error, "exit_code", default))
    except others as error:
        fail(one_line(error))


class OneLineErrors(TyperGroup):
    """Ends any command of the group that way."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An optional package may be missing, or a file that can't be read or written."""
        with one_line_errors(ImportError, OSError):
            return super().invoke(ctx)
