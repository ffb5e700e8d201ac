"""`trl-darts simulate`: what a schedule would gain on a workload, before any GPU is paid for."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

from ..analysis.output_files import check_directory, check_writable
from ..errors import ConfigurationError
from ..import_utils import require_matplotlib
from ..policy import LatencyCurve, PrefillLine
from ..scheduling import SCHEDULES, ScheduleSettings
from ..simulation import ClusterSpec, LogNormalLengths, Workload
from ..simulation.comparison import Outcome, compare
from ..simulation.recorded import recorded_workload
from ..simulation.sweep import parse_sweep, settings_of
from .exits import fail
from .simulation_table import show


# An assumption for a model of about 7 B parameters on one 80 GB GPU: flat while weights are read, then compute counts.
ASSUMED_CURVE = LatencyCurve([1, 64, 256, 1024], [0.010, 0.012, 0.020, 0.062], {"assumed": True})
FILES = ("simulation.csv", "simulation.png")


console, errors = Console(), Console(stderr=True)


# Typer reads annotations at run time, also on Python 3.10, where `int | None` would do as well.
MaybeInt: TypeAlias = Optional[int]  # noqa: UP045
MaybeFloat: TypeAlias = Optional[float]  # noqa: UP045
MaybePath: TypeAlias = Optional[Path]  # noqa: UP045
MaybeList: TypeAlias = Optional[list[str]]  # noqa: UP045
workload_option = partial(typer.Option, rich_help_panel="Workload")
lengths_option = partial(typer.Option, rich_help_panel="Workload without a trace")
engine_option = partial(typer.Option, rich_help_panel="Engines")


def simulate(
    more_schedules: Annotated[
        MaybeList,
        # The shell has `--schedule grpo darts` in two words, of which an option takes one.
        typer.Argument(hidden=True, metavar="SCHEDULE"),
    ] = None,
    trace: Annotated[
        MaybePath,
        workload_option(
            help="`output_dir` of a run with `save_rollout_trace=True`: its lengths, prompts and batch are used."
        ),
    ] = None,
    num_prompts: Annotated[int, lengths_option(help="Prompts in the data set.")] = 1_024,
    median_length: Annotated[float, lengths_option(help="Median response length in tokens.")] = 800.0,
    inter_prompt_std: Annotated[float, lengths_option(help="Spread of log-lengths between prompts.")] = 0.6,
    intra_prompt_std: Annotated[float, lengths_option(help="Spread of log-lengths of one prompt.")] = 0.5,
    endless_share: Annotated[float, lengths_option(help="Share of responses that never end by themselves.")] = 0.005,
    prompts_per_step: Annotated[
        MaybeInt, workload_option(help="Prompts per rollout. Default: the trace's, or 128.")
    ] = None,
    max_completion_length: Annotated[
        MaybeInt, workload_option(help="Limit in tokens. Default: the trace's, or 16384.")
    ] = None,
    train_seconds_per_token: Annotated[
        float, workload_option(help="Forward and backward pass, per kept token.")
    ] = 0.0,
    fixed_seconds: Annotated[float, workload_option(help="Weight sync, rewards and the like, per step.")] = 0.0,
    shaping: Annotated[
        float,
        workload_option(help="How fast the policy follows what is selected, an assumption; see docs/simulate.md."),
    ] = 0.0,
    latency_curve: Annotated[
        MaybePath,
        engine_option(help="File of `trl-darts profile`. Default: an assumed curve of a 7 B model on one GPU."),
    ] = None,
    num_engines: Annotated[int, engine_option(help="Data parallel engines.")] = 1,
    max_num_seqs: Annotated[MaybeInt, engine_option(help="Sequences that an engine decodes at once.")] = None,
    kv_tokens: Annotated[MaybeInt, engine_option(help="Tokens that fit in an engine's KV cache.")] = None,
    prefill_seconds_per_token: Annotated[
        MaybeFloat,
        engine_option(help="Per token that is prefilled. Default: what `--latency-curve` measured, or 0."),
    ] = None,
    seconds_per_request: Annotated[
        float, engine_option(help="What each candidate costs its engine, whatever its length.")
    ] = 0.0,
    schedule: Annotated[
        list[str],
        typer.Option(
            help=f"Schedules to compare, the first is the baseline: {', '.join(SCHEDULES)}. Separate them by spaces "
            "or commas, or repeat it."
        ),
    ] = ["grpo", "darts"],  # noqa: B006  typer copies it
    num_generations: Annotated[MaybeInt, typer.Option(help="Rows per prompt. Default: the trace's, or 8.")] = None,
    sweep: Annotated[
        MaybeList,
        typer.Option(
            help="A setting and its values, such as max_num_generations=10,12,16. Repeat it for all combinations. "
            "Each schedule takes the settings that mean something to it.",
            metavar="NAME=VALUE,…",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 50,
    seeds: Annotated[int, typer.Option(help="Trainings of each setting.")] = 3,
    output: Annotated[MaybePath, typer.Option(help=f"Directory for `{FILES[0]}` and `{FILES[1]}`.")] = None,
) -> None:
    """
    Compares schedules and settings on a workload, in virtual time.

    Example:

        trl-darts simulate --trace out --latency-curve latency.json --schedule grpo darts --sweep
        max_num_generations=10,12,16 --sweep long_end_patience=none,2
    """
    try:
        names = [*_names(schedule), *_further(more_schedules or [])]
        curve, prefill = _latency(latency_curve, prefill_seconds_per_token)
        cluster = ClusterSpec(curve, num_engines, max_num_seqs, kv_tokens, prefill, seconds_per_request)
        lengths = (num_prompts, median_length, inter_prompt_std, intra_prompt_std, endless_share)
        more = {
            "train_seconds_per_token": train_seconds_per_token,
            "fixed_seconds": fixed_seconds,
            "shaping": shaping,
            "redraws": True,
        }
        workload, rows = _workload(trace, lengths, prompts_per_step, max_completion_length, num_generations, more)
        if trace is not None and latency_curve is not None:
            _check_model(trace, curve, latency_curve)
        settings = settings_of(names, rows, parse_sweep(sweep or []))
        _check_counts(steps, seeds)
        if output is not None:
            _check_output(output)
        outcomes = _run(workload, settings, cluster, steps, seeds)
        show(console, outcomes, workload, cluster, steps, seeds)
        if output is not None:
            _write(outcomes, output)
    except (ConfigurationError, OSError, ImportError) as error:
        fail(str(error))


def _workload(
    trace: Path | None,
    lengths: tuple[int, float, float, float, float],
    prompts_per_step: int | None,
    max_completion_length: int | None,
    num_generations: int | None,
    more: dict[str, Any],
) -> tuple[Workload, int]:
    """That of a trace, or else one that is made up; and its rows per prompt."""
    if trace is not None:
        return recorded_workload(trace, prompts_per_step, max_completion_length, num_generations, more)
    batch = 128 if prompts_per_step is None else prompts_per_step
    limit = 16_384 if max_completion_length is None else max_completion_length
    workload = Workload(LogNormalLengths(*lengths), batch, limit, **more)
    return workload, 8 if num_generations is None else num_generations


def _latency(path: Path | None, prefill_seconds_per_token: float | None) -> tuple[LatencyCurve, float]:
    """The curve, and what a token costs that is prefilled."""
    if path is None:
        return ASSUMED_CURVE, prefill_seconds_per_token or 0.0
    curve = LatencyCurve.load(path)
    if prefill_seconds_per_token is None:
        line = PrefillLine.load(path)
        return curve, line.per_token_s if line is not None else 0.0
    return curve, prefill_seconds_per_token


def _check_model(trace: Path, curve: LatencyCurve, path: Path) -> None:
    """Refuses a curve of another model than the trace's, as far as both tell theirs."""
    from ..telemetry.log import read_log  # loads pandas, for which a wrong option or `--help` should not wait

    model = read_log(trace)[0].get("model")
    if not curve.is_of(model):
        raise ConfigurationError(
            f"`--latency-curve` ({str(path)!r}) must be of the trace's model, and is of "
            f"{curve.metadata.get('model')!r}, while {str(trace)!r} trained {model!r}. Measure one with `trl-darts "
            "profile`, or leave the option out."
        )


