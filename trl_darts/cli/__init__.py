"""The command `trl-darts`."""

import os
import sys
from typing import Annotated

import typer

from .. import __version__
from ..engines.addresses import API_KEY_VARIABLE
from . import config, profile, report, serve, simulate
from .exits import OneLineErrors


app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.command()(serve.serve)
app.command()(profile.profile)
app.command()(report.report)
app.command()(simulate.simulate)
app.add_typer(config.app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _trl_darts(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """GRPO training that does not wait for its slowest rollout."""


def main() -> None:
    """Entry point of the command `trl-darts`."""
    hide_api_key()
    app(prog_name="trl-darts")


def hide_api_key() -> None:
    """Starts this process anew without `--api-key` on its command line, which everyone on the machine can read."""
    kept, key = without_api_key(sys.argv[1:])
    if key is not None:
        interpreter = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        os.execve(sys.executable, [*interpreter, *kept], {**os.environ, API_KEY_VARIABLE: key})


def without_api_key(args: list[str]) -> tuple[list[str], str | None]:
    """Arguments without `--api-key`, and its value if it has one. After `--`, arguments are vLLM's and stay."""
    end = args.index("--") if "--" in args else len(args)
    for at, word in enumerate(args[:end]):
        if word.startswith("--api-key="):
            return args[:at] + args[at + 1 :], word.partition("=")[2]
        if word == "--api-key" and at + 1 < end:
            return args[:at] + args[at + 2 :], args[at + 1]
    return args, None
