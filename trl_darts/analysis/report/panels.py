"""The page's panels: what each shows, its charts, its table, and what can't be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from ...errors import ConfigurationError
from ...policy import LatencyCurve
from ..simulation import Estimate
from . import charts, tables
from .comparison import common_traces, in_common, typical_step
from .estimates import number, percent, plus_minus, ratio_of_sums
from .runs import OUTCOMES, Run


BINS = {tables.FIRST_SEEN: "new", "1": "least", "2": "", "3": "middle", "4": "", "5": "most spread"}
FAULTS = {
    "resumed": "Candidates resumed on another server or later",
    "dropped": "Prompts dropped",
    "timeouts": "Reward calls stopped at their deadline",
}


@dataclass(frozen=True)
class Table:
    """Numbers below a panel's charts. The first column names the row."""

    caption: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Panel:
    """
    One part of the page. `key` is its anchor and the end of its picture's name, `lead` says how to read it, `looks`
    are fillings that need a legend, `notes` say what can't be told.
    """

    key: str
    title: str
    lead: str
    charts: Sequence[charts.Draw] = ()
    table: Table | None = None
    looks: tuple[str, ...] = ()
    notes: Sequence[str] = ()


def reward(runs: Sequence[Run]) -> Panel:
    """Reward against steps and against time."""
    curves = {i: tables.reward_curve(run) for i, run in enumerate(runs) if run.logged("reward")}
    timed = {i: known for i, curve in curves.items() if len(known := curve.dropna())}
    longest = max((known["seconds"].max() for known in timed.values()), default=0.0)
    unit, scale = ("minutes", 60) if longest > 600 else ("seconds", 1)
    by_step = {i: curve["reward"] for i, curve in curves.items()}
    by_time = {i: known.set_index(known["seconds"] / scale)["reward"] for i, known in timed.items()}
    evaluated = {i: curve for i, run in enumerate(runs) if len(curve := tables.evaluation_curve(run))}
    evaluated = {i: curve.set_axis(curve.index / scale) for i, curve in evaluated.items()}
    found = []
    if by_step:
        found.append(partial(charts.lines, title="Reward of the rows", curves=by_step, from_zero=False))
    xlabel = f"{unit} of training steps"
    for title, own in (("Reward of the rows", by_time), ("Evaluation reward", evaluated)):
        if own:
            found.append(partial(charts.lines, title=title, curves=own, xlabel=xlabel, from_zero=False))
    notes = [f"{run.name}: the log has no `reward`." for i, run in enumerate(runs) if i not in curves]
    notes += [f"{runs[i].name}: no curve against time, the log has no `step_time`." for i in curves if i not in timed]
    smooth = charts.smoothing(by_step)
    return Panel(
        "reward",
        "Reward",
        "Mean reward of the rows trained on, against steps and against time. Where a schedule chose rows by their "
        "lengths, their reward does not compare between runs; evaluation reward against time does, within its noise"
        + (". " if evaluated else ", and no log has `eval_reward`: train with `eval_strategy`. ")
        + "Time is the sum of `step_time`: evaluation, checkpoints and the optimizer's update are not in it."
        + (f" Strong lines are means of up to {smooth} log entries, faint ones the entries." if smooth > 1 else ""),
        found,
        notes=notes,
    )


def time(runs: Sequence[Run]) -> Panel:
    """Generating, scoring, training, sending weights."""
    splits, window = in_common([tables.time_split(run) for run in runs])
    known = {i: split.dropna(subset=["train"]) for i, split in enumerate(splits)}
    phases = {i: [_mean(split, phase) for phase in tables.PHASES] for i, split in known.items() if len(split)}
    means = pd.DataFrame(
        {i: [part.mean for part in parts] for i, parts in phases.items()}, index=list(tables.PHASES)
    ).T
    names = [run.name for run in runs]
    waits = _idle({i: known[i] for i in phases})
    found = [partial(charts.stacks, title="Seconds per step", table=means, names=names, xlabel="seconds")]
    found += [
        partial(charts.stacks, title=f"{who}, seconds per step", table=table, names=names, xlabel="seconds")
        for who, table in waits.items()
    ]
    rows = [
        [
            names[i],
            *(_part_of_step(part, known[i]) for part in parts),
            plus_minus(_mean(known[i], "total")),
            *(percent(table.loc[i, "idle"] / table.loc[i].sum()) for table in waits.values()),
        ]
        for i, parts in phases.items()
    ]
    header = ["Run", *(phase.capitalize() for phase in tables.PHASES), "Step", *(f"{who} idle" for who in waits)]
    notes = []
    for i, run in enumerate(runs):
        needed = ("step_time", "darts/rollout/seconds", "darts/score/seconds")
        if missing := [f"`{name}`" for name in needed if not run.logged(name)]:
            notes.append(f"{run.name}: the log lacks {', '.join(missing)}.")
        elif left := len(splits[i]) - len(known[i]):
            notes.append(f"{run.name}: {left} of {len(splits[i])} log entries are left out: parts are missing.")
    return Panel(
        "time",
        "Where the time goes",
        "Where a step's time (`step_time`) goes. Generate: rollouts. Score: rewards, log-probs of the old and the "
        "reference policy. Sync: weights to the servers. Train: what is left, forward and backward. The trainer is "
        "idle while it waits for a rollout, the engines while none is under way; `rollout_ahead=1` overlaps the two.",
        found if len(means) else [],
        Table(f"Seconds per step and share, mean over {window}, ± 95 % intervals", header, rows) if rows else None,
        (*tables.PHASES, "busy", "idle"),
        notes,
    )


