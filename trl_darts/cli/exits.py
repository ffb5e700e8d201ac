"""How a command ends that can't do what it was asked for."""

from __future__ import annotations

from typing import NoReturn

import typer


USAGE_ERROR = 2


def fail(message: str, exit_code: int = USAGE_ERROR) -> NoReturn:
    """One line on standard error, and the exit code."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(exit_code)
