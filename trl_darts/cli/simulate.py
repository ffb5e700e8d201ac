"""`trl-darts simulate`: what a schedule would gain on a workload, before any GPU is paid for."""

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
from ..analysis.simulation.comparison import show
from ..analysis.simulation.recorded import check_model
from ..errors import ConfigurationError
from ..import_utils import require_matplotlib
from ..policy import Layout, drafted_latency
from ..scheduling import SCHEDULES
from ..scheduling.rules import one_of


FILES = ("simulation.csv", "simulation.png")
# Options that have no effect on a trace, and options of one kind of engines.
LENGTHS = ("workload", "num_prompts", "median_length", "inter_prompt_std", "intra_prompt_std", "endless_share")
SINGLE_LAYOUT = {"num_engines", "max_num_seqs", "kv_tokens", "prefill_seconds_per_token", "draft_acceptance"}

console = Console()


def option(text: str, panel: str | None = None, **more: Any) -> Any:
    """An option whose default stands in its help."""
    return typer.Option(help=text, show_default=False, rich_help_panel=panel, **more)


for_workload = partial(option, panel="Workload")
for_lengths = partial(option, panel="Workload without a trace")
for_engines = partial(option, panel="Engines")


def simulate(
    # A shell passes `--schedule grpo darts` as two words, of which an option takes one.
    more_schedules: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="SCHEDULE")] = None,
    trace: Annotated[
        Path | None,
        for_workload("`output_dir` of a run with `save_rollout_trace=True`: its lengths, prompts and batch are used."),
    ] = None,
    prompts_per_step: Annotated[int | None, for_workload("Prompts per rollout. Default: the trace's, or 128.")] = None,
    max_completion_length: Annotated[
        int | None, for_workload("Limit in tokens. Default: the trace's, or 32768.")
    ] = None,
    train_seconds_per_token: Annotated[
        float | None,
        for_workload("Forward and backward pass, per token trained on, without padding. Default: 0, rollouts only."),
    ] = None,
    fixed_seconds: Annotated[
        float | None, for_workload("Weight sync, rewards and the like, per step. Default: 0.")
    ] = None,
    shaping: Annotated[
        float | None,
        for_workload("How fast the policy follows what is selected, an assumption; see docs/analysis.md. Default: 0."),
    ] = None,
    uniform_share: Annotated[
        float | None,
        for_workload(
            "Share of groups whose rewards have no spread, for `--sweep drop_uniform_groups=false,true`. Default: 0."
        ),
    ] = None,
    workload: Annotated[
        str | None, for_lengths(f"Published lengths: {' (the default) or '.join(WORKLOADS)}.", metavar="NAME")
    ] = None,
    num_prompts: Annotated[int | None, for_lengths("Prompts in the data set. Default: 1,024.")] = None,
    median_length: Annotated[float | None, for_lengths("Median response length, instead of the workload's.")] = None,
    inter_prompt_std: Annotated[float | None, for_lengths("Spread of log-lengths between prompts, likewise.")] = None,
    intra_prompt_std: Annotated[float | None, for_lengths("Spread of log-lengths of one prompt, likewise.")] = None,
    endless_share: Annotated[
        str | None,
        for_lengths(
            "Share of responses that never end by themselves, or several, such as 0,0.002,0.01. Default: 0.",
            metavar="LIST",
        ),
    ] = None,
    latency_curve: Annotated[
        Path | None,
        for_engines("File of `trl-darts profile`. Default: an assumed curve, Llama-3.1-8B as NVIDIA published it."),
    ] = None,
    num_engines: Annotated[
        int | None, for_engines("Data parallel engines. Default: 1, or 8 with the assumed curve.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, for_engines("Sequences that an engine decodes at once. Default: the file's, or no limit.")
    ] = None,
    kv_tokens: Annotated[
        int | None, for_engines("Tokens that fit in an engine's KV cache. Default: the file's, or no limit.")
    ] = None,
    prefill_seconds_per_token: Annotated[
        float | None, for_engines("Per token that is prefilled. Default: what the file has, or 0.")
    ] = None,
    seconds_per_request: Annotated[
        float | None, for_engines("What each candidate costs its engine, whatever its length. Default: 0.")
    ] = None,
    layout: Annotated[
        str | None,
        for_engines(
            "Main engines, and those of another layout that take over what is left, such as 4x1+1x4 (engines × GPUs "
            f"each), with a profile of both. {PAT_LAYOUT} needs none: PAT published it.",
            metavar="LAYOUT",
        ),
    ] = None,
    switch_seconds: Annotated[
        float | None,
        for_engines(
            "With --layout: time of a switch between engines on the same GPUs. 0 where they have GPUs of their own. "
            "Default: 3.16, as PAT's beside its cache."
        ),
    ] = None,
    draft_acceptance: Annotated[
        float | None,
        for_engines(
            "Servers draft: the probability that a drafted token is accepted once those before it are. Default: no "
            "drafts."
        ),
    ] = None,
    schedule: Annotated[
        list[str],
        option(
            f"Schedules to compare, the first is the baseline: {', '.join(SCHEDULES)}. Separate them by spaces or "
            "commas, or repeat it. Default: grpo,darts."
        ),
    ] = ["grpo", "darts"],  # noqa: B006  typer copies it
    num_generations: Annotated[int | None, option("Rows per prompt. Default: the trace's, or 8.")] = None,
    sweep: Annotated[
        list[str] | None,
        option(
            "A setting and its values, such as max_num_generations=10,12,16. Repeat it for all combinations. Each "
            "schedule takes the settings that mean something to it.",
            metavar="NAME=VALUE,…",
        ),
    ] = None,
    steps: Annotated[int, option("Steps of each training. Default: 50.")] = 50,
    seeds: Annotated[int, option("Trainings of each setting. Default: 5.")] = 5,
    output: Annotated[Path | None, option(f"Directory for `{FILES[0]}` and `{FILES[1]}`.")] = None,
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
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Trainings", total=len(workloads) * len(settings) * seeds)
        outcomes = [
            replace(outcome, name=outcome.name + label)
            for label, own in workloads.items()
            for outcome in compare(own, settings, cluster, steps, seeds, lambda: progress.advance(task))
        ]
    show(console, outcomes, next(iter(workloads.values())), cluster, steps, seeds)
    if output is not None:
        _write(outcomes, *(output / name for name in FILES))


def schedule_names(schedules: list[str], more: list[str]) -> list[str]:
    """The schedules of `--schedule`, and those behind it without an option's name."""
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
    cluster = replace(ASSUMED_CLUSTER, **own)
    if "latency_curve" in given:
        if "trace" in given:
            check_model(given["trace"], given["latency_curve"])
        cluster = ClusterSpec.measured(given["latency_curve"], **own)
    if "draft_acceptance" not in given:
        return cluster
    return replace(cluster, latency=drafted_latency(cluster.latency, given["draft_acceptance"]))


def _layouts(given: Mapping[str, Any], sweep: Mapping[str, Any], own: dict[str, Any]) -> ClusterSpec:
    """Main and tail engines. Options of one kind of engines are refused."""
    text, layouts = given["layout"], Layout.parse("--layout", given["layout"])
    single = sorted(SINGLE_LAYOUT & given.keys())
    if single:
        raise ConfigurationError(
            f"`{_flag(single[0])}` ({given[single[0]]}) does not go with `--layout` ({text!r}), whose engines are of "
            "two kinds. Leave one of them out."
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
    """A trace's workload, or one for each endless share, by the end of their rows' names; and the rows per prompt."""
    own = {"redraws": True, **_fields(Workload, given)}
    if "trace" in given:
        for name in LENGTHS:
            if name in given:
                raise ConfigurationError(
                    f"`{_flag(name)}` ({given[name]}) has no effect with `--trace` ({str(given['trace'])!r}), which "
                    "has lengths and prompts of its own. Leave one of them out."
                )
        workload, rows = recorded_workload(given["trace"], num_generations=given.get("num_generations"), **own)
        return {"": workload}, rows
    published = given.get("workload", next(iter(WORKLOADS)))
    one_of(WORKLOADS).check("--workload", published)
    own = {"prompts_per_step": 128, "max_completion_length": 32_768, **own}
    text = given.get("endless_share", "0")
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"`--endless-share` ({text!r}) must be numbers from 0 to 0.1 and commas, such as 0,0.002,0.01."
        ) from None
    workloads = {}
    for share in shares:
        lengths = replace(WORKLOADS[published], **_fields(LogNormalLengths, {**given, "endless_share": share}))
        workloads[f", endless_share={share:g}" if "," in text else ""] = Workload(lengths, **own)
    return workloads, given.get("num_generations", 8)


def _fields(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options that are fields of a dataclass."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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


def _write(outcomes: list[Outcome], table: Path, picture: Path) -> None:
    import pandas as pd

    from ..analysis.plots import plot_simulation

    pd.DataFrame([outcome.row() for outcome in outcomes]).to_csv(table, index=False, na_rep="nan")
    plot_simulation(outcomes, picture)
    console.print(f"Written: {table}, {picture}", highlight=False)
