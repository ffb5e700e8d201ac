"""
In short: what a step of one run saved over the first run's, and by what; and whether a machine was busy.

Training and scoring take longer the wider their micro-batches are: with `trim_padding` as wide as their own longest
row, else as wide as the longest of the whole batch. How much longer, the steps of both runs tell, each compared with
its own run's: a machine that is slower in one run, or other work on it, does not pass for shorter rows.

Invariant: the parts sum to what was saved.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..simulation import Estimate
from .comparison import Setting, Window, in_common
from .estimates import MIN_ENTRIES, fit_linear, number, percent, plus_minus
from .runs import Run
from .tables import time_split


WIDTH = "darts/train/completion_width"  # tokens computed per row, padding included
LONGEST_ROW = "completions/max_length"  # the width of TRL's own trainer
NOTABLE = 0.1  # of a step: a rest beyond needs another reason than the schedule
BUSY = 1.5  # times as long as rows of the same length take
BUSY_SHARE = 0.1  # of the log entries
MIN_BUSY = 3  # log entries


@dataclass(frozen=True)
class Saving:
    """Seconds that a step of `other` took less than one of `first`, and in what. NaN where the logs don't tell."""

    first: Run
    other: Run
    over: Window
    entries: int  # of the log, of the run that has fewer
    seconds: list[float]  # of a step of each run
    widths: list[float]  # of a row as it is computed, in tokens
    step: Estimate
    rollouts: Estimate
    shorter_rows: Estimate
    rest: Estimate


def saving(first: Run, other: Run) -> Saving | None:
    """Over the steps of both runs but the first step, which warms up. `None` where they have no times in common."""
    tables, window = in_common([_work(first), _work(other)])
    tables = [table[table.index > 1] if (table.index > 1).any() else table for table in tables]
    if window is None or not all(map(len, tables)):
        return None
    both = pd.concat(tables)
    is_other = np.repeat([0.0, 1.0], [len(table) for table in tables])
    runs = pd.DataFrame({"base": 1.0, "other": is_other, "width": both["width"].to_numpy()})
    widths, seconds = ([_mean(table, name) for table in tables] for name in ("width", "total"))
    (step,), (rollouts,), (shorter,) = (
        fit_linear(runs[["base", "other"]], both[name], both["num_steps"], [[0, -1]])
        for name in ("total", "generate", "width")
    )
    slope, rest = fit_linear(runs, both["total"] - both["generate"], both["num_steps"], [[0, 0, 1], [0, -1, 0]])
    # Of a product of two estimates. No difference in lengths explains nothing, whatever a token costs.
    error = math.hypot(slope.mean * shorter.half_width, shorter.mean * slope.half_width)
    shorter_rows = Estimate(slope.mean * shorter.mean, error) if widths[0] != widths[1] else Estimate(0.0, 0.0)
    over = Window(max(window.first, int(both.index.min())), window.last)
    entries = min(map(len, tables))
    return Saving(first, other, over, entries, seconds, widths, step, rollouts, shorter_rows, rest)


def _mean(table: pd.DataFrame, column: str) -> float:
    return float(np.average(table[column], weights=table["num_steps"]))


def _work(run: Run) -> pd.DataFrame:
    width = run.log.get(WIDTH, run.log.get(LONGEST_ROW, pd.Series(np.nan, run.log.index)))
    return time_split(run)[["total", "generate", "num_steps"]].assign(width=width).dropna()


def in_short(runs: Sequence[Run], settings: Sequence[Setting]) -> list[list[str]]:
    """For each run but the first a verdict, and the parts of what it saved."""
    matters = [setting.name for setting in settings if setting.matters]
    found = [saving(runs[0], run) for run in runs[1:]]
    return [describe(saved, matters) for saved in found if saved is not None]


def describe(saved: Saving, matters: Sequence[str] = ()) -> list[str]:
    """The verdict, then a line for each part. `matters`: settings because of which the runs did different work."""
    if saved.entries < MIN_ENTRIES:
        return [
            f"{saved.other.name} and {saved.first.name}: too few steps to compare. Without step 1, which warms up, "
            f"their logs have {saved.entries} in common; at least {MIN_ENTRIES} are needed."
        ]
    total, (before, after) = saved.step, saved.seconds
    parts = {"in rollouts": saved.rollouts, "by shorter rows": saved.shorter_rows, "in the rest": saved.rest}
    over = f"{saved.over}{'; step 1 warms up' if saved.over.first == 2 else ''}"
    took = f"{saved.other.name} took {number(after)} s a step, {saved.first.name} {number(before)} s ({over})"
    if abs(total.mean) <= total.half_width:
        verdict = f"{took}: no difference beyond the noise, {plus_minus(total, ' s')}."
    else:
        most = [name for name, part in parts.items() if part.mean / total.mean > 0.5]
        more = "saved" if total.mean > 0 else "lost"
        mostly = f", most of it {most[0]}" if most else ""
        size = plus_minus(Estimate(abs(total.mean), total.half_width), " s")
        verdict = f"{took}: {more} {size} ({percent(abs(total.mean) / before)}){mostly}."
    rollouts = f"Saved in rollouts: {plus_minus(saved.rollouts, ' s')}."
    if not math.isfinite(saved.rest.mean):
        unknown = "Rows had the same length in all steps: what shorter ones saved and the rest can't be told apart."
        return [verdict, rollouts, unknown]
    lengths = f"the mean row was computed with {saved.widths[1]:,.0f} tokens, not {saved.widths[0]:,.0f}"
    shorter_rows = plus_minus(saved.shorter_rows, " s")
    return [
        verdict,
        rollouts,
        f"Saved by shorter rows (training and scoring fewer tokens): {shorter_rows}; {lengths}.",
        f"Saved in the rest (rows of the same length, and sending weights): {plus_minus(saved.rest, ' s')}."
        + _reason(saved, matters),
    ]


def _reason(saved: Saving, matters: Sequence[str]) -> str:
    if abs(saved.rest.mean) <= max(saved.rest.half_width, NOTABLE * saved.seconds[0]):
        return ""
    slower = saved.other if saved.rest.mean < 0 else saved.first
    what = ", ".join(matters) or "streaming"
    return f" Unless {what} explains that, the machine of {slower.name} was busy with other work, or is another one."


def busy(run: Run) -> str | None:
    """Says in which steps other work ran on the machine: training took longer than on other rows of such lengths."""
    table = _work(run)
    table = table[table.index > 1]
    if len(table) < MIN_BUSY:
        return None
    seconds = table["total"] - table["generate"]
    slow = table.index[seconds > BUSY * _usual(table["width"], seconds)]
    if len(slow) < max(MIN_BUSY, BUSY_SHARE * len(table)):
        return None
    return (
        f"{run.name}: training and scoring took more than {BUSY:g} times as long as usual for rows of their length in "
        f"{len(slow)} of {len(table)} log entries (steps {slow[0]} to {slow[-1]}). Other work ran on the machine then."
    )


def _usual(lengths: pd.Series, seconds: pd.Series) -> pd.Series:
    """A line through most of the points, which up to half of them can't move."""
    if lengths.nunique() < 2:
        return pd.Series(seconds.median(), seconds.index)
    from scipy.stats import siegelslopes  # takes most of a second to import

    slope, base = siegelslopes(seconds.to_numpy(), lengths.to_numpy())
    return (base + slope * lengths).clip(lower=float(seconds.min()))
