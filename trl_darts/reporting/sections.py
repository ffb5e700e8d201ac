"""The page's panels: what each asks, its charts, its table, and what is missing in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from . import charts, panels, timing
from .compare import Comparison, Window
from .drawing import Chart
from .formats import listing, number, time_unit
from .outcomes import OUTCOMES, ended
from .summary import reward_ends


STATS = {"mean": "Mean", "p50": "Median (p50)", "p99": "p99", "max": "Longest"}


@dataclass(frozen=True)
class Table:
    """
    Numbers below a panel's charts.

    Args:
        caption (`str`):
            What they are, and over which steps.
        header (`list[str]`):
            Names of the columns; the first column names the row.
        rows (`list[list[str]]`):
            Cells.
    """

    caption: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Panel:
    """
    One part of the page.

    Args:
        key (`str`):
            Its anchor, and the end of its picture's name.
        title (`str`):
            Heading.
        lead (`str`):
            How to read it.
        charts (`list[Chart]`):
            Charts; none, where nothing is known.
        table ([`Table`], *optional*):
            The numbers.
        looks (`tuple[str, ...]`, *optional*):
            Fillings that need a legend: keys of `drawing.LOOKS`.
        notes (`list[str]`, *optional*):
            What is missing, and why.
    """

    key: str
    title: str
    lead: str
    charts: list[Chart]
    table: Table | None = None
    looks: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def lengths(comparison: Comparison) -> Panel:
    """Mean, p50, p99 and longest response over training."""
    stats = [panels.length_stats(run) for run in comparison.runs]
    window = _window(stats)
    found = []
    for stat, title in STATS.items():
        curves = {
            i: table[stat].dropna() for i, table in enumerate(stats) if stat in table and table[stat].notna().any()
        }
        if curves:
            alt = _describe(f"{title} of all candidates' lengths in tokens over steps", curves, comparison.names)
            found.append(charts.lines(f"{title}, tokens", alt, curves, window=window))
    rows = [
        [name, *(f"{number(a)} → {number(b)}" for a, b in (_ends(table.get(stat)) for stat in STATS))]
        for name, table in zip(comparison.names, stats, strict=True)
    ]
    lead = (
        "Tokens of all candidates, also the discarded and the aborted ones: what the engine had to write. The longest "
        "is what a step waits for. Aborted candidates count with what they had, so with early stops the tail is "
        f"longer than it looks. {_smoothing(window)}"
    )
    table = Table("First → last third of each run's own steps", ["Run", *STATS.values()], rows)
    return Panel(
        "lengths",
        "Response lengths over training",
        lead,
        found,
        table if found else None,
        notes=_no_lengths(stats, comparison),
    )


def selection(comparison: Comparison) -> Panel:
    """The pool against the rows that are kept."""
    traces = comparison.common_traces()
    shown = {i: table for i, table in enumerate(traces) if not table.empty}
    edges = panels.length_edges(max((int(table["length"].max()) for table in shown.values()), default=1))
    shares = {i: panels.length_shares(table, edges) for i, table in shown.items()}
    top = max((float(table.max().max()) for table in shares.values()), default=1.0)
    found, rows = [], []
    for i, table in shown.items():
        name, kept = comparison.names[i], table["selected"]
        pool, rest = ended(table)["length"], table["length"][kept]
        alt = (
            f"Histogram of lengths, {name}. All candidates: mean {number(pool.mean())}, p99 "
            f"{number(pool.quantile(0.99))} tokens. Kept rows: mean {number(rest.mean())}, p99 "
            f"{number(rest.quantile(0.99))} tokens."
        )
        found.append(charts.distribution(f"{name}: % of candidates", alt, i, shares[i], edges, top))
        ends = [
            number(part.quantile(q)) if q else number(part.mean()) for q in (0, 0.5, 0.99, 1) for part in (pool, rest)
        ]
        rows.append([name, *(f"{ends[k]} → {ends[k + 1]}" for k in range(0, 8, 2))])
    ratios = {i: _length_ratio(table) for i, table in enumerate(comparison.rollouts) if len(table)}
    if ratios:
        alt = _describe("Mean length of kept rows as a multiple of the pool's, over steps", ratios, comparison.names)
        found.append(
            charts.lines("Mean length, kept / pool", alt, ratios, window=_window(comparison.rollouts), level=1.0)
        )
    lead = (
        "Area: all candidates. Line: the rows that are trained on. Where the line ends before the area, the tail was "
        "not trained on; far to the right, the long ends that were kept. The ratio says what training sees: below 1, "
        "shorter answers than the model writes."
    )
    caption = f"Tokens, all candidates → kept rows, {_trace_steps(list(shown.values()))}"
    table = Table(caption, ["Run", *STATS.values()], rows) if rows else None
    return Panel(
        "selection", "Pool against kept rows", lead, found, table, notes=_no_traces(comparison, "a histogram")
    )


def budget(comparison: Comparison) -> Panel:
    """How many candidates prompts got, and which prompts."""
    traces = {i: table for i, table in enumerate(comparison.common_traces()) if not table.empty}
    lead = (
        "First chart: how many candidates prompts got. Second: who got them, by how much the lengths of a prompt's "
        "earlier answers differed, five bins of equally many prompts. A budget that follows the spread rises to the "
        "right. Prompts that were not seen before (“new”) are unknown and get the mean."
    )
    title = "Budget, and who got it"
    notes = _no_traces(comparison, "a budget")
    if not traces:
        return Panel("budget", title, lead, [], notes=notes)
    shares = {i: panels.budget_shares(table) for i, table in traces.items()}
    spreads = {i: panels.budget_by_spread(table) for i, table in traces.items()}
    labels = {panels.FIRST_SEEN: "new", "1": "least", "2": "", "3": "middle", "4": "", "5": "most spread"}
    names = comparison.names
    alts = [
        "Share of prompts by number of candidates. "
        + " ".join(
            f"{names[i]}: {number(share.index.min())} to {number(share.index.max())}." for i, share in shares.items()
        ),
        "Mean number of candidates by spread of earlier lengths. "
        + " ".join(f"{names[i]}: {_bins(table)}." for i, table in spreads.items()),
    ]
    found = [
        charts.bars("% of prompts", alts[0], shares, "candidates"),
        charts.steps_by_bin(
            "Candidates per prompt, mean", alts[1], {i: table["candidates"] for i, table in spreads.items()}, labels
        ),
    ]
    rows = [[names[i], *(_bin_cell(table, name) for name in labels)] for i, table in spreads.items()]
    caption = f"Mean candidates per prompt (mean spread in tokens; prompts), {_trace_steps(list(traces.values()))}"
    header = ["Run", "New", "Least spread", "2", "3", "4", "Most spread"]
    if all(set(table.index) == {panels.FIRST_SEEN} for table in spreads.values()):
        notes.append("No prompt came back within these steps, so nobody's history can be told.")
    return Panel("budget", title, lead, found, Table(caption, header, rows), notes=notes)


def rewards(comparison: Comparison) -> Panel:
    """Reward against steps and against time."""
    curves = {i: timing.reward_curve(run) for i, run in enumerate(comparison.runs) if run.logged("reward")}
    notes = [
        f"{run.name}: {'no log' if run.log.empty else 'the log has no `reward`'}."
        for run in comparison.runs
        if not run.logged("reward")
    ]
    window = _window(list(curves.values()))
    names = comparison.names
    lead = (
        "The mean reward of the rows that are trained on. Time is the sum of `step_time`: without evaluation, "
        "checkpoints and the optimizer's update. A method that is faster per step is worth it only if its curve is "
        f"not lower at the same time. {_smoothing(window)}"
    )
    by_step = {i: curve["reward"] for i, curve in curves.items()}
    timed = {i: known for i, curve in curves.items() if len(known := curve.dropna())}
    unit, scale = time_unit(max((known["seconds"].max() for known in timed.values()), default=0.0))
    by_time = {i: pd.Series(known["reward"].to_numpy(), known["seconds"] / scale) for i, known in timed.items()}
    found = []
    if by_step:
        alt = _describe("Reward over steps", by_step, names)
        found.append(charts.lines("Reward", alt, by_step, window=window, from_zero=False))
    if by_time:
        alt = _describe(f"Reward over {unit} of training", by_time, names)
        found.append(
            charts.lines("Reward", alt, by_time, window=window, xlabel=f"{unit} of training steps", from_zero=False)
        )
    if missing := [names[i] for i in by_step if i not in by_time]:
        notes.append(f"{listing(missing)}: the log has no `step_time`, so there is no curve against time.")
    rows = [[names[i], *map(str, reward_ends(curve)), f"{curve.index[-1]:,}"] for i, curve in by_step.items()]
    table = Table(
        "Each run's own steps, mean ± std of log entries", ["Run", "First third", "Last third", "Steps"], rows
    )
    return Panel("reward", "Reward", lead, found, table if rows else None, notes=notes)


def _length_ratio(table: pd.DataFrame) -> pd.Series:
    pool = table[list(OUTCOMES)].sum(axis=1) / table["candidates"]
    return (table["kept"] / table["rows"] / pool).dropna()


def _window(tables: Sequence[pd.DataFrame]) -> int:
    """Over how many entries a line is smoothed: a tenth of the longest, at most 20."""
    return max(1, min(20, max(map(len, tables), default=1) // 10))


def _smoothing(window: int) -> str:
    return (
        f"Lines are means of up to {window} log entries or steps; behind them, faint, each one." if window > 1 else ""
    )


def _ends(values: pd.Series | None) -> tuple[float, float]:
    if values is None or values.dropna().empty:
        return float("nan"), float("nan")
    first, last = reward_ends(values)
    return first.mean, last.mean


def _describe(what: str, curves: Mapping[int, pd.Series], names: Sequence[str]) -> str:
    """A line chart in words: each run's first and last third."""
    parts = [
        f"{names[i]}: {number(a)} in the first third, {number(b)} in the last"
        for i, (a, b) in ((i, _ends(curve)) for i, curve in curves.items())
    ]
    return f"{what}. {'; '.join(parts)}."


