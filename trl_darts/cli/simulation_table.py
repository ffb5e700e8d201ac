"""The table that `trl-darts simulate` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ..analysis.simulation import ClusterSpec, Estimate, Outcome, Workload


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