def _idle(splits: Mapping[int, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """For the trainer and the engines, the seconds per step of each run in which they are busy and idle."""
    found = {}
    for who, waits in {"Trainer": lambda s: s["generate"], "Engines": lambda s: s["total"] - s["decode"]}.items():
        rows = {}
        for i, split in splits.items():
            total, idle = _mean(split, "total").mean, _mean(split.assign(idle=waits(split)), "idle").mean
            rows[i] = {"busy": total - idle, "idle": idle}
        found[who] = pd.DataFrame.from_dict(rows, orient="index", columns=["busy", "idle"])
    return found


def _mean(split: pd.DataFrame, phase: str) -> Estimate:
    return ratio_of_sums([split[phase] * split["num_steps"]], [split["num_steps"]])


def _part_of_step(part: Estimate, split: pd.DataFrame) -> str:
    return f"{plus_minus(part)} ({percent(part.mean / _mean(split, 'total').mean)})"


def occupancy(runs: Sequence[Run], step: int | None) -> Panel:
    """How many candidates ran during one step's first rollout."""
    step = _check_step(runs, step)
    rolls = {i: run.traces[run.traces["step"] == (step or 0)] for i, run in enumerate(runs)}
    rolls = {i: own[own["micro"] == own["micro"].min()] for i, own in rolls.items() if len(own)}
    running = {i: tables.occupancy(rollout) for i, rollout in rolls.items()}
    seconds = max((table.index[-1] for table in running.values()), default=1.0)
    peak = max((int(table["running"].max()) for table in running.values()), default=1)
    found = []
    for i, table in running.items():
        title = f"{runs[i].name}: running candidates, bubble {percent(tables.bubble(rolls[i]))}"
        found.append(partial(charts.timeline, title=title, run=i, running=table, seconds=seconds, peak=peak))
    return Panel(
        "occupancy",
        "One rollout from within",
        "Each candidate runs from its submission to its end. Kept: it is trained on. Unused: it was complete and not "
        "kept. Aborted: it was called off. White below the dashed line: slots that stood idle, the bubble. "
        f"{f'This is step {step}; take another with `--step`.' if step else ''}",
        found,
        looks=OUTCOMES,
        notes=[f"{run.name}: no trace of this step." for i, run in enumerate(runs) if i not in rolls],
    )


def _check_step(runs: Sequence[Run], step: int | None) -> int | None:
    if step is None:
        return typical_step(runs)
    steps = [run.traces["step"] for run in runs if not run.traces.empty]
    if not any(step in known.to_numpy() for known in steps):
        there = f"{min(s.min() for s in steps)} to {max(s.max() for s in steps)}" if steps else "of no step"
        raise ConfigurationError(
            f"`--step` ({step}) must be a step with a trace, and traces are there {there}. Steps count from 1: the "
            "file rollout_00000_00.parquet is step 1."
        )
    return step


def lengths(runs: Sequence[Run]) -> Panel:
    """Lengths of the pool and of the kept rows: distributions, and over training."""
    traces, window = common_traces(runs)
    shown = {i: table for i, table in enumerate(traces) if len(table)}
    rows = []
    for i, table in shown.items():
        parts = (tables.ended(table)["length"], table["length"][table["selected"]])
        ends = [(p.mean(), p.median(), p.quantile(0.99), p.max()) for p in parts]
        rows.append([runs[i].name, *(f"{number(a)} → {number(b)}" for a, b in zip(*ends, strict=True))])
    header = ["Run", "Mean", "Median", "p99", "Longest"]
    no_traces = [run for run in runs if run.traces.empty]
    return Panel(
        "lengths",
        "Lengths of the pool and of the kept rows",
        "Distributions: the area is all candidates, the line the rows that are trained on. Aborted candidates count "
        "with the tokens they had, so with early stops the pool's tail is longer than it looks. The longest is what a "
        "rollout waits for.",
        [*_distributions(runs, shown), *_lengths_over_training(runs)],
        Table(f"Tokens, all candidates → kept rows, {window}", header, rows) if rows else None,
        notes=[f"{run.name}: no traces, so no distribution; curves are from the log." for run in no_traces],
    )


def _distributions(runs: Sequence[Run], traces: Mapping[int, pd.DataFrame]) -> list[charts.Draw]:
    edges = tables.length_edges(max((int(table["length"].max()) for table in traces.values()), default=1))
    shares = {i: tables.length_shares(table, edges) for i, table in traces.items()}
    top = max((float(share.max().max()) for share in shares.values()), default=1.0)
    return [
        partial(charts.distribution, title=f"{runs[i].name}: % of candidates", run=i, shares=own, edges=edges, top=top)
        for i, own in shares.items()
    ]


def _lengths_over_training(runs: Sequence[Run]) -> list[charts.Draw]:
    pool = [tables.length_stats(run) for run in runs]
    kept = [tables.length_stats(run, kept=True) for run in runs]
    found: list[charts.Draw] = []
    for stat, title in {"mean": "Mean", "p99": "p99", "max": "Longest"}.items():
        curves, dotted = ({i: t[stat] for i, t in enumerate(part) if stat in t} for part in (pool, kept))
        if curves:
            title = f"{title}, tokens (dotted: kept rows)"
            found.append(partial(charts.lines, title=title, curves=curves, dotted=dotted))
    return found


def budget(runs: Sequence[Run]) -> Panel:
    """How many candidates prompts got, and which prompts."""
    traces, window = common_traces(runs)
    shares = {i: tables.budget_shares(table) for i, table in enumerate(traces) if len(table)}
    spreads = {i: tables.budget_by_spread(traces[i])["candidates"] for i in shares}
    found = [
        partial(charts.bars, title="% of prompts", shares=shares, xlabel="candidates"),
        partial(charts.bins, title="Candidates per prompt, mean", tables=spreads, labels=BINS),
    ]
    notes = [f"{run.name}: no traces, and budgets need them." for i, run in enumerate(runs) if i not in shares]
    if spreads and all(set(table.index) == {tables.FIRST_SEEN} for table in spreads.values()):
        notes.append("No prompt came back within these steps, so there is no history to compare with.")
    return Panel(
        "budget",
        "Budget",
        "Left: how many candidates prompts got. Right: who got them, by how much the lengths of a prompt's earlier "
        "answers differed, in five bins of equally many prompts. “New” prompts have no history."
        f"{f' Over {window}.' if window else ''}",
        found if shares else [],
        notes=notes,
    )


def faults(runs: Sequence[Run]) -> Panel:
    """What went wrong and was survived."""
    counted = [tables.faults(run) for run in runs]
    rows = [
        [label, *(_fault_cell(table[name]) if name in table else "–" for table in counted)]
        for name, label in FAULTS.items()
        if any(name in table for table in counted)
    ]
    return Panel(
        "faults",
        "Faults",
        "Lost or full servers and late rewards that the run survived, and in which steps. A dropped prompt's rows "
        "repeat another's, without weight. A server that was lost while nothing ran on it leaves no sign here.",
        table=Table("Over each run's own steps", ["Fault", *(run.name for run in runs)], rows) if rows else None,
        notes=[f"{run.name}: the log counts none." for run, table in zip(runs, counted, strict=True) if table.empty],
    )


def _fault_cell(counts: pd.Series) -> str:
    steps = counts.index[counts > 0]
    return f"{number(counts.sum())} (steps {steps[0]} to {steps[-1]})" if len(steps) else "0"


def prediction(runs: Sequence[Run], curve: LatencyCurve | None) -> Panel:
    """The cost model's seconds against those that rollouts took."""
    key, title = "prediction", "Predicted against real time"
    lead = (
        "Each point is a rollout: what the latency curve makes of the lengths in its trace (DARTS, Eq. 4), against "
        "the seconds it took. Above the line it took longer. The model starts all candidates at once, on one engine: "
        "queues, prefill and requests are not in it."
    )
    if curve is None:
        note = "No latency curve was given. `trl-darts profile` measures one; then add `--latency-curve FILE`."
        return Panel(key, title, lead, notes=[note])
    predicted = {i: tables.predicted_times(run.traces, curve) for i, run in enumerate(runs) if not run.traces.empty}
    ratios = {i: table["predicted"] / table["real"] for i, table in predicted.items()}
    rows = [
        [runs[i].name, str(len(ratio)), number(ratio.median()), percent((ratio - 1).abs().median())]
        for i, ratio in ratios.items()
    ]
    caption = f"All rollouts of each run; curve of {curve.metadata.get('model', 'a model it does not tell')}"
    header = ["Run", "Rollouts", "Predicted / real, median", "Off by, median"]
    notes = [f"{run.name}: no traces, and a prediction needs lengths." for run in runs if run.traces.empty]
    found = [partial(charts.scatter, points=predicted, x="predicted", y="real")] if rows else []
    return Panel(key, title, lead, found, Table(caption, header, rows) if rows else None, notes=notes)
