"""The page's panels of time and tokens: occupancy, time split, tokens generated and kept."""

from __future__ import annotations

import pandas as pd

from ..errors import ConfigurationError
from . import charts, panels, timing
from .compare import Comparison, typical_step
from .formats import number, percent
from .outcomes import OUTCOMES
from .runs import Run
from .sections import Panel, Table
from .summary import weighted_mean


def check_step(comparison: Comparison, step: int | None) -> int | None:
    """
    The step whose occupancy is shown.

    Args:
        comparison ([`Comparison`]):
            Runs.
        step (`int`, *optional*):
            What was asked for. Defaults to a typical one.

    Returns:
        `int`, *optional*: The step. `None` where no run has traces, or they have no step in common.

    Raises:
        [`ConfigurationError`]: If no run has a trace of the step that was asked for.
    """
    if step is None:
        return typical_step(comparison.runs, comparison.rollouts)
    steps = [run.traces["step"] for run in comparison.runs if not run.traces.empty]
    if not any(step in known.to_numpy() for known in steps):
        there = f"{min(s.min() for s in steps)} to {max(s.max() for s in steps)}" if steps else "of no step"
        raise ConfigurationError(
            f"`step` ({step}) must be a step with a trace, and traces are there {there}. Steps count from 1: the file "
            "rollout_00000_00.parquet is step 1."
        )
    return step


def timeline(comparison: Comparison, step: int | None) -> Panel:
    """How many candidates ran during one step's rollout."""
    rolls = {i: rollout for i, run in enumerate(comparison.runs) if len(rollout := _first_rollout(run, step))}
    running = {i: panels.occupancy(rollout) for i, rollout in rolls.items()}
    seconds = max((table.index[-1] for table in running.values()), default=1.0)
    peak = max((int(table["running"].max()) for table in running.values()), default=1)
    found, rows = [], []
    for i, table in running.items():
        name, idle = comparison.names[i], panels.bubble(rolls[i])
        counts = rolls[i]["outcome"].value_counts().reindex(OUTCOMES, fill_value=0)
        alt = (
            f"Candidates that ran over time in step {step}, {name}: {table['running'].max()} at most, over after "
            f"{number(table.index[-1])} seconds, {percent(idle)} of the slots idle."
        )
        title = f"{name}: running candidates, bubble {percent(idle)}"
        found.append(charts.timeline(title, alt, i, table, seconds, peak))
        rows.append([name, number(table.index[-1]), percent(idle), str(table["running"].max()), *map(str, counts)])
    lead = (
        "Each candidate runs from its submission to its end. Hatched lightly: slots that stood idle because nothing "
        "was left to run, the bubble; a long thin tail is what a step waits for. Both axes are the same for all runs. "
        f"{_which(step)}"
    )
    header = ["Run", "Seconds", "Bubble", "Most at once", "Kept", "Unused", "Aborted"]
    table = Table(f"Step {step}", header, rows) if rows else None
    notes = [
        f"{run.name}: no trace of step {step}."
        if step and not run.traces.empty
        else f"{run.name}: no traces to draw from."
        for i, run in enumerate(comparison.runs)
        if i not in rolls
    ]
    return Panel(
        "occupancy", "One rollout from within", lead, found, table, ("kept", "unused", "aborted", "idle"), notes
    )


def _which(step: int | None) -> str:
    return f"This is step {step}; take another with `--step`." if step else ""


def _first_rollout(run: Run, step: int | None) -> pd.DataFrame:
    own = run.traces[run.traces["step"] == (step or 0)]
    return own[own["micro"] == own["micro"].min()]


