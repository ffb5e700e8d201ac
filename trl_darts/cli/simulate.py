"""`trl-darts simulate`: what a schedule would gain on a workload, before any GPU is paid for."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..errors import ConfigurationError
from ..policy import LatencyCurve
from ..scheduling import SCHEDULES, ScheduleSettings
from ..simulation import ClusterSpec, LogNormalLengths, Workload
from ..simulation.comparison import Outcome, compare
from ..simulation.recorded import recorded_workload
from ..simulation.sweep import parse_sweep, settings_of
from ..simulation.verdict import verdict
from .exits import fail


# An assumption for a model of about 7 B parameters on one 80 GB GPU: flat while weights are read, then compute counts.
ASSUMED_CURVE = LatencyCurve([1, 64, 256, 1024], [0.010, 0.012, 0.020, 0.062], {"assumed": True})
COLUMNS = {"bubble": "bubble_ratio", "satu-\nrated": "saturated_ratio", "kept/\npool": "kept_vs_pool_length_ratio"}


console, errors = Console(), Console(stderr=True)


# Typer reads annotations at run time, also on Python 3.10, where `int | None` would do as well.
MaybeInt: TypeAlias = Optional[int]  # noqa: UP045
MaybePath: TypeAlias = Optional[Path]  # noqa: UP045
MaybeList: TypeAlias = Optional[list[str]]  # noqa: UP045
workload_option = partial(typer.Option, rich_help_panel="Workload")
lengths_option = partial(typer.Option, rich_help_panel="Workload without a trace")
engine_option = partial(typer.Option, rich_help_panel="Engines")


def simulate(
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
    schedule: Annotated[
        list[str],
        typer.Option(
            help=f"Schedules to compare, the first is the baseline: {', '.join(SCHEDULES)}. Repeat it, or separate by "
            "commas."
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
    output: Annotated[MaybePath, typer.Option(help="Directory for `simulation.csv` and `simulation.png`.")] = None,
) -> None:
    """
    Compares schedules and settings on a workload, in virtual time.

    Example: trl-darts simulate --trace out --latency-curve latency.json --schedule grpo,darts --sweep
    max_num_generations=10,12,16 --sweep long_end_patience=none,2
    """
    try:
        curve = ASSUMED_CURVE if latency_curve is None else LatencyCurve.load(latency_curve)
        cluster = ClusterSpec(curve, num_engines, max_num_seqs, kv_tokens)
        lengths = (num_prompts, median_length, inter_prompt_std, intra_prompt_std, endless_share)
        more = {
            "train_seconds_per_token": train_seconds_per_token,
            "fixed_seconds": fixed_seconds,
            "shaping": shaping,
            "redraws": True,
        }
        workload, rows = _workload(trace, lengths, prompts_per_step, max_completion_length, num_generations, more)
        settings = settings_of(_names(schedule), rows, parse_sweep(sweep or []))
        _check_counts(steps, seeds)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        outcomes = _run(workload, settings, cluster, steps, seeds)
        _show(outcomes, workload, cluster, steps, seeds)
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
    model = LogNormalLengths(*lengths)
    return Workload(model, prompts_per_step or 128, max_completion_length or 16_384, **more), num_generations or 8


def _names(schedules: list[str]) -> list[str]:
    return [name.strip() for given in schedules for name in given.split(",") if name.strip()]


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


def _show(outcomes: list[Outcome], workload: Workload, cluster: ClusterSpec, steps: int, seeds: int) -> None:
    source = ", with an assumed latency curve" if cluster.latency.metadata.get("assumed") else ""
    title = (
        f"{steps} steps × {seeds} seeds of {workload.prompts_per_step} prompts on {cluster.num_engines} engine"
        f"{'s' if cluster.num_engines > 1 else ''}{source}"
    )
    caption = "± is half of a 95 % confidence interval over seeds"
    table = Table(title=title, caption=caption, box=None, pad_edge=False, header_style="underline")
    table.add_column("setting", no_wrap=True)
    some = _columns_of_rounds(outcomes)
    for name in ("speed-up", "seconds\nper step", "wasted\ntokens", *COLUMNS, *some):
        table.add_column(name, justify="right", no_wrap=True)
    for index, outcome in enumerate(outcomes):
        values = [f"{outcome.estimate(quantity).mean:.2f}" for quantity in COLUMNS.values()]
        values += [column[index] for column in some.values()]
        seconds, wasted = str(outcome.estimate("step_seconds")), f"{max(0.0, outcome.wasted_share.mean):.0%}"
        table.add_row(outcome.name.replace(", ", "\n"), str(outcome.speedup), seconds, wasted, *values)
    console.print(table)
    console.print(verdict(outcomes), markup=False, highlight=False)
    if steps * workload.prompts_per_step < 2 * workload.lengths.num_prompts:
        console.print(
            f"Each prompt came up less than twice: what a schedule learns of prompts hardly shows. {steps} steps of "
            f"{workload.prompts_per_step} are {steps * workload.prompts_per_step / workload.lengths.num_prompts:.1f} "
            "epochs; simulate more `--steps`.",
            markup=False,
            highlight=False,
        )


def _columns_of_rounds(outcomes: list[Outcome]) -> dict[str, list[str]]:
    """What there is only with schedules whose batches are not the loader's."""
    columns = {}
    if any(outcome.off_policy_share.mean for outcome in outcomes):
        columns["off-\npolicy"] = [f"{outcome.off_policy_share.mean:.0%}" for outcome in outcomes]
    deferred = [outcome.estimate("deferred_groups").mean for outcome in outcomes]
    if any(deferred):
        columns["deferred\ngroups"] = [f"{groups:.0f}" for groups in deferred]
        columns["batch\nlengths"] = [f"±{outcome.batch_length_spread.mean:.0%}" for outcome in outcomes]
    return columns


def _write(outcomes: list[Outcome], directory: Path) -> None:
    rows = [outcome.row() for outcome in outcomes]
    with (directory / "simulation.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    from ..plots import plot_simulation

    plot_simulation(outcomes, directory / "simulation.png")
    console.print(f"Written: {directory / 'simulation.csv'}, {directory / 'simulation.png'}", highlight=False)