def _check_output(directory: Path) -> None:
    """Before anything is computed."""
    require_matplotlib()
    check_directory("--output", directory)
    for name in FILES:
        check_writable("--output", directory / name)


def _names(schedules: list[str]) -> list[str]:
    return [name.strip() for given in schedules for name in given.split(",") if name.strip()]


def _further(words: list[str]) -> list[str]:
    """Schedules that stand behind the first one without an option's name."""
    names = _names(words)
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise ConfigurationError(
            f"`{unknown[0]}` is one argument too many: only schedules ({', '.join(SCHEDULES)}) may follow the first "
            "one after `--schedule`. Name a run with `--trace`, and repeat `--sweep` for each setting."
        )
    return names


def _check_counts(steps: int, seeds: int) -> None:
    for name, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise ConfigurationError(f"`{name}` ({value}) must be at least 1.")


def _run(
    workload: Workload, settings: dict[str, ScheduleSettings], cluster: ClusterSpec, steps: int, seeds: int
) -> list[Outcome]:
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("Trainings", total=len(settings) * seeds)
        return compare(workload, settings, cluster, steps, seeds, on_run=lambda: progress.advance(task))


def _write(outcomes: list[Outcome], directory: Path) -> None:
    table, picture = (directory / name for name in FILES)
    rows = [outcome.row() for outcome in outcomes]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    from ..analysis.plots import plot_simulation

    plot_simulation(outcomes, picture)
    console.print(f"Written: {table}, {picture}", highlight=False)