def _trace_steps(tables: Sequence[pd.DataFrame]) -> str:
    ends = {int(step) for table in tables for step in (table["step"].min(), table["step"].max())}
    return str(Window(min(ends), max(ends))) if ends else "no steps"


def _bins(table: pd.DataFrame) -> str:
    return ", ".join(f"{name} {number(row)}" for name, row in table["candidates"].items())


def _bin_cell(table: pd.DataFrame, name: str) -> str:
    if name not in table.index:
        return "–"
    row = table.loc[name]
    spread = "" if pd.isna(row["spread"]) else f"{number(row['spread'])}; "
    return f"{number(row['candidates'])} ({spread}{row['groups']:,.0f})"


def _no_traces(comparison: Comparison, what: str) -> list[str]:
    return [f"{run.name}: no traces, and {what} needs them." for run in comparison.runs if run.traces.empty]


def _no_lengths(stats: Sequence[pd.DataFrame], comparison: Comparison) -> list[str]:
    notes = []
    for run, table in zip(comparison.runs, stats, strict=True):
        if table.empty:
            notes.append(
                f"{run.name}: neither traces nor `darts/pool/*` in the log, so nothing is known of its lengths."
            )
        elif run.traces.empty:
            notes.append(
                f"{run.name}: from the log (no traces). Quantiles are means over the rollouts of a log entry."
            )
    return notes
