"""The command `trl-darts`."""

from typing import Annotated

import typer

from .. import __version__
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
    app(prog_name="trl-darts")
