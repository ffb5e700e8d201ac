"""`trl-darts simulate`: what a schedule would gain on a workload, before any GPU is paid for."""

import csv
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ..analysis.output_files import check_directory, check_writable
from ..analysis.simulation import (
    ASSUMED_CLUSTER,
    PAT_CLUSTER,
    PAT_LAYOUT,
    WORKLOADS,
    ClusterSpec,
    LogNormalLengths,
    Outcome,
    Workload,
    compare,
    parse_sweep,
    recorded_workload,
    settings_of,
)
from ..analysis.simulation.recorded import check_model
from ..analysis.simulation.table import show
from ..errors import ConfigurationError
from ..import_utils import require_matplotlib
from ..policy import Layout, drafted_latency
from ..scheduling import SCHEDULES, ScheduleSettings
from ..scheduling.policies import check_choice


FILES = ("simulation.csv", "simulation.png")
# Options that a trace leaves nothing to.
LENGTHS = ("workload", "num_prompts", "median_length", "inter_prompt_std", "intra_prompt_std", "endless_share")
# Options of one kind of engines.
SINGLE_LAYOUT = {"num_engines", "max_num_seqs", "kv_tokens", "prefill_seconds_per_token", "draft_acceptance"}

console, errors = Console(), Console(stderr=True)

option = partial(typer.Option, show_default=False)
workload_option = partial(option, rich_help_panel="Workload")
lengths_option = partial(option, rich_help_panel="Workload without a trace")
engine_option = partial(option, rich_help_panel="Engines")

# The shell has `--schedule grpo darts` in two words, of which an option takes one.
MoreSchedules = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="SCHEDULE")]
Trace = Annotated[
    Path | None,
    workload_option(
        help="`output_dir` of a run with `save_rollout_trace=True`: its lengths, prompts and batch are used."
    ),
]
PromptsPerStep = Annotated[int | None, workload_option(help="Prompts per rollout. Default: the trace's, or 128.")]
MaxCompletionLength = Annotated[int | None, workload_option(help="Limit in tokens. Default: the trace's, or 32768.")]
TrainSecondsPerToken = Annotated[
    float | None,
    workload_option(
        help="Forward and backward pass, per token trained on, without padding. Default: 0, rollouts only."
    ),
]
FixedSeconds = Annotated[
    float | None, workload_option(help="Weight sync, rewards and the like, per step. Default: 0.")
]
Shaping = Annotated[
    float | None,
    workload_option(
        help="How fast the policy follows what is selected, an assumption; see docs/analysis.md. Default: 0."
    ),
]
UniformShare = Annotated[
    float | None,
    workload_option(
        help="Share of groups whose rewards have no spread, for `--sweep drop_uniform_groups=false,true`. Default: 0."
    ),
]
Published = Annotated[
    str | None,
    lengths_option(help=f"Published lengths: {' (the default) or '.join(WORKLOADS)}.", metavar="NAME"),
]
NumPrompts = Annotated[int | None, lengths_option(help="Prompts in the data set. Default: 1,024.")]
MedianLength = Annotated[float | None, lengths_option(help="Median response length, instead of the workload's.")]
InterPromptStd = Annotated[float | None, lengths_option(help="Spread of log-lengths between prompts, likewise.")]
IntraPromptStd = Annotated[float | None, lengths_option(help="Spread of log-lengths of one prompt, likewise.")]
EndlessShare = Annotated[
    str | None,
    lengths_option(
        help="Share of responses that never end by themselves, or several, such as 0,0.002,0.01. Default: 0.",
        metavar="LIST",
    ),
]
LatencyCurveFile = Annotated[
    Path | None,
    engine_option(help="File of `trl-darts profile`. Default: an assumed curve, Llama-3.1-8B as NVIDIA published it."),
]
NumEngines = Annotated[
    int | None, engine_option(help="Data parallel engines. Default: 1, or 8 with the assumed curve.")
]
MaxNumSeqs = Annotated[
    int | None, engine_option(help="Sequences that an engine decodes at once. Default: the file's, or no limit.")
]
KVTokens = Annotated[
    int | None, engine_option(help="Tokens that fit in an engine's KV cache. Default: the file's, or no limit.")
]
PrefillSecondsPerToken = Annotated[
    float | None, engine_option(help="Per token that is prefilled. Default: what the file has, or 0.")
]
SecondsPerRequest = Annotated[
    float | None, engine_option(help="What each candidate costs its engine, whatever its length. Default: 0.")
]
LayoutOption = Annotated[
    str | None,
    engine_option(
        help="Main engines, and those of another layout that take over what is left, such as 4x1+1x4 (engines × GPUs "
        f"each), with a profile of both. {PAT_LAYOUT} needs none: PAT published it.",
        metavar="LAYOUT",
    ),
]
SwitchSeconds = Annotated[
    float | None,
    engine_option(
        help="With --layout: time of a switch between engines on the same GPUs. 0 where they have GPUs of their own. "
        "Default: 3.16, as PAT's beside its cache."
    ),
]
DraftAcceptance = Annotated[
    float | None,
    engine_option(
        help="Servers draft: the probability that a drafted token is accepted once those before it are. Default: no "
        "drafts."
    ),
]
Schedules = Annotated[
    list[str],
    option(
        help=f"Schedules to compare, the first is the baseline: {', '.join(SCHEDULES)}. Separate them by spaces or "
        "commas, or repeat it. Default: grpo,darts."
    ),
]
NumGenerations = Annotated[int | None, option(help="Rows per prompt. Default: the trace's, or 8.")]
Sweep = Annotated[
    list[str] | None,
    option(
        help="A setting and its values, such as max_num_generations=10,12,16. Repeat it for all combinations. Each "
        "schedule takes the settings that mean something to it.",
        metavar="NAME=VALUE,…",
    ),
]
Steps = Annotated[int, option(help="Steps of each training. Default: 50.")]
Seeds = Annotated[int, option(help="Trainings of each setting. Default: 5.")]
Output = Annotated[Path | None, option(help=f"Directory for `{FILES[0]}` and `{FILES[1]}`.")]


