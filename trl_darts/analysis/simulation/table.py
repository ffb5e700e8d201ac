"""A comparison as it stands in a terminal: a table of 80 columns, what its columns mean, and what was assumed."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .comparison import Estimate, Outcome
from .engine import ClusterSpec
from .workload import Workload


class Column(NamedTuple):
    """A quantity, how it is written, and what it is."""

    header: str
    quantity: Callable[[Outcome], Estimate]
    style: str
    meaning: str


def _mean(quantity: str) -> Callable[[Outcome], Estimate]:
    return lambda outcome: outcome.estimate(quantity)


# z: no "-0%" of a rounding error.
COLUMNS = [
    Column("speed-\nup", lambda own: own.speedup, ".3g", "speed-up: over the first row with the same lengths"),
    Column("seconds\nper step", _mean("step_seconds"), ".3g", "seconds per step: rollout, and training if given"),
    Column("wasted\ntokens", lambda own: own.wasted_share, "z.0%", "wasted tokens: decoded, and never trained on"),
    Column("bubble", _mean("bubble_ratio"), ".2f", "bubble: share of the decoding slots that stood idle"),
    Column("satu-\nrated", _mean("saturated_ratio"), ".2f", "saturated: prompts with max_num_generations candidates"),
    Column(
        "kept/\npool",
        _mean("kept_vs_pool_length_ratio"),
        ".2f",
        "kept/pool: mean length of the rows over that of all candidates. Far below 1, look at the reward too",
    ),
]
LESSONS = "informative: groups of a step whose rewards have a spread. The speed-up is of seconds per such group"
INFORMATIVE = Column("infor-\nmative", _mean("informative_groups"), ".0f", LESSONS)
STALE = "off-policy: share of the tokens trained on that an older policy sampled"
OFF_POLICY = Column("off-\npolicy", lambda own: own.off_policy_share, "z.0%", STALE)
SPREAD = "batch lengths: how much the batches' mean lengths differ (coefficient of variation)"
DEFERRED = [
    Column("defer-\nred", _mean("deferred_groups"), ".0f", "deferred: prompts that a rollout ended without"),
    Column("batch\nlengths", lambda own: own.batch_length_spread, ".0%", SPREAD),
]


def show(
    console: Console, outcomes: Sequence[Outcome], workload: Workload, cluster: ClusterSpec, steps: int, seeds: int
) -> None:
    """Prints a comparison: `seeds` trainings of `steps` steps for each of the outcomes, the baseline first."""
    columns = list(COLUMNS)
    if workload.uniform_share:
        columns.append(INFORMATIVE)
    if any(outcome.off_policy_share.mean for outcome in outcomes):
        columns.append(OFF_POLICY)
    if any(outcome.estimate("deferred_groups").mean for outcome in outcomes):
        columns += DEFERRED
    console.print(_table(outcomes, columns, _title(workload, cluster, steps, seeds)))
    lines = [column.meaning for column in columns]
    if seeds > 1:
        lines.append("±: half of a 95 % confidence interval over seeds")
    console.print("\n".join(lines), style="dim", markup=False, highlight=False)
    for remark in _remarks(workload, cluster, steps):
        console.print(remark, style="bold yellow", markup=False, highlight=False)


def _table(outcomes: Sequence[Outcome], columns: Sequence[Column], title: str) -> Table:
    # With ten columns there is room for one space between them.
    padding = (0, 2 if len(columns) < 8 else 1, 0, 0)
    table = Table(title=title, box=None, padding=padding, pad_edge=False, header_style="underline")
    table.add_column("setting", overflow="fold")
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    for outcome in outcomes:
        cells = (_cell(column.quantity(outcome), column.style) for column in columns)
        table.add_row(outcome.name.replace(", ", "\n"), *cells)
    return table


def _title(workload: Workload, cluster: ClusterSpec, steps: int, seeds: int) -> str:
    limits = [f"{cluster.max_num_seqs:,} sequences"] if cluster.max_num_seqs else []
    limits += [f"{cluster.kv_tokens:,} tokens of KV cache"] if cluster.kv_tokens else []
    tail = "" if cluster.tail is None else f", {cluster.tail.num_engines} of another layout for what is left"
    return (
        f"{steps} steps × {seeds} seeds of {workload.prompts_per_step} prompts on {cluster.num_engines} engine"
        f"{'s' if cluster.num_engines > 1 else ''}{' of at most ' if limits else ''}{' and '.join(limits)}{tail}"
        f"{', assumed: ' + source if (source := cluster.latency.metadata.get('assumed')) else ''}"
    )


def _remarks(workload: Workload, cluster: ClusterSpec, steps: int) -> list[str]:
    """What a reader of the table must know before believing it."""
    remarks = []
    if not workload.fixed_seconds and not workload.train_seconds_per_token:
        remarks.append(
            "Rollouts only: training takes no time here, so a whole step gains less. Give --train-seconds-per-token "
            "and --fixed-seconds, as a run's log has them."
        )
    if source := cluster.latency.metadata.get("assumed"):
        remarks.append(
            f"WARNING: the latency curve is assumed ({source}). The speed-ups hang on what a further candidate costs "
            "on your servers: measure it with `trl-darts profile`, and name the file with --latency-curve."
        )
    epochs = steps * workload.prompts_per_step / workload.lengths.num_prompts
    if epochs < 2:
        remarks.append(
            f"Each prompt came up less than twice ({epochs:.1f} epochs): what a schedule learns of prompts hardly "
            "shows. Simulate more --steps."
        )
    return remarks


def _cell(estimate: Estimate, style: str) -> str:
    """The interval stands below the mean, so that the table fits 80 columns. One seed has none."""
    mean = format(estimate.mean, style)
    if math.isinf(estimate.half_width):
        return mean
    return f"{mean}\n±{estimate.half_width:{style.replace('.3g', '.2g')}}"
