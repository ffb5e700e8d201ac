"""`trl-darts simulate`: parses the options, calls `trl_darts.analysis.simulation`, and prints."""

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
from ..analysis.simulation.comparison import fastest, show
from ..analysis.simulation.recorded import curve_of, fitted_cluster, run_settings
from ..errors import ConfigurationError
from ..import_utils import require_matplotlib
from ..policy import Layout, PrefillCurve, drafted_latency
from ..scheduling import SCHEDULES
from ..scheduling.rules import one_of


FILES = ("simulation.csv", "simulation.png")
# Options that have no effect on a trace, and options for a single kind of engine.
LENGTHS = ("workload", "num_prompts", "median_length", "inter_prompt_std", "intra_prompt_std", "endless_share")
SINGLE_LAYOUT = {"num_engines", "max_num_seqs", "kv_tokens", "prefill_seconds_per_token", "draft_acceptance"}

console = Console()


def option(text: str, panel: str | None = None, **more: Any) -> Any:
    """Declares an option whose help names its default."""
    return typer.Option(help=text, show_default=False, rich_help_panel=panel, **more)


for_workload = partial(option, panel="Workload")
for_lengths = partial(option, panel="Workload without a trace")
for_engines = partial(option, panel="Engines")


def simulate(
    # A shell passes `--schedule grpo darts` as two words, of which an option takes one.
    more_schedules: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="SCHEDULE")] = None,
    trace: Annotated[
        Path | None,
        for_workload(
            "`output_dir` of a run with `save_rollout_trace=True`, or of TRL's trainer with `record_lengths` or "
            "`log_completions=True`: its lengths, prompts and batch are used."
        ),
    ] = None,
    prompts_per_step: Annotated[int | None, for_workload("Prompts per rollout. Default: the trace's, or 128.")] = None,
    max_completion_length: Annotated[
        int | None, for_workload("Limit in tokens. Default: the trace's, or 32768.")
    ] = None,
    train_seconds_per_token: Annotated[
        float | None,
        for_workload("Seconds of training per token trained on, without padding. Default: 0, rollouts only."),
    ] = None,
    fixed_seconds: Annotated[
        float | None, for_workload("Seconds per step for weight sync, rewards and the like. Default: 0.")
    ] = None,
    shaping: Annotated[
        float | None,
        for_workload(
            "How fast the policy follows the selection, an assumption: each step adds it times the difference between "
            "kept and all candidates to the probability to stop. Default: 0."
        ),
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
    median_length: Annotated[float | None, for_lengths("Median response length. Default: the workload's.")] = None,
    inter_prompt_std: Annotated[
        float | None, for_lengths("Spread of log-lengths between prompts. Default: the workload's.")
    ] = None,
    intra_prompt_std: Annotated[
        float | None, for_lengths("Spread of log-lengths within a prompt. Default: the workload's.")
    ] = None,
    endless_share: Annotated[
        str | None,
        for_lengths(
            "Share of responses that always reach the limit, or several shares, such as 0,0.002,0.01. Default: 0.",
            metavar="LIST",
        ),
    ] = None,
    latency_curve: Annotated[
        Path | None,
        for_engines(
            "File of `trl-darts profile`. Default: fitted to the times in the trace, or else NVIDIA's of Llama-3.1-8B."
        ),
    ] = None,
    num_engines: Annotated[
        int | None,
        for_engines(
            "Data parallel engines. Default: the trace's with a curve fitted to it, 1 with a file, or else 8."
        ),
    ] = None,
    num_gpus: Annotated[
        int | None,
        for_engines(
            "GPUs of the trainer and of engines with one each: shows each setting with its fastest split. "
            "--train-seconds-per-token is then that of a single GPU."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, for_engines("Sequences that an engine decodes at once. Default: the file's, or no limit.")
    ] = None,
    kv_tokens: Annotated[
        int | None, for_engines("Tokens that fit in an engine's KV cache. Default: the file's, or no limit.")
    ] = None,
    prefill_seconds_per_token: Annotated[
        float | None, for_engines("Seconds per prefilled token. Default: the file's, or 0.")
    ] = None,
    seconds_per_request: Annotated[
        float | None, for_engines("Seconds that each candidate occupies its engine before it decodes. Default: 0.")
    ] = None,
    layout: Annotated[
        str | None,
        for_engines(
            "Main engines, and engines of another layout for the last candidates, such as 4x1+1x4 (engines × GPUs "
            f"each), with a profile of both. {PAT_LAYOUT} needs no profile: PAT published it.",
            metavar="LAYOUT",
        ),
    ] = None,
    switch_seconds: Annotated[
        float | None,
        for_engines(
            "With --layout: seconds of a switch between engines on the same GPUs, or 0 if each has its own. Default: "
            "3.16, as in PAT without moving the cache."
        ),
    ] = None,
    draft_acceptance: Annotated[
        float | None,
        for_engines(
            "With drafts: the probability that a drafted token is accepted if those before it were. Default: no "
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
            "schedule takes the settings that it reads.",
            metavar="NAME=VALUE,…",
        ),
    ] = None,
    steps: Annotated[int, option("Steps of each simulated run. Default: 50.")] = 50,
    seeds: Annotated[int, option("Simulated runs of each setting. Default: 5.")] = 5,
    output: Annotated[Path | None, option(f"Directory for `{FILES[0]}` and `{FILES[1]}`.")] = None,
) -> None:
    """
    Compare schedules and settings on a workload, in virtual time.

    Example:

        trl-darts simulate --trace outputs/grpo --schedule grpo,darts --sweep max_num_generations=10,12,16
    """
    given = {name: value for name, value in locals().items() if value is not None}
    names = schedule_names(schedule, more_schedules or [])
    swept = parse_sweep(sweep or [])
    cluster, (workloads, rows) = _cluster(given, swept), _workloads(given)
    settings = settings_of(names, rows, swept)
    _check(steps, seeds, output)
    cases = {label: _splits(num_gpus, given, own, cluster) for label, own in workloads.items()}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Runs", total=sum(map(len, cases.values())) * len(settings) * seeds)
        run = partial(compare, num_steps=steps, num_seeds=seeds, on_run=lambda: progress.advance(task))
        outcomes = []
        for label, splits in cases.items():
            found = [
                [replace(outcome, name=outcome.name + label + suffix) for outcome in run(own, settings, engines)]
                for suffix, own, engines in splits
            ]
            outcomes += found[0] if num_gpus is None else fastest(found, workloads[label])
    show(console, outcomes, next(iter(workloads.values())), cluster, steps, seeds, num_gpus)
    if output is not None:
        _write(outcomes, *(output / name for name in FILES))


def schedule_names(schedules: list[str], more: list[str]) -> list[str]:
    """Returns the schedules of `--schedule`, and those that follow it as separate words."""
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
    if path := given.get("latency_curve"):
        run = given.get("trace")
        curve = curve_of(path, {} if run is None else {str(run): run_settings(run).get("model")})
        cluster = ClusterSpec.of(curve, PrefillCurve.load(path), **own)
    elif "trace" in given:
        cluster = fitted_cluster(given["trace"], cluster, **own)
    if "draft_acceptance" not in given:
        return cluster
    return replace(cluster, latency=drafted_latency(cluster.latency, given["draft_acceptance"]))


def _splits(
    num_gpus: int | None, given: Mapping[str, Any], workload: Workload, cluster: ClusterSpec
) -> list[tuple[str, Workload, ClusterSpec]]:
    """Returns a case for each number of engines, with its suffix. Training is as fast as the trainer has GPUs."""
    if num_gpus is None:
        return [("", workload, cluster)]
    if num_gpus < 2:
        raise ConfigurationError(f"`--num-gpus` ({num_gpus}) must be at least 2: one for an engine, one to train.")
    for name in ("num_engines", "layout"):
        if name in given:
            raise ConfigurationError(
                f"`{_flag(name)}` ({given[name]}) has no effect with `--num-gpus` ({num_gpus}), which compares all "
                "numbers of engines. Leave one of them out."
            )
    seconds = workload.train_seconds_per_token
    if not seconds:
        raise ConfigurationError(
            f"`--num-gpus` ({num_gpus}) needs `--train-seconds-per-token`, which says what the trainer's GPUs gain."
        )
    return [
        (
            f", engines={number}",
            replace(workload, train_seconds_per_token=seconds / (num_gpus - number)),
            replace(cluster, num_engines=number),
        )
        for number in range(1, num_gpus)
    ]


def _layouts(given: Mapping[str, Any], sweep: Mapping[str, Any], own: dict[str, Any]) -> ClusterSpec:
    """Returns main and tail engines. Options for a single kind of engine are refused."""
    text, layouts = given["layout"], Layout.parse("--layout", given["layout"])
    single = sorted(SINGLE_LAYOUT & given.keys())
    if single:
        raise ConfigurationError(
            f"`{_flag(single[0])}` ({given[single[0]]}) does not work with `--layout` ({text!r}), whose engines are "
            "of two kinds. Leave one of them out."
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
            f"`--layout` ({text!r}) needs `--latency-curve`, a profile of both kinds of engines. Only {PAT_LAYOUT} "
            "works without one."
        )
    return replace(PAT_CLUSTER, **own)


def _workloads(given: Mapping[str, Any]) -> tuple[dict[str, Workload], int]:
    """Returns workloads by the suffix of their rows' names, and the rows per prompt."""
    own = {"redraws": True, **_fields(Workload, given)}
    if "trace" in given:
        for name in LENGTHS:
            if name in given:
                raise ConfigurationError(
                    f"`{_flag(name)}` ({given[name]}) has no effect with `--trace` ({str(given['trace'])!r}), which "
                    "has its own lengths and prompts. Leave one of them out."
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
    """Returns the given options that are fields of a dataclass."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check(steps: int, seeds: int, output: Path | None) -> None:
    """Checks the remaining options before anything is computed."""
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