def simulate(
    more_schedules: MoreSchedules = None,
    trace: Trace = None,
    prompts_per_step: PromptsPerStep = None,
    max_completion_length: MaxCompletionLength = None,
    train_seconds_per_token: TrainSecondsPerToken = None,
    fixed_seconds: FixedSeconds = None,
    shaping: Shaping = None,
    uniform_share: UniformShare = None,
    workload: Published = None,
    num_prompts: NumPrompts = None,
    median_length: MedianLength = None,
    inter_prompt_std: InterPromptStd = None,
    intra_prompt_std: IntraPromptStd = None,
    endless_share: EndlessShare = None,
    latency_curve: LatencyCurveFile = None,
    num_engines: NumEngines = None,
    max_num_seqs: MaxNumSeqs = None,
    kv_tokens: KVTokens = None,
    prefill_seconds_per_token: PrefillSecondsPerToken = None,
    seconds_per_request: SecondsPerRequest = None,
    layout: LayoutOption = None,
    switch_seconds: SwitchSeconds = None,
    draft_acceptance: DraftAcceptance = None,
    schedule: Schedules = ["grpo", "darts"],  # noqa: B006  typer copies it
    num_generations: NumGenerations = None,
    sweep: Sweep = None,
    steps: Steps = 50,
    seeds: Seeds = 5,
    output: Output = None,
) -> None:
    """
    Compare schedules and settings on a workload, in virtual time.

    Example:

        trl-darts simulate --trace out --latency-curve latency.json --schedule grpo darts --sweep
        max_num_generations=10,12,16 --sweep long_end_patience=none,2
    """
    given = {name: value for name, value in locals().items() if value is not None}
    names = schedule_names(schedule, more_schedules or [])
    swept = parse_sweep(sweep or [])
    cluster, (workloads, rows) = _cluster(given, swept), _workloads(given)
    settings = settings_of(names, rows, swept)
    _check(steps, seeds, output)
    outcomes = _compare(workloads, settings, cluster, steps, seeds)
    show(console, outcomes, next(iter(workloads.values())), cluster, steps, seeds)
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


