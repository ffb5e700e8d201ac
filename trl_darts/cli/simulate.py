"""`trl-darts simulate`: parses the options, calls `trl_darts.analysis.simulation`, and prints."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ..analysis.simulation import (
    ASSUMED_CLUSTER,
    WORKLOADS,
    ClusterSpec,
    Outcome,
    ToolCalls,
    Workload,
    compare,
    parse_sweep,
    settings_of,
)
from ..analysis.simulation.comparison import fastest, show
from ..analysis.simulation.recorded import RecordedRun, curve_of
from ..errors import ConfigurationError
from ..import_utils import require_matplotlib
from ..policy import PrefillCurve
from ..scheduling import SCHEDULES
from ..scheduling.rules import one_of


FILES = ("simulation.csv", "simulation.png")
PROMPTS_PER_STEP, MAX_COMPLETION_LENGTH, NUM_GENERATIONS = 128, 32_768, 8  # without a trace

console = Console()
option = partial(typer.Option, show_default=False)


Trace = Annotated[
    Path | None,
    option(
        help="`output_dir` of a run with `save_rollout_trace=True`, or of TRL's trainer with `record_lengths` or "
        "`log_completions=True`: its lengths, prompts and batch are used."
    ),
]
Lengths = Annotated[
    str | None,
    option(help=f"Published lengths, without a trace: {' (the default) or '.join(WORKLOADS)}.", metavar="NAME"),
]
PromptsPerStep = Annotated[int | None, option(help="Prompts per rollout. Default: the trace's, or 128.")]
Curve = Annotated[
    Path | None,
    option(
        help="File of `trl-darts profile`. Default: fitted to the times in the trace, or NVIDIA's of Llama-3.1-8B."
    ),
]
NumEngines = Annotated[
    int | None,
    option(help="Data parallel engines. Default: the trace's with a curve fitted to it, 1 with a file, or else 8."),
]
NumGPUs = Annotated[
    int | None,
    option(
        help="GPUs of the trainer and of engines with one each: shows each setting with its fastest split. "
        "--train-seconds-per-token is then that of a single GPU."
    ),
]
TrainSeconds = Annotated[
    float, option(help="Seconds of training per token trained on, without padding. Default: 0, rollouts only.")
]
FixedSeconds = Annotated[float, option(help="Seconds per step for weight sync, rewards and the like. Default: 0.")]
Calls = Annotated[
    float, option(help="Calls of tools per conversation, on average: candidates are whole conversations. Default: 0.")
]
ToolSeconds = Annotated[float, option(help="Median seconds of a call. Default: 1.")]
Schedules = Annotated[
    list[str],
    option(
        help=f"Schedules to compare, the first is the baseline: {', '.join(SCHEDULES)}. Separate them by commas, "
        "or repeat the option. Default: grpo,darts."
    ),
]
Sweep = Annotated[
    list[str] | None,
    option(
        help="A setting and its values, such as max_num_generations=10,12,16. Repeat it for all combinations. Each "
        "schedule takes the settings that it reads.",
        metavar="NAME=VALUE,…",
    ),
]
Steps = Annotated[int, option(help="Steps of each simulated run. Default: 50.")]
Seeds = Annotated[int, option(help="Simulated runs of each setting. Default: 5.")]
Output = Annotated[Path | None, option(help=f"Directory for `{FILES[0]}` and `{FILES[1]}`.")]


def simulate(
    trace: Trace = None,
    workload: Lengths = None,
    prompts_per_step: PromptsPerStep = None,
    latency_curve: Curve = None,
    num_engines: NumEngines = None,
    num_gpus: NumGPUs = None,
    train_seconds_per_token: TrainSeconds = 0.0,
    fixed_seconds: FixedSeconds = 0.0,
    tool_calls: Calls = 0.0,
    tool_seconds: ToolSeconds = 1.0,
    schedule: Schedules = ["grpo", "darts"],  # noqa: B006  typer copies it
    sweep: Sweep = None,
    steps: Steps = 50,
    seeds: Seeds = 5,
    output: Output = None,
) -> None:
    """
    Compare schedules and settings on a workload, in virtual time.

    Example:

        trl-darts simulate --trace outputs/grpo --schedule grpo,darts --sweep max_num_generations=10,12,16
    """
    swept = parse_sweep(sweep or [])
    _check(steps, seeds, num_gpus, num_engines, train_seconds_per_token)
    names = [name.strip() for given in schedule for name in given.split(",") if name.strip()]
    run = None if trace is None else RecordedRun(trace)
    costs: dict[str, Any] = {"fixed_seconds": fixed_seconds, "redraws": True}
    costs |= {"train_seconds_per_token": train_seconds_per_token, "tools": _tools(tool_calls, tool_seconds)}
    lengths, rows = _workload(run, workload, prompts_per_step, costs)
    cluster = _cluster(run, latency_curve, {} if num_engines is None else {"num_engines": num_engines})
    settings = settings_of(names, rows, swept)
    if output is not None:
        require_matplotlib()
        output.mkdir(parents=True, exist_ok=True)
    splits = _splits(num_gpus, lengths, cluster)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Runs", total=len(splits) * len(settings) * seeds)
        outcomes_of = partial(compare, num_steps=steps, num_seeds=seeds, on_run=lambda: progress.advance(task))
        found = [
            [replace(outcome, name=outcome.name + suffix) for outcome in outcomes_of(own, settings, engines)]
            for suffix, own, engines in splits
        ]
    outcomes = found[0] if num_gpus is None else fastest(found, lengths)
    show(console, outcomes, lengths, cluster, steps, seeds, num_gpus)
    if output is not None:
        _write(outcomes, *(output / name for name in FILES))


def _tools(calls: float, seconds: float) -> ToolCalls | None:
    if not calls and seconds != 1.0:
        raise ConfigurationError(
            f"`--tool-seconds` ({seconds:g}) has no effect without `--tool-calls`. Give the calls per conversation."
        )
    return ToolCalls(calls, seconds) if calls else None


def _check(steps: int, seeds: int, num_gpus: int | None, num_engines: int | None, train_seconds: float) -> None:
    for name, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise ConfigurationError(f"`{name}` ({value}) must be at least 1.")
    if num_gpus is None:
        return
    if num_gpus < 2:
        raise ConfigurationError(f"`--num-gpus` ({num_gpus}) must be at least 2: one for an engine, one to train.")
    if num_engines is not None:
        raise ConfigurationError(
            f"`--num-engines` ({num_engines}) has no effect with `--num-gpus` ({num_gpus}), which compares all "
            "numbers of engines. Leave one of them out."
        )
    if not train_seconds:
        raise ConfigurationError(
            f"`--num-gpus` ({num_gpus}) needs `--train-seconds-per-token`, which says what the trainer's GPUs gain."
        )


def _workload(
    run: RecordedRun | None, published: str | None, prompts_per_step: int | None, costs: Mapping[str, Any]
) -> tuple[Workload, int]:
    """Returns the workload, and its rows per prompt."""
    if run is None:
        name = published or next(iter(WORKLOADS))
        one_of(WORKLOADS).check("--workload", name)
        size = PROMPTS_PER_STEP if prompts_per_step is None else prompts_per_step
        return Workload(WORKLOADS[name], size, MAX_COMPLETION_LENGTH, **costs), NUM_GENERATIONS
    if published is not None:
        raise ConfigurationError(
            f"`--workload` ({published}) has no effect with `--trace` ({str(run.directory)!r}), which has its own "
            "lengths and prompts. Leave one of them out."
        )
    return run.workload(prompts_per_step, **costs)


def _cluster(run: RecordedRun | None, curve_file: Path | None, own: Mapping[str, Any]) -> ClusterSpec:
    if curve_file is not None:
        curve = curve_of(curve_file, {} if run is None else {str(run.directory): run.settings.get("model")})
        return ClusterSpec.of(curve, PrefillCurve.load(curve_file), **own)
    cluster = replace(ASSUMED_CLUSTER, **own)
    return cluster if run is None else run.fitted_cluster(cluster, **own)


def _splits(num_gpus: int | None, workload: Workload, cluster: ClusterSpec) -> list[tuple[str, Workload, ClusterSpec]]:
    """Returns a case for each number of engines, with its suffix. Training is as fast as the trainer has GPUs."""
    if num_gpus is None:
        return [("", workload, cluster)]
    seconds = workload.train_seconds_per_token
    return [
        (
            f", engines={number}",
            replace(workload, train_seconds_per_token=seconds / (num_gpus - number)),
            replace(cluster, num_engines=number),
        )
        for number in range(1, num_gpus)
    ]


def _write(outcomes: list[Outcome], table: Path, picture: Path) -> None:
    import pandas as pd

    from ..analysis.plots import plot_simulation

    pd.DataFrame([outcome.row() for outcome in outcomes]).to_csv(table, index=False, na_rep="nan")
    plot_simulation(outcomes, picture)
    console.print(f"Written: {table}, {picture}", highlight=False)
