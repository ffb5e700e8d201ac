"""`trl-darts simulate`: what a schedule would gain on a workload, before any GPU is paid for."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..analysis.output_files import check_directory, check_writable
from ..analysis.simulation import (
    ClusterSpec,
    Estimate,
    LogNormalLengths,
    Outcome,
    Workload,
    compare,
    parse_sweep,
    recorded_workload,
    settings_of,
)
from ..errors import ConfigurationError
from ..import_utils import require_matplotlib
from ..policy import LatencyCurve, PrefillLine
from ..scheduling import SCHEDULES


# An assumption for a model of about 7 B parameters on one 80 GB GPU: flat while weights are read, then compute counts.
ASSUMED_CURVE = LatencyCurve([1, 64, 256, 1024], [0.010, 0.012, 0.020, 0.062], {"assumed": True})
# Of the distribution that takes the place of a trace.
LENGTHS: dict[str, Any] = {
    "num_prompts": 1_024,
    "median_length": 800,
    "inter_prompt_std": 0.6,
    "intra_prompt_std": 0.5,
    "endless_share": 0.005,
}
FILES = ("simulation.csv", "simulation.png")
# Header, what stands below it, and how it is written. The last three are shown where a schedule has them.
COLUMNS: list[tuple[str, Callable[[Outcome], Estimate], str]] = [
    ("speed-\nup", lambda outcome: outcome.speedup, ".3g"),
    ("seconds\nper step", lambda outcome: outcome.estimate("step_seconds"), ".3g"),
    ("wasted\ntokens", lambda outcome: outcome.wasted_share, "z.0%"),  # z: no "-0%" of a rounding error
    ("bubble", lambda outcome: outcome.estimate("bubble_ratio"), ".2f"),
    ("satu-\nrated", lambda outcome: outcome.estimate("saturated_ratio"), ".2f"),
    ("kept/\npool", lambda outcome: outcome.estimate("kept_vs_pool_length_ratio"), ".2f"),
    ("off-\npolicy", lambda outcome: outcome.off_policy_share, "z.0%"),
    ("defer-\nred", lambda outcome: outcome.estimate("deferred_groups"), ".0f"),
    ("batch\nlengths", lambda outcome: outcome.batch_length_spread, ".0%"),
]


console, errors = Console(), Console(stderr=True)


workload_option = partial(typer.Option, rich_help_panel="Workload")
engine_option = partial(typer.Option, rich_help_panel="Engines")


def lengths_option(name: str, help: str) -> Any:
    return typer.Option(help=f"{help} Default: {LENGTHS[name]:,}.", rich_help_panel="Workload without a trace")


def simulate(
    more_schedules: Annotated[
        list[str] | None,
        # The shell has `--schedule grpo darts` in two words, of which an option takes one.
        typer.Argument(hidden=True, metavar="SCHEDULE"),
    ] = None,
    trace: Annotated[
        Path | None,
        workload_option(
            help="`output_dir` of a run with `save_rollout_trace=True`: its lengths, prompts and batch are used."
        ),
    ] = None,
    num_prompts: Annotated[int | None, lengths_option("num_prompts", "Prompts in the data set.")] = None,
    median_length: Annotated[
        float | None, lengths_option("median_length", "Median response length in tokens.")
    ] = None,
    inter_prompt_std: Annotated[
        float | None, lengths_option("inter_prompt_std", "Spread of log-lengths between prompts.")
    ] = None,
    intra_prompt_std: Annotated[
        float | None, lengths_option("intra_prompt_std", "Spread of log-lengths of one prompt.")
    ] = None,
    endless_share: Annotated[
        float | None, lengths_option("endless_share", "Share of responses that never end by themselves.")
    ] = None,
    prompts_per_step: Annotated[
        int | None, workload_option(help="Prompts per rollout. Default: the trace's, or 128.")
    ] = None,
    max_completion_length: Annotated[
        int | None, workload_option(help="Limit in tokens. Default: the trace's, or 16384.")
    ] = None,
    train_seconds_per_token: Annotated[
        float, workload_option(help="Forward and backward pass, per kept token.")
    ] = 0.0,
    fixed_seconds: Annotated[float, workload_option(help="Weight sync, rewards and the like, per step.")] = 0.0,
    shaping: Annotated[
        float,
        workload_option(help="How fast the policy follows what is selected, an assumption; see docs/analysis.md."),
    ] = 0.0,
    latency_curve: Annotated[
        Path | None,
        engine_option(help="File of `trl-darts profile`. Default: an assumed curve of a 7 B model on one GPU."),
    ] = None,
    num_engines: Annotated[int, engine_option(help="Data parallel engines.")] = 1,
    max_num_seqs: Annotated[
        int | None,
        engine_option(help="Sequences that an engine decodes at once. Default: `--latency-curve`'s, or no limit."),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        engine_option(help="Tokens that fit in an engine's KV cache. Default: `--latency-curve`'s, or no limit."),
    ] = None,
    prefill_seconds_per_token: Annotated[
        float | None,
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
    num_generations: Annotated[int | None, typer.Option(help="Rows per prompt. Default: the trace's, or 8.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting and its values, such as max_num_generations=10,12,16. Repeat it for all combinations. "
            "Each schedule takes the settings that mean something to it.",
            metavar="NAME=VALUE,…",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 50,
    seeds: Annotated[int, typer.Option(help="Trainings of each setting.")] = 3,
    output: Annotated[Path | None, typer.Option(help=f"Directory for `{FILES[0]}` and `{FILES[1]}`.")] = None,
) -> None:
    """
    Compares schedules and settings on a workload, in virtual time.

    Example:

        trl-darts simulate --trace out --latency-curve latency.json --schedule grpo darts --sweep
        max_num_generations=10,12,16 --sweep long_end_patience=none,2
    """
    names = schedule_names(schedule, more_schedules or [])
    limits: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "kv_tokens": kv_tokens,
        "prefill_seconds_per_token": prefill_seconds_per_token,
    }
    cluster = replace(
        _measured_cluster(latency_curve, trace),
        num_engines=num_engines,
        seconds_per_request=seconds_per_request,
        **{name: value for name, value in limits.items() if value is not None},
    )
    costs: dict[str, Any] = {
        "train_seconds_per_token": train_seconds_per_token,
        "fixed_seconds": fixed_seconds,
        "shaping": shaping,
        "redraws": True,
    }
    lengths = (num_prompts, median_length, inter_prompt_std, intra_prompt_std, endless_share)
    given = {name: value for name, value in zip(LENGTHS, lengths, strict=True) if value is not None}
    size = (prompts_per_step, max_completion_length, num_generations)
    workload, rows = _workload(trace, given, *size, **costs)
    settings = settings_of(names, rows, parse_sweep(sweep or []))
    for name, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise ConfigurationError(f"`{name}` ({value}) must be at least 1.")
    if output is not None:
        _check_output(output)
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("Trainings", total=len(settings) * seeds)
        outcomes = compare(workload, settings, cluster, steps, seeds, on_run=lambda: progress.advance(task))
    show(console, outcomes, workload, cluster, steps, seeds)
    if output is not None:
        _write(outcomes, output)


def schedule_names(schedules: list[str], more: list[str]) -> list[str]:
    """The schedules that were named, also those that stand behind the first one without an option's name."""
    names, further = (
        [name.strip() for given in words for name in given.split(",") if name.strip()] for words in (schedules, more)
    )
    if unknown := [name for name in further if name not in SCHEDULES]:
        raise ConfigurationError(
            f"`{unknown[0]}` is one argument too many: only schedules ({', '.join(SCHEDULES)}) may follow the first "
            "one after `--schedule`. Name a run with `--trace`, and repeat `--sweep` for each setting."
        )
    return [*names, *further]


