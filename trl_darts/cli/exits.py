"""How a command ends that can't do what it was asked for: one line on standard error, no traceback."""

from __future__ import annotations

from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import ConfigurationError, TRLDARTSError


USAGE_ERROR = 2


def fail(message: str, exit_code: int = USAGE_ERROR) -> NoReturn:
    """One line on standard error, and the exit code."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(exit_code)


class OneLineErrors(TyperGroup):
    """Ends any command of the group that way."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command: exit code 2 where it was asked for what can't work, else the error's own, or 1."""
        try:
            return super().invoke(ctx)
        except TRLDARTSError as error:
            default = USAGE_ERROR if isinstance(error, ConfigurationError) else 1
            fail(str(error), getattr(error, "exit_code", default))
        except (ImportError, OSError) as error:  # an optional package is missing, or a file can't be read or written
            fail(str(error))
