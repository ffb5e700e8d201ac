"""`trl-darts config`: recipes before they run, and on their way to others."""

from __future__ import annotations

import typer

from . import check, pull, push


app = typer.Typer(no_args_is_help=True, help="Check a config, publish it on the Hub, or fetch a published one.")
app.command()(check.check)
app.command()(push.push)
app.command()(pull.pull)
