"""The command `trl-darts`."""

import os
import sys
from typing import Annotated

import typer

from .. import __version__
from ..engines.addresses import API_KEY_VARIABLE
from . import check, config, grpo, profile, quickstart, report, serve, simulate
from .exits import OneLineErrors


app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.command()(quickstart.quickstart)
app.command(context_settings=grpo.ANY_WORDS)(grpo.grpo)
app.command()(serve.serve)
app.command()(check.check)
app.command()(profile.profile)
app.command()(report.report)
app.command()(simulate.simulate)
app.add_typer(config.app, name="config")


def _version(show: bool) -> None:
    if show:
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
    """Restarts this process without `--api-key` on its command line, which every user of the machine can read."""
    kept, key = without_api_key(sys.argv[1:])
    if key is not None:
        interpreter = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        os.execve(sys.executable, [*interpreter, *kept], {**os.environ, API_KEY_VARIABLE: key})


def without_api_key(args: list[str]) -> tuple[list[str], str | None]:
    """Removes `--api-key` from the arguments before `--`, and returns them with its value, if any."""
    end = args.index("--") if "--" in args else len(args)
    for i, argument in enumerate(args[:end]):
        if argument.startswith("--api-key="):
            return args[:i] + args[i + 1 :], argument.partition("=")[2]
        if argument == "--api-key" and i + 1 < end:
            return args[:i] + args[i + 2 :], args[i + 1]
    return args, None
