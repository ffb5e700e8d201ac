"""Compares several settings on the same workload, seed by seed, and prints the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from ...errors import ConfigurationError
from ...scheduling import ScheduleSettings
from ...scheduling.schedule_fields import GUARD_EVERY
from ..estimates import Estimate
from .cluster_spec import ClusterSpec
from .run import SimulatedRun
from .training import SimulatedTraining
from .workload import Workload


# Quantities of a whole training that are not the mean over its steps.
TOTALS: dict[str, Callable[[SimulatedRun], float]] = {
    # Tokens that may still be trained on are not wasted.
    "wasted_share": lambda run: 1 - (sum(run.kept_tokens) + run.buffered_tokens[-1]) / sum(run.pool_tokens),
    "batch_length_spread": lambda run: float(np.std(run.mean_kept) / np.mean(run.mean_kept)),
    "off_policy_share": lambda run: float(np.dot(run.off_policy_share, run.kept_tokens) / sum(run.kept_tokens)),
}


@dataclass(frozen=True)
class Outcome:
    """One setting over all seeds."""

    name: str
    runs: list[SimulatedRun]  # one per seed
    # Seconds of the baseline over those of this setting, seed by seed: of a step, or per group whose rewards have a
    # spread if the workload has groups without. If both start a prompt's i-th candidate in an epoch, it is the same.
    speedups: list[float]

    @property
    def speedup(self) -> Estimate:
        """Seconds of the baseline over those of this setting."""
        return Estimate.of(self.speedups)

    def estimate(self, quantity: str) -> Estimate:
        """Returns one of the `TOTALS`, or else the mean over the steps of a quantity of [`SimulatedRun`], if known."""
        of_run = TOTALS.get(quantity, lambda run: float(np.nanmean(getattr(run, quantity))))
        return Estimate.of([of_run(run) for run in self.runs])

    def row(self) -> dict[str, float | str]:
        """Returns all quantities as a row of a table. `longest_wait`, the maximum over all steps, has no interval."""
        names = dict.fromkeys([*TOTALS, *(field.name for field in fields(SimulatedRun))])
        estimates = {"speedup": self.speedup} | {name: self.estimate(name) for name in names if name != "longest_wait"}
        longest_wait = max(max(run.longest_wait) for run in self.runs)
        row: dict[str, float | str] = {"setting": self.name, "longest_wait": longest_wait}
        for name, estimate in estimates.items():
            row[name], row[f"{name}_ci95"] = estimate.mean, estimate.half_width
        return row


def compare(
    workload: Workload,
    settings: Mapping[str, ScheduleSettings],
    cluster: ClusterSpec,
    num_steps: int,
    num_seeds: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """
    Trains with each setting, on the same prompts and candidates.

    Args:
        workload ([`Workload`]):
            Prompts, their response lengths, and the costs of a step.
        settings (`Mapping[str, ScheduleSettings]`):
            Settings by name. The first is the baseline.
        cluster ([`ClusterSpec`]):
            The engines.
        num_steps (`int`):
            Steps of each training.
        num_seeds (`int`):
            Trainings of each setting.
        on_run (`Callable`, *optional*):
            Called after each training.

    Returns:
        `list[Outcome]`: In the order of `settings`.

    Raises:
        [`ConfigurationError`]: If there is no setting, no step or no seed.
    """
    if not settings or num_seeds < 1:
        raise ConfigurationError(f"`settings` ({len(settings)}) and `num_seeds` ({num_seeds}) must be at least 1.")
    runs: dict[str, list[SimulatedRun]] = {name: [] for name in settings}
    for seed in range(num_seeds):
        for name, setting in settings.items():
            runs[name].append(SimulatedTraining(workload, setting, cluster, seed).run(num_steps))
            on_run()
    return _compared(runs, workload)


def fastest(splits: Sequence[Sequence[Outcome]], workload: Workload) -> list[Outcome]:
    """Returns of each setting the outcome with the fastest steps, compared with that of the first setting."""
    best = [min(own, key=lambda outcome: outcome.estimate("step_seconds").mean) for own in zip(*splits, strict=True)]
    return _compared({outcome.name: outcome.runs for outcome in best}, workload)


def _compared(runs: Mapping[str, list[SimulatedRun]], workload: Workload) -> list[Outcome]:
    per_group = workload.uniform_share > 0
    seconds = {
        name: [sum(run.step_seconds) / (sum(run.informative_groups) if per_group else 1) for run in own]
        for name, own in runs.items()
    }
    baseline = next(iter(seconds.values()))
    return [
        Outcome(name, own, [base / mine for base, mine in zip(baseline, seconds[name], strict=True)])
        for name, own in runs.items()
    ]


class Column(NamedTuple):
    """A column of the table."""

    header: str
    quantity: str  # an estimate of the outcome
    style: str  # z: no "-0%" of a rounding error
    meaning: str


COLUMNS = [
    Column("speed-\nup", "speedup", ".3g", "speed-up: over the first row with the same lengths"),
    Column("seconds\nper step", "step_seconds", ".3g", "seconds per step: rollout, and training if given"),
    Column("wasted\ntokens", "wasted_share", "z.0%", "wasted tokens: decoded, and never trained on"),
    Column("bubble", "bubble_ratio", ".2f", "bubble: share of idle decoding slots"),
    Column("satu-\nrated", "saturated_ratio", ".2f", "saturated: prompts with max_num_generations candidates"),
    Column(
        *("kept/\npool", "kept_vs_pool_length_ratio", ".2f"),
        "kept/pool: mean length of the rows over that of all candidates. Far below 1: look at the reward too",
    ),
    Column(
        *("infor-\nmative", "informative_groups", ".0f"),
        "informative: groups of a step whose rewards have a spread. The speed-up is of seconds per such group",
    ),
    Column(
        *("off-\npolicy", "off_policy_share", "z.0%"),
        "off-policy: share of the tokens trained on that an older policy sampled",
    ),
    Column("lag", "mean_lag", ".2f", "lag: steps between a token and its training, on average"),
    Column("defer-\nred", "deferred_groups", ".0f", "deferred: prompts that a rollout left unfinished"),
    Column(
        *("batch\nlengths", "batch_length_spread", ".0%"),
        "batch lengths: how much the batches' mean lengths differ (coefficient of variation)",
    ),
]


def show(
    console: Console,
    outcomes: Sequence[Outcome],
    workload: Workload,
    cluster: ClusterSpec,
    steps: int,
    seeds: int,
    num_gpus: int | None = None,  # that each outcome splits in its own way between engines and trainer
) -> None:
    """Prints a table of 80 columns, what its columns mean, and what was assumed. The baseline comes first."""
    stale, deferred = (
        any(outcome.estimate(name).mean for outcome in outcomes) for name in ("off_policy_share", "deferred_groups")
    )
    optional = {"informative_groups": workload.uniform_share > 0, "off_policy_share": stale}
    optional |= {"mean_lag": stale and not deferred, "deferred_groups": deferred, "batch_length_spread": deferred}
    columns = [column for column in COLUMNS if optional.get(column.quantity, True)]
    # With ten columns there is room for one space between them.
    padding = (0, 2 if len(columns) < 8 else 1, 0, 0)
    title = _title(workload, cluster, steps, seeds, num_gpus)
    table = Table(title=title, box=None, padding=padding, pad_edge=False, header_style="underline")
    table.add_column("setting", overflow="fold")
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.name.replace(", ", "\n"), *(_cell(outcome, column) for column in columns))
    console.print(table)
    lines = [column.meaning for column in columns]
    if seeds > 1:
        lines.append("±: half of a 95 % confidence interval over seeds")
    console.print("\n".join(lines), style="dim", markup=False, highlight=False)
    guarded = any(f"long_end_every={GUARD_EVERY}" in outcome.name for outcome in outcomes)
    for remark in _remarks(workload, cluster, steps, guarded):
        console.print(remark, style="bold yellow", markup=False, highlight=False)


def _cell(outcome: Outcome, column: Column) -> str:
    """The interval stands below the mean, so that the table fits 80 columns. A single seed has none."""
    estimate = outcome.speedup if column.quantity == "speedup" else outcome.estimate(column.quantity)
    mean = format(estimate.mean, column.style)
    if math.isinf(estimate.half_width):
        return mean
    return f"{mean}\n±{estimate.half_width:{column.style.replace('.3g', '.2g')}}"


def _title(workload: Workload, cluster: ClusterSpec, steps: int, seeds: int, num_gpus: int | None) -> str:
    limits = [f"{cluster.max_num_seqs:,} sequences"] if cluster.max_num_seqs else []
    limits += [f"{cluster.kv_tokens:,} tokens of KV cache"] if cluster.kv_tokens else []
    engines = f"{num_gpus} GPUs of engines and trainer"
    if num_gpus is None:
        engines = f"{cluster.num_engines} engine{'s' if cluster.num_engines > 1 else ''}"
    tail = "" if cluster.tail is None else f", {cluster.tail.num_engines} of another layout for the last candidates"
    return (
        f"{steps} steps × {seeds} seeds of {workload.prompts_per_step} prompts on {engines}"
        f"{' of at most ' if limits else ''}{' and '.join(limits)}{tail}"
        f"{', assumed: ' + source if (source := cluster.latency.metadata.get('assumed')) else ''}"
    )


def _remarks(workload: Workload, cluster: ClusterSpec, steps: int, guarded: bool = False) -> list[str]:
    """Returns what limits the validity of the table."""
    remarks = []
    if guarded and workload.tools is not None:
        remarks.append(
            f"long_end_every={GUARD_EVERY} is the trainer's default with conversations: one rollout in {GUARD_EVERY} "
            "waits for all."
        )
    elif guarded:
        remarks.append(
            f"long_end_every={GUARD_EVERY} is the trainer's default with an engine in its own process: one rollout in "
            f"{GUARD_EVERY} waits for all answers. With vLLM servers it defers groups with equal rewards instead, "
            "which is not simulated: in trainings its speed-up was between this one and that without a guard "
            "(--sweep long_end_every=none), 10 to 25 % below the latter."
        )
    if (tools := workload.tools) is not None:
        remarks.append(
            f"Tools are assumed: about {tools.mean_calls:g} calls per conversation at random places, of "
            f"{tools.median_seconds:g} s in the median. Each conversation runs by itself, as on vLLM servers; TRL's "
            "loop, in which all wait for the slowest tool of a turn, is much slower."
        )
    if not workload.fixed_seconds and not workload.train_seconds_per_token:
        remarks.append(
            "Rollouts only: training takes no time here, so a whole step gains less. Give --train-seconds-per-token "
            "and --fixed-seconds, as measured in a run's log."
        )
    if fitted := cluster.latency.metadata.get("fitted"):
        remarks.append(f"The latency curve is fitted to {fitted}.")
    if source := cluster.latency.metadata.get("assumed"):
        why = f", because {why}" if (why := cluster.latency.metadata.get("not_fitted")) else ""
        remarks.append(
            f"WARNING: the latency curve is assumed ({source}){why}. The speed-ups depend on what a further candidate "
            "costs on your servers: measure it with `trl-darts profile`, and name the file with --latency-curve."
        )
    epochs = steps * workload.prompts_per_step / workload.lengths.num_prompts
    if epochs < 2:
        remarks.append(
            f"Each prompt was sampled less than twice ({epochs:.1f} epochs): what a schedule learns about prompts "
            "hardly shows. Simulate more --steps."
        )
    return remarks