def _workload(
    trace: Path | None,
    lengths: dict[str, Any],
    prompts_per_step: int | None,
    max_completion_length: int | None,
    num_generations: int | None,
    **costs: Any,
) -> tuple[Workload, int]:
    """That of a trace, or else one of a distribution; and its rows per prompt."""
    if trace is not None:
        if lengths:
            name, value = next(iter(lengths.items()))
            raise ConfigurationError(
                f"`--{name.replace('_', '-')}` ({value}) has no effect with `--trace` ({str(trace)!r}), which has "
                "lengths and prompts of its own. Leave one of them out."
            )
        return recorded_workload(trace, prompts_per_step, max_completion_length, num_generations, **costs)
    batch = 128 if prompts_per_step is None else prompts_per_step
    limit = 16_384 if max_completion_length is None else max_completion_length
    workload = Workload(LogNormalLengths(*(LENGTHS | lengths).values()), batch, limit, **costs)
    return workload, 8 if num_generations is None else num_generations


def _measured_cluster(path: Path | None, trace: Path | None) -> ClusterSpec:
    """One engine as `trl-darts profile` measured it, with its limits. A curve of another model is refused."""
    if path is None:
        return ClusterSpec(ASSUMED_CURVE)
    curve, prefill = LatencyCurve.load(path), PrefillLine.load(path)
    if trace is not None:
        from ..telemetry.log import read_log  # loads pandas, for which a wrong option or `--help` should not wait

        model = read_log(trace)[0].get("model")
        if not curve.is_of(model):
            raise ConfigurationError(
                f"`--latency-curve` ({str(path)!r}) must be of the trace's model, and is of "
                f"{curve.metadata.get('model')!r}, while {str(trace)!r} trained {model!r}. Measure one with "
                "`trl-darts profile`, or leave the option out."
            )
    limits = (curve.metadata.get(name) for name in ("max_num_seqs", "kv_cache_tokens"))
    max_num_seqs, kv_tokens = (limit if isinstance(limit, int) else None for limit in limits)
    return ClusterSpec(
        curve,
        max_num_seqs=max_num_seqs,
        kv_tokens=kv_tokens,
        prefill_seconds_per_token=prefill.per_token_s if prefill is not None else 0.0,
    )


