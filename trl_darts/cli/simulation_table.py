"""What `trl-darts simulate` prints: the table, and what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ..simulation import ClusterSpec, Workload
from ..simulation.comparison import Estimate, Outcome
from ..simulation.verdict import verdict


def show(
    console: Console, outcomes: Sequence[Outcome], workload: Workload, cluster: ClusterSpec, steps: int, seeds: int
) -> None:
    """
    Prints a comparison.

    Args:
        console (`rich.console.Console`):
            Where to.
        outcomes (`Sequence[Outcome]`):
            The baseline first.
        workload ([`Workload`]):
            What was trained on.
        cluster ([`ClusterSpec`]):
            What decoded.
        steps (`int`):
            Steps of each training.
        seeds (`int`):
            Trainings of each setting.
    """
    console.print(_table(outcomes, _title(workload, cluster, steps, seeds), seeds))
    console.print(verdict(outcomes), markup=False, highlight=False)
    if steps * workload.prompts_per_step < 2 * workload.lengths.num_prompts:
        console.print(
            f"Each prompt came up less than twice: what a schedule learns of prompts hardly shows. {steps} steps of "
            f"{workload.prompts_per_step} are {steps * workload.prompts_per_step / workload.lengths.num_prompts:.1f} "
            "epochs; simulate more `--steps`.",
            markup=False,
            highlight=False,
        )


def _title(workload: Workload, cluster: ClusterSpec, steps: int, seeds: int) -> str:
    source = ", assumed latency curve" if cluster.latency.metadata.get("assumed") else ""
    return (
        f"{steps} steps × {seeds} seeds of {workload.prompts_per_step} prompts on {cluster.num_engines} engine"
        f"{'s' if cluster.num_engines > 1 else ''}{source}"
    )


def _table(outcomes: Sequence[Outcome], title: str, seeds: int) -> Table:
    columns = _columns(outcomes)
    caption = "± is half of a 95 % confidence interval over seeds" if seeds > 1 else None
    # With ten columns there is room for one space between them.
    padding = (0, 2 if len(columns) < 8 else 1, 0, 0)
    table = Table(title=title, caption=caption, box=None, padding=padding, pad_edge=False, header_style="underline")
    table.add_column("setting", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.name.replace(", ", "\n"), *(column(outcome) for column in columns.values()))
    return table


def _columns(outcomes: Sequence[Outcome]) -> dict[str, Callable[[Outcome], str]]:
    """Headers, and what stands below them."""
    columns: dict[str, Callable[[Outcome], str]] = {
        "speed-\nup": lambda outcome: _number(outcome.speedup),
        "seconds\nper step": lambda outcome: _number(outcome.estimate("step_seconds")),
        "wasted\ntokens": lambda outcome: _percent(outcome.wasted_share),
        "bubble": lambda outcome: _ratio(outcome.estimate("bubble_ratio")),
        "satu-\nrated": lambda outcome: _ratio(outcome.estimate("saturated_ratio")),
        "kept/\npool": lambda outcome: _ratio(outcome.estimate("kept_vs_pool_length_ratio")),
    }
    # What there is only with schedules whose batches are not the loader's.
    if any(outcome.off_policy_share.mean for outcome in outcomes):
        columns["off-\npolicy"] = lambda outcome: _percent(outcome.off_policy_share)
    if any(outcome.estimate("deferred_groups").mean for outcome in outcomes):
        columns["defer-\nred"] = lambda outcome: _count(outcome.estimate("deferred_groups"))
        columns["batch\nlengths"] = lambda outcome: _percent(outcome.batch_length_spread)
    return columns


def _number(estimate: Estimate) -> str:
    return _with_interval(estimate, lambda value: f"{value:.3g}", lambda value: f"{value:.2g}")


def _ratio(estimate: Estimate) -> str:
    return _with_interval(estimate, lambda value: f"{value:.2f}")


def _percent(estimate: Estimate) -> str:
    return _with_interval(estimate, lambda value: f"{max(0.0, value):.0%}")  # no "-0%" of a rounding error


def _count(estimate: Estimate) -> str:
    return _with_interval(estimate, lambda value: f"{value:.0f}")


def _with_interval(
    estimate: Estimate, shown: Callable[[float], str], half_width: Callable[[float], str] | None = None
) -> str:
    """The interval stands below the mean, so that the table fits 80 columns. One seed has none."""
    if math.isinf(estimate.half_width):
        return shown(estimate.mean)
    return f"{shown(estimate.mean)}\n±{(half_width or shown)(estimate.half_width)}"
