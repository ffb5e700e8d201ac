"""Prints messages of a command or script to standard error. Errors are one line without a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..engines.addresses import API_KEY_VARIABLE
from ..errors import ConfigurationError, TRLDARTSError


USAGE_ERROR = 2
# Options that commands had in earlier versions, with what replaces them.
KEY = {"--api-key": f"Set {API_KEY_VARIABLE} in the environment: everyone on the machine can read a command line."}
REMOVED: dict[str, dict[str, str]] = {
    "profile": KEY,
    "serve": {**KEY, "--draft-history": "Drafts come from the server's own answers. Leave it out."},
    "simulate": {
        "--num-generations": "Use `--sweep num_generations=8`.",
        **dict.fromkeys(
            ("--max-num-seqs", "--kv-tokens", "--prefill-seconds-per-token"), "A file of `trl-darts profile` has it."
        ),
        **dict.fromkeys(
            (
                *("--max-completion-length", "--num-prompts", "--median-length", "--inter-prompt-std"),
                *("--intra-prompt-std", "--endless-share", "--uniform-share", "--shaping"),
            ),
            "Name a run with `--trace`, or use `trl_darts.analysis.simulation.Workload` in Python.",
        ),
        **dict.fromkeys(
            ("--layout", "--switch-seconds", "--seconds-per-request", "--draft-acceptance"),
            "Use `trl_darts.analysis.simulation.ClusterSpec` in Python.",
        ),
    },
}
UsageError: Any = typer.BadParameter.__base__  # click's, or newer typer's copy of it


def announce_loading() -> None:
    """Prints a message before TRL is imported, which takes seconds. Only the first process of a launch prints it."""
    if "trl" not in sys.modules and os.environ.get("RANK", "0") == "0":
        typer.echo("Loading TRL …", err=True)


def fail(message: str, exit_code: int = USAGE_ERROR) -> NoReturn:
    """Prints one line to standard error and exits."""
    typer.echo(f"Error: {message}", err=True)
    sys.exit(exit_code)


def one_line(error: BaseException) -> str:
    """Returns an error's message as one line."""
    return " ".join(str(error).split())


@contextmanager
def one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """
    Ends the process with one line after our own errors and `others`. The exit code is the error's own, or else 2 for
    [`ConfigurationError`] and `others`, 1 for the rest.
    """
    try:
        yield
    except TRLDARTSError as error:
        default = USAGE_ERROR if isinstance(error, ConfigurationError) else 1
        fail(str(error), getattr(error, "exit_code", default))
    except others as error:
        fail(one_line(error))


class OneLineErrors(TyperGroup):
    """A group of commands with [`one_line_errors`]."""

    def invoke(self, ctx: Any) -> Any:
        # ImportError: an optional package is missing. OSError: a file can't be read or written.
        try:
            with one_line_errors(ImportError, OSError):
                return super().invoke(ctx)
        except UsageError as error:
            if "\n" in error.message:  # the help of a group without a command
                raise
            name, option = getattr(error.ctx, "info_name", ""), getattr(error, "option_name", "")
            if remedy := REMOVED.get(name, {}).get(option):
                fail(f"`{option}` was removed. {remedy}")
            command = getattr(error.ctx, "command_path", ctx.command_path)
            fail(f"{error.format_message().rstrip('.')}. `{command} --help` lists what it takes.")