def _check_output(directory: Path) -> None:
    """Before anything is computed."""
    require_matplotlib()
    check_directory("--output", directory)
    for name in FILES:
        check_writable("--output", directory / name)


def _write(outcomes: list[Outcome], directory: Path) -> None:
    from ..analysis.plots import plot_simulation

    table, picture = (directory / name for name in FILES)
    rows = [outcome.row() for outcome in outcomes]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    plot_simulation(outcomes, picture)
    console.print(f"Written: {table}, {picture}", highlight=False)


def show(
    console: Console, outcomes: Sequence[Outcome], workload: Workload, cluster: ClusterSpec, steps: int, seeds: int
) -> None:
    """Prints a comparison: `seeds` trainings of `steps` steps for each of the outcomes, the baseline first."""
    columns = COLUMNS[:6]
    if any(outcome.off_policy_share.mean for outcome in outcomes):
        columns += COLUMNS[6:7]
    if any(outcome.estimate("deferred_groups").mean for outcome in outcomes):
        columns += COLUMNS[7:]
    # With ten columns there is room for one space between them.
    padding = (0, 2 if len(columns) < 8 else 1, 0, 0)
    table = Table(
        title=_title(workload, cluster, steps, seeds),
        caption="± is half of a 95 % confidence interval over seeds" if seeds > 1 else None,
        box=None,
        padding=padding,
        pad_edge=False,
        header_style="underline",
    )
    table.add_column("setting", overflow="fold")
    for header, _, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.name.replace(", ", "\n"), *(_cell(quantity(outcome), style) for _, quantity, style in columns)
        )
    console.print(table)
    epochs = steps * workload.prompts_per_step / workload.lengths.num_prompts
    if epochs < 2:
        console.print(
            f"Each prompt came up less than twice ({epochs:.1f} epochs): what a schedule learns of prompts hardly "
            "shows. Simulate more `--steps`.",
            markup=False,
            highlight=False,
        )


def _title(workload: Workload, cluster: ClusterSpec, steps: int, seeds: int) -> str:
    limits = [f"{cluster.max_num_seqs:,} sequences"] if cluster.max_num_seqs else []
    limits += [f"{cluster.kv_tokens:,} tokens of KV cache"] if cluster.kv_tokens else []
    return (
        f"{steps} steps × {seeds} seeds of {workload.prompts_per_step} prompts on {cluster.num_engines} engine"
        f"{'s' if cluster.num_engines > 1 else ''}{' of at most ' if limits else ''}{' and '.join(limits)}"
        f"{', assumed latency curve' if cluster.latency.metadata.get('assumed') else ''}"
    )


def _cell(estimate: Estimate, style: str) -> str:
    """The interval stands below the mean, so that the table fits 80 columns. One seed has none."""
    mean = format(estimate.mean, style)
    if math.isinf(estimate.half_width):
        return mean
    return f"{mean}\n±{estimate.half_width:{style.replace('.3g', '.2g')}}"
