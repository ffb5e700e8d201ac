"""`trl-darts profile`: parses the options, calls `trl_darts.analysis.profile`, and prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..analysis.output_files import check_writable
from ..engines.addresses import API_KEY_VARIABLE
from ..engines.waiting import INTERVAL_S as LINE_INTERVAL_S
from ..engines.waiting import repeated
from ..errors import ConfigurationError, GenerationError
from ..import_utils import is_matplotlib_available
from ..policy import LatencyProfile
from .exits import fail


if TYPE_CHECKING:
    from ..analysis.profile import ProfileResult


SERVER_FAILED = 1
PICTURE_FORMATS = (".png", ".svg", ".pdf")


option = partial(typer.Option, show_default=False)


def profile(
    urls: Annotated[list[str], typer.Argument(metavar="URL", help="Running, idle vLLM servers of one model.")],
    output: Annotated[Path | None, option(help="The JSON file to write. By default latency.json.")] = None,
    tail_of: Annotated[
        Path | None,
        option(
            help="A profile of the main servers, to which these are added as the tail servers of another layout. By "
            "default also the file to write."
        ),
    ] = None,
    plot: Annotated[Path | None, option(help="The picture to write. By default next to the output, as .png.")] = None,
    max_batch_size: Annotated[int | None, option(help="Largest batch. By default the server's max_num_seqs.")] = None,
    batch_sizes: Annotated[
        str | None, option(help="Batch sizes, such as 1,8,64. By default powers of two.", metavar="LIST")
    ] = None,
    context_lengths: Annotated[
        str | None,
        option(help="Prompt lengths, such as 512,4096. By default 128 to 32768 by factors of 4.", metavar="LIST"),
    ] = None,
    max_context_tokens: Annotated[
        int | None, option(help="Most prompt tokens of a batch. By default 131072, if they fit.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each point, in rounds of random order.")] = 3,
    hardware: Annotated[
        str | None,
        option(help="Description of the hardware, for the file. By default what the servers report.", metavar="TEXT"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the order of measurements.")] = 0,
) -> None:
    """
    Measure how fast servers decode, and fit the curve that `latency_curve` of the trainer takes.

    Progress goes to standard error, the results to standard output. The servers must be idle.

    Example:

        trl-darts profile http://localhost:8000 --output latency.json
    """
    from ..analysis import profile as analysis  # loads an HTTP client, for which `--help` should not wait

    try:
        main = None if tail_of is None else LatencyProfile.load(tail_of, "tail_of")
        output = output or tail_of or Path("latency.json")
        picture = _check_outputs(output, plot or (output.with_suffix(".tail.png") if main else None))
        options = analysis.ProfileOptions(
            urls=tuple(urls),
            batch_sizes=_numbers("batch_sizes", batch_sizes),
            max_batch_size=max_batch_size,
            context_lengths=_numbers("context_lengths", context_lengths),
            max_context_tokens=max_context_tokens,
            repeats=repeats,
            hardware=hardware,
            api_key=os.environ.get(API_KEY_VARIABLE),
            model=None if main is None else main.metadata.get("model"),
            seed=seed,
        )
        with _progress() as report:
            result = analysis.profile_servers(options, report)
        _write(result, output, picture, main)
    except GenerationError as error:
        fail(f"The measurement failed, and nothing was written: {error}", SERVER_FAILED)


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"`{name}` ({text!r}) must be whole numbers and commas, such as 1,8,64.") from None


def _check_outputs(output: Path, plot: Path | None) -> Path | None:
    """Returns the picture's path, or `None` without matplotlib. Called before anything is measured."""
    if plot is not None and not is_matplotlib_available():
        raise ConfigurationError(
            f"`plot` ({str(plot)!r}) needs matplotlib. `pip install 'trl-darts[report]'`, or leave it out."
        )
    check_writable("output", output)
    picture = plot or output.with_suffix(".png")
    check_writable("plot", picture)
    if picture == output:
        raise ConfigurationError(f"`plot` and `output` ({str(output)!r}) must be two files. Name the output .json.")
    if picture.suffix not in PICTURE_FORMATS:
        raise ConfigurationError(f"`plot` ({str(picture)!r}) must end in {', '.join(PICTURE_FORMATS)}. Rename it.")
    return picture if is_matplotlib_available() else None


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Shows a bar in a terminal, otherwise prints a line every ten seconds."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("querying the servers", total=None)

        def print_line() -> None:
            now = bar.tasks[0]
            counts = f"{now.completed:.0f} of {now.total:.0f} measurements, " if now.total else ""
            left = "" if now.time_remaining is None else f", about {now.time_remaining:.0f} s left"
            typer.echo(f"{counts}{now.elapsed or 0:.0f} s{left}: {now.description}", err=True)

        with nullcontext() if console.is_terminal else repeated(print_line, LINE_INTERVAL_S):
            yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _write(result: ProfileResult, output: Path, picture: Path | None, main: LatencyProfile | None) -> None:
    from ..analysis.profile.display import draw, summarize, warn

    (result.profile if main is None else replace(main, tail=result.profile)).save(output)
    written = "No picture, which needs matplotlib: `pip install 'trl-darts[report]'`."
    if picture is not None:
        draw(result.profile, picture)
        written = f"Picture: {picture}"
    argument = f'The trainer\'s argument: DARTSGRPOConfig(latency_curve="{output}")'
    typer.echo("\n".join([*summarize(result.profile), "", f"Written: {output}", written, "", argument]))
    for warning in warn(result):
        typer.echo(f"Warning: {warning}", err=True)
