"""The command `trl-darts`."""

from __future__ import annotations

import os
import sys

import typer

from ..serving.options import API_KEY_VARIABLE
from . import config, profile, report, serve, simulate


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.command()(serve.serve)
app.command()(profile.profile)
app.command()(report.report)
app.command()(simulate.simulate)
app.add_typer(config.app, name="config")


@app.callback()
def _trl_darts() -> None:
    """GRPO training that does not wait for its slowest rollout."""
    # With a callback, `serve` stays a subcommand although it is the only one.


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
    """
    Arguments without `--api-key`, and its value. `None` if it is not given, or is given without one.

    After `--`, arguments are vLLM's and stay.
    """
    end = args.index("--") if "--" in args else len(args)
    kept: list[str] = []
    key = None
    words = iter(args[:end])
    for word in words:
        name, equals, value = word.partition("=")
        found = value if equals else next(words, None) if name == "--api-key" else None
        if name != "--api-key" or found is None:
            kept.append(word)
        else:
            key = found
    return kept + args[end:], key


__all__ = ["app", "main"]