def _cluster(given: Mapping[str, Any], sweep: Mapping[str, Any]) -> ClusterSpec:
    own = _fields(ClusterSpec, given)
    if "layout" in given:
        return _layouts(given, sweep, own)
    for name in ("tail_switch_at", "tail_share", "switch_seconds"):
        if name in sweep or name in given:
            option = f"--sweep {name}" if name in sweep else "--switch-seconds"
            raise ConfigurationError(f"`{option}` needs tail engines. Give `--layout`, or leave it out.")
    if "latency_curve" not in given:
        cluster = replace(ASSUMED_CLUSTER, **own)
    else:
        if "trace" in given:
            check_model(given["trace"], given["latency_curve"])
        cluster = ClusterSpec.measured(given["latency_curve"], **own)
    if "draft_acceptance" not in given:
        return cluster
    return replace(cluster, latency=drafted_latency(cluster.latency, given["draft_acceptance"]))


def _layouts(given: Mapping[str, Any], sweep: Mapping[str, Any], own: dict[str, Any]) -> ClusterSpec:
    """Main and tail engines. What else is said of engines would be of one kind, and does not go with it."""
    text, layouts = given["layout"], Layout.parse("--layout", given["layout"])
    single = sorted(SINGLE_LAYOUT & given.keys())
    if single:
        raise ConfigurationError(
            f"`--{single[0].replace('_', '-')}` ({given[single[0]]}) does not go with `--layout` ({text!r}), whose "
            "engines are of two kinds. Leave one of them out."
        )
    own = {"switch_seconds": PAT_CLUSTER.switch_seconds, **own}
    if "tail_share" in sweep and own["switch_seconds"]:
        raise ConfigurationError(
            f"`--sweep tail_share` needs tail engines that are awake from the start, and with `--switch-seconds` "
            f"({own['switch_seconds']:g}) they sleep. Set that to 0, or leave one of them out."
        )
    if "latency_curve" in given:
        return ClusterSpec.of_layouts(given["latency_curve"], *layouts, **own)
    if text != PAT_LAYOUT:
        raise ConfigurationError(
            f"`--layout` ({text!r}) needs `--latency-curve`, a profile of both kinds of engines. Without one there is "
            f"{PAT_LAYOUT} alone."
        )
    return replace(PAT_CLUSTER, **own)


def _workloads(given: Mapping[str, Any]) -> tuple[dict[str, Workload], int]:
    """By what their rows' names end with, and their rows per prompt: a trace's, or those of each endless share."""
    own = {"redraws": True, **_fields(Workload, given)}
    if "trace" in given:
        for name in LENGTHS:
            if name in given:
                raise ConfigurationError(
                    f"`--{name.replace('_', '-')}` ({given[name]}) has no effect with `--trace` "
                    f"({str(given['trace'])!r}), which has lengths and prompts of its own. Leave one of them out."
                )
        workload, rows = recorded_workload(given["trace"], num_generations=given.get("num_generations"), **own)
        return {"": workload}, rows
    published = given.get("workload", next(iter(WORKLOADS)))
    check_choice("--workload", published, WORKLOADS)
    own = {"prompts_per_step": 128, "max_completion_length": 32_768, **own}
    workloads = {}
    for share in _shares(given.get("endless_share", "0")):
        changes = _fields(LogNormalLengths, {**given, "endless_share": share})
        label = f", endless_share={share:g}" if "," in given.get("endless_share", "") else ""
        workloads[label] = Workload(replace(WORKLOADS[published], **changes), **own)
    return workloads, given.get("num_generations", 8)


def _shares(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"`--endless-share` ({text!r}) must be numbers from 0 to 0.1 and commas, such as 0,0.002,0.01."
        ) from None


def _fields(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given of a dataclass, whose fields have the names of options."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def _check(steps: int, seeds: int, output: Path | None) -> None:
    """Before anything is computed."""
    for name, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise ConfigurationError(f"`{name}` ({value}) must be at least 1.")
    if output is not None:
        require_matplotlib()
        check_directory("--output", output)
        for name in FILES:
            check_writable("--output", output / name)


def _compare(
    workloads: Mapping[str, Workload],
    settings: Mapping[str, ScheduleSettings],
    cluster: ClusterSpec,
    steps: int,
    seeds: int,
) -> list[Outcome]:
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("Trainings", total=len(workloads) * len(settings) * seeds)
        return [
            replace(outcome, name=outcome.name + label)
            for label, workload in workloads.items()
            for outcome in compare(workload, settings, cluster, steps, seeds, lambda: progress.advance(task))
        ]


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