def time_split(comparison: Comparison) -> Panel:
    """Generating, scoring, training, sending weights."""
    splits = dict(enumerate(comparison.in_log_window(comparison.splits)))
    known = {i: split.dropna(subset=["train"]) for i, split in splits.items()}
    known = {i: split for i, split in known.items() if len(split)}
    means = pd.DataFrame(
        [{phase: weighted_mean(split, phase) for phase in timing.PHASES} for split in known.values()],
        index=list(known),
    )
    names, found = comparison.names, []
    if known:
        alt = "Mean seconds per step. " + " ".join(f"{names[i]}: {_parts(means.loc[i])}." for i in known)
        found.append(charts.stacks("Mean seconds per step", alt, means, names, "seconds"))
        merged = {i: timing.merge_entries(split) for i, split in known.items()}
        top = max(float(split[list(timing.PHASES)].sum(axis=1).quantile(0.98)) for split in merged.values())
        for i, split in merged.items():
            alt = f"Seconds per step over training, stacked by phase, {names[i]}: {_parts(means.loc[i])} in the mean."
            found.append(charts.phases_over_steps(f"{names[i]}: seconds per step", alt, i, split, top))
    rows = [
        [names[i], *(_seconds(row[p], row.sum()) for p in timing.PHASES), number(row.sum())]
        for i, row in means.iterrows()
    ]
    lead = (
        "Where a step's time (`step_time`) goes. Generate: rollouts. Score: rewards, log-probs of the old and the "
        "reference policy. Train: what is left, forward and backward. Sync: weights to the servers. Charts over "
        "steps end at the 98th percentile, and merge steps where there are more than 100."
    )
    caption = f"Seconds per step and share, mean over {comparison.log_window}"
    header = ["Run", *(phase.capitalize() for phase in timing.PHASES), "Step"]
    table = Table(caption, header, rows) if rows else None
    notes = [_no_time(run, len(splits[i]), len(known.get(i, ()))) for i, run in enumerate(comparison.runs)]
    return Panel("time", "Where the time goes", lead, found, table, timing.PHASES, [note for note in notes if note])


def _no_time(run: Run, num_entries: int, num_known: int) -> str:
    """Why some of a run's time, or all of it, is not shown."""
    need = ("step_time", "darts/rollout/seconds", "darts/score/seconds")
    if run.log.empty:
        return f"{run.name}: no log."
    if absent := [metric for metric in need if not run.logged(metric)]:
        return f"{run.name}: the log lacks {', '.join(f'`{metric}`' for metric in absent)}."
    left = num_entries - num_known
    return f"{run.name}: {left} of {num_entries} log entries are left out: parts are missing." if left else ""


def tokens(comparison: Comparison) -> Panel:
    """Generated, kept and aborted tokens."""
    tables = {i: table for i, table in enumerate(comparison.in_rollout_window(comparison.rollouts)) if len(table)}
    names, parts = comparison.names, list(OUTCOMES)
    per_rollout = pd.DataFrame(
        [table[parts].sum() / table["num_rollouts"].sum() for table in tables.values()],
        index=list(tables),
        columns=parts,
    )
    found, rows = [], []
    if tables:
        alt = "Tokens per rollout. " + " ".join(f"{names[i]}: {_parts(per_rollout.loc[i])}." for i in tables)
        found.append(charts.stacks("Tokens per rollout, mean", alt, per_rollout, names, "tokens"))
        generated = {i: table[parts].sum(axis=1).cumsum() for i, table in tables.items()}
        kept = {i: table["kept"].cumsum() for i, table in tables.items()}
        ends = " ".join(
            f"{names[i]}: {number(series.iloc[-1])}, {number(kept[i].iloc[-1])} kept."
            for i, series in generated.items()
        )
        alt = f"Tokens generated since the first common step, over steps. {ends}"
        found.append(charts.lines("Tokens so far (dotted: kept)", alt, generated, dashed=kept))
    for i, table in tables.items():
        sums = table[parts].sum()
        rows.append([names[i], number(sums.sum()), *(f"{number(n)} ({percent(n / sums.sum())})" for n in sums)])
    lead = (
        "Kept: tokens that are trained on. Unused: of candidates that came to their end and were not kept. Aborted: "
        "of candidates that were called off. The last two are what over-provisioning costs."
    )
    header = ["Run", "Generated", "Kept", "Unused", "Aborted"]
    table = Table(f"Tokens in all, rollouts of {comparison.rollout_window}", header, rows) if rows else None
    notes = [
        f"{run.name}: nothing is known of its rollouts." for i, run in enumerate(comparison.runs) if i not in tables
    ]
    return Panel("tokens", "Tokens generated and kept", lead, found, table, OUTCOMES, notes)


def _parts(row: pd.Series) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in row.items())


def _seconds(part: float, whole: float) -> str:
    return f"{number(part)} ({percent(part / whole)})" if whole else number(part)
