"""
The page's panels: what each shows, its charts, its table, and what can't be told.

Charts are drawn on white, for light and dark pages. A run keeps its colour and its dashes in all of them; the outcomes
of tokens and time differ in opacity and hatching.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd

from ...errors import ConfigurationError
from ...policy import LatencyCurve
from ..simulation import Estimate
from . import tables
from .estimates import number, percent, plus_minus, ratio_of_sums
from .runs import OUTCOMES, Run
from .tables import common_traces, in_common


Draw = Callable[[Any], None]  # on matplotlib's axes

# Okabe and Ito's colours, darkened until lines on white have a contrast of 4.5.
COLORS = ("#0067a5", "#c24a00", "#007a58", "#a8326f", "#6b5b00", "#555555")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (10, 3)), (0, (1, 1)))
MARKERS = "o^sDvP"
MUTED = "#57606a"
STRONG, FAINT = (0.9, ""), (0.45, "")  # opacity and hatching
LOOKS = {"kept": STRONG, "unused": FAINT, "aborted": (0.18, "////"), "busy": STRONG, "idle": (0.0, "....")}
LOOKS |= {"generate": STRONG, "score": FAINT, "train": (0.18, "////"), "sync": (0.25, "xxxx")}
WIDTH, HEIGHT = 14.7, 3.1  # of a row of charts, in inches: text has one size in all figures
_RC: dict[Any, Any] = {
    **{"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "hatch.linewidth": 0.6},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.edgecolor": MUTED},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": "#d5dae0", "grid.linewidth": 0.6},
}
BINS = {tables.FIRST_SEEN: "new", "1": "least", "2": "", "3": "middle", "4": "", "5": "most spread"}
FAULTS = {
    "resumed": "Candidates resumed on another server or later",
    "dropped": "Prompts dropped",
    "timeouts": "Reward calls stopped at their deadline",
}


@dataclass(frozen=True)
class Panel:
    """One part of the page."""

    key: str  # its anchor, and the end of its picture's name
    title: str
    lead: str  # how to read it
    charts: Sequence[Draw] = ()
    caption: str = ""  # of the table
    rows: Sequence[Sequence[str]] = ()  # the table's: first the header, and each row begins with its name
    looks: Sequence[str] = ()  # fillings that need a legend
    notes: Sequence[str] = ()  # what can't be told


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
    title, xlabel = "Reward of the rows", f"{unit} of training steps"
    kinds = [(title, by_step, "step"), (title, by_time, xlabel), ("Evaluation reward", evaluated, xlabel)]
    charts = [partial(lines, title=t, curves=own, xlabel=x, from_zero=False) for t, own, x in kinds if own]
    notes = [f"{run.name}: the log has no `reward`." for i, run in enumerate(runs) if i not in curves]
    notes += [f"{runs[i].name}: no curve against time, the log has no `step_time`." for i in curves if i not in timed]
    smooth = smoothing(by_step)
    return Panel(
        "reward",
        "Reward",
        "Mean reward of the rows trained on, against steps and against time. Where a schedule chose rows by their "
        "lengths, their reward does not compare between runs; evaluation reward against time does, within its noise"
        + (". " if evaluated else ", and no log has `eval_reward`: train with `eval_strategy`. ")
        + "Time is the sum of `step_time`: evaluation, checkpoints and the optimizer's update are not in it."
        + (f" Strong lines are means of up to {smooth} log entries, faint ones the entries." if smooth > 1 else ""),
        charts,
        notes=notes,
    )


def time(runs: Sequence[Run]) -> Panel:
    """Generating, scoring, training, sending weights."""
    splits, window = in_common([tables.time_split(run) for run in runs])
    known = {i: own for i, split in enumerate(splits) if len(own := split.dropna(subset=["train"]))}
    phases = pd.DataFrame({i: _means(split, tables.PHASES) for i, split in known.items()}, index=tables.PHASES).T
    waits = {
        "Trainer": _busy_and_idle(known, lambda split: split["generate"]),
        "Engines": _busy_and_idle(known, lambda split: split["total"] - split["decode"]),
    }
    names = [run.name for run in runs]
    shown = {"Seconds per step": phases} | {f"{who}, seconds per step": table for who, table in waits.items()}
    charts = [
        partial(stacks, title=title, table=table.map(lambda part: part.mean), names=names, xlabel="seconds")
        for title, table in shown.items()
        if known
    ]
    header = ["Run", *map(str.capitalize, tables.PHASES), "Step", *(f"{who} idle" for who in waits)]
    rows = []
    for i, split in known.items():
        (step,) = _means(split, ["total"])
        parts = [f"{plus_minus(part)} ({percent(part.mean / step.mean)})" for part in phases.loc[i]]
        idle = [percent(table.loc[i, "idle"].mean / step.mean) for table in waits.values()]
        rows.append([names[i], *parts, plus_minus(step), *idle])
    notes = []
    for i, run in enumerate(runs):
        needed = ("step_time", "darts/rollout/seconds", "darts/score/seconds")
        if missing := [f"`{name}`" for name in needed if not run.logged(name)]:
            notes.append(f"{run.name}: the log lacks {', '.join(missing)}.")
        elif left := len(splits[i]) - len(known.get(i, ())):
            notes.append(f"{run.name}: {left} of {len(splits[i])} log entries are left out: parts are missing.")
    return Panel(
        "time",
        "Where the time goes",
        "Where a step's time (`step_time`) goes. Generate: rollouts. Score: rewards, log-probs of the old and the "
        "reference policy. Sync: weights to the servers. Train: what is left, forward and backward. The trainer is "
        "idle while it waits for a rollout, the engines while none is under way; `rollout_ahead=1` overlaps the two.",
        charts,
        f"Seconds per step and share, mean over {window}, ± 95 % intervals",
        [header, *rows] if rows else (),
        (*tables.PHASES, "busy", "idle"),
        notes,
    )


def _means(split: pd.DataFrame, names: Sequence[str]) -> list[Estimate]:
    """Of columns of a time split, over the steps."""
    return [ratio_of_sums([split[name] * split["num_steps"]], [split["num_steps"]]) for name in names]


def _busy_and_idle(splits: Mapping[int, pd.DataFrame], idle: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
    """Seconds per step of each run."""
    parts = {}
    for i, split in splits.items():
        parts[i] = _means(split.assign(idle=idle(split), busy=split["total"] - idle(split)), ["busy", "idle"])
    return pd.DataFrame(parts, index=["busy", "idle"]).T


def occupancy(runs: Sequence[Run], step: int | None) -> Panel:
    """How many candidates ran during one step's first rollout."""
    step = _check_step(runs, step)
    rolls = {i: run.traces[run.traces["step"] == (step or 0)] for i, run in enumerate(runs)}
    rolls = {i: own[own["micro"] == own["micro"].min()] for i, own in rolls.items() if len(own)}
    running = {i: tables.occupancy(rollout) for i, rollout in rolls.items()}
    seconds = max((table.index[-1] for table in running.values()), default=1.0)
    peak = max((int(table["running"].max()) for table in running.values()), default=1)
    charts = []
    for i, table in running.items():
        title = f"{runs[i].name}: running candidates, bubble {percent(tables.bubble(rolls[i]))}"
        charts.append(partial(timeline, title=title, run=i, running=table, seconds=seconds, peak=peak))
    return Panel(
        "occupancy",
        "One rollout from within",
        "Each candidate runs from its submission to its end. Kept: it is trained on. Unused: it was complete and not "
        "kept. Aborted: it was called off. White below the dashed line: slots that stood idle, the bubble. "
        f"{f'This is step {step}; take another with `--step`.' if step else ''}",
        charts,
        looks=OUTCOMES,
        notes=[f"{run.name}: no trace of this step." for i, run in enumerate(runs) if i not in rolls],
    )


def _check_step(runs: Sequence[Run], step: int | None) -> int | None:
    if step is None:
        return tables.typical_step(runs)
    steps = pd.concat([run.traces["step"] for run in runs])
    if not (steps == step).any():
        there = f"{steps.min()} to {steps.max()}" if len(steps) else "of no step"
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
        stats = [(p.mean(), p.median(), p.quantile(0.99), p.max()) for p in parts]
        rows.append([runs[i].name, *(f"{number(a)} → {number(b)}" for a, b in zip(*stats, strict=True))])
    return Panel(
        "lengths",
        "Lengths of the pool and of the kept rows",
        "Distributions: the area is all candidates, the line the rows that are trained on. Aborted candidates count "
        "with the tokens they had, so with early stops the pool's tail is longer than it looks. The longest is what a "
        "rollout waits for.",
        [*_distributions(runs, shown), *_lengths_over_training(runs)],
        f"Tokens, all candidates → kept rows, {window}",
        [["Run", "Mean", "Median", "p99", "Longest"], *rows] if rows else (),
        notes=[f"{run.name}: no traces, so no distribution; curves are from the log." for run in _untraced(runs)],
    )


def _untraced(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.traces.empty]


def _distributions(runs: Sequence[Run], traces: Mapping[int, pd.DataFrame]) -> list[Draw]:
    edges = tables.length_edges(max((int(table["length"].max()) for table in traces.values()), default=1))
    shares = {i: tables.length_shares(table, edges) for i, table in traces.items()}
    top = max((float(share.max().max()) for share in shares.values()), default=1.0)
    return [
        partial(distribution, title=f"{runs[i].name}: % of candidates", run=i, shares=own, edges=edges, top=top)
        for i, own in shares.items()
    ]


def _lengths_over_training(runs: Sequence[Run]) -> list[Draw]:
    pool = [tables.length_stats(run) for run in runs]
    kept = [tables.length_stats(run, kept=True) for run in runs]
    found: list[Draw] = []
    for stat, title in {"mean": "Mean", "p99": "p99", "max": "Longest"}.items():
        curves, dotted = ({i: t[stat] for i, t in enumerate(part) if stat in t} for part in (pool, kept))
        if curves:
            found.append(partial(lines, title=f"{title}, tokens (dotted: kept rows)", curves=curves, dotted=dotted))
    return found


def budget(runs: Sequence[Run]) -> Panel:
    """How many candidates prompts got, and which prompts."""
    traces, window = common_traces(runs)
    shares = {i: tables.budget_shares(table) for i, table in enumerate(traces) if len(table)}
    spreads = {i: tables.budget_by_spread(traces[i])["candidates"] for i in shares}
    charts = [
        partial(bars, title="% of prompts", shares=shares, xlabel="candidates"),
        partial(bins, title="Candidates per prompt, mean", means=spreads, labels=BINS),
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
        charts if shares else [],
        notes=notes,
    )


def faults(runs: Sequence[Run]) -> Panel:
    """Faults that the run survived."""
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
        caption="Over each run's own steps",
        rows=[["Fault", *(run.name for run in runs)], *rows] if rows else (),
        notes=[f"{run.name}: the log counts none." for run, table in zip(runs, counted, strict=True) if table.empty],
    )


def _fault_cell(counts: pd.Series) -> str:
    steps = counts.index[counts > 0]
    return f"{number(counts.sum())} (steps {steps[0]} to {steps[-1]})" if len(steps) else "0"


def prediction(runs: Sequence[Run], curve: LatencyCurve | None) -> Panel:
    """The cost model's seconds against those that rollouts took."""
    rows, predicted = [], {}
    for i, run in enumerate(runs):
        if curve is not None and not run.traces.empty:
            predicted[i] = tables.predicted_times(run.traces, curve)
            ratio = predicted[i]["predicted"] / predicted[i]["real"]
            off = percent((ratio - 1).abs().median())
            rows.append([run.name, str(len(ratio)), number(ratio.median()), off])
    notes = [f"{run.name}: no traces, and a prediction needs lengths." for run in _untraced(runs)]
    if curve is None:
        notes = ["No latency curve was given. `trl-darts profile` measures one; then add `--latency-curve FILE`."]
    model = curve.metadata.get("model", "a model it does not tell") if curve else ""
    return Panel(
        "prediction",
        "Predicted against real time",
        "Each point is a rollout: what the latency curve makes of the lengths in its trace (DARTS, Eq. 4), against "
        "the seconds it took. Above the line it took longer. The model starts all candidates at once, on one engine: "
        "queues, prefill and requests are not in it.",
        [partial(scatter, points=predicted, x="predicted", y="real")] if rows else [],
        f"All rollouts of each run; curve of {model}",
        [["Run", "Rollouts", "Predicted / real, median", "Off by, median"], *rows] if rows else (),
        notes=notes,
    )


def figure(charts: Sequence[Draw], names: Sequence[str], looks: Sequence[str] = ()) -> bytes:
    """Charts in one PNG picture, at most three in a row, with a legend of the runs and of the looks."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = min(len(charts), 2 if len(charts) in (2, 4) else 3)
    rows = -(-len(charts) // columns)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_RC}):
        # Without pyplot, whose state belongs to the caller.
        picture = Figure(figsize=(WIDTH, HEIGHT * rows + 0.4), layout="constrained")
        for place, draw in enumerate(charts, start=1):
            draw(picture.add_subplot(rows, columns, place))
        handles: list[Any] = [
            Line2D([], [], color=COLORS[i], linestyle=DASHES[i], lw=2, label=shorten(name, 60, placeholder="…"))
            for i, name in enumerate(names)
        ]
        handles += [Patch(facecolor=(MUTED, LOOKS[x][0]), edgecolor=MUTED, hatch=LOOKS[x][1], label=x) for x in looks]
        picture.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False)
        buffer = io.BytesIO()
        picture.savefig(buffer, dpi=144, metadata={"Software": None})  # the same bytes for the same runs
    return buffer.getvalue()


def lines(
    axes: Any,
    title: str,
    curves: Mapping[int, pd.Series],
    *,
    xlabel: str = "step",
    dotted: Mapping[int, pd.Series] | None = None,
    from_zero: bool = True,
) -> None:
    """One smoothed line per run, with its values faintly behind it."""
    window = smoothing(curves)
    for run, curve in curves.items():
        if window > 1:
            axes.plot(curve.index, curve, color=COLORS[run], linewidth=0.8, alpha=0.3)
        style = {"linewidth": 1.9, "linestyle": DASHES[run], "marker": "o" if len(curve) == 1 else ""}
        axes.plot(curve.index, curve.rolling(window, min_periods=1).mean(), color=COLORS[run], **style)
    for run, curve in (dotted or {}).items():
        smooth = curve.rolling(window, min_periods=1).mean()
        axes.plot(curve.index, smooth, color=COLORS[run], linewidth=1, linestyle=":")
    axes.set(title=title, xlabel=xlabel)
    if from_zero:
        axes.set_ylim(0, 1.03 * axes.get_ylim()[1])


def smoothing(curves: Mapping[int, pd.Series]) -> int:
    """How many values a line averages: a tenth of the longest curve, at most 20."""
    return max(1, min(20, max(map(len, curves.values()), default=1) // 10))


def distribution(axes: Any, title: str, run: int, shares: pd.DataFrame, edges: np.ndarray, top: float) -> None:
    """The pool's lengths as an area, the kept rows' as a line, over a logarithmic axis; see `tables.length_shares`."""
    from matplotlib.ticker import NullFormatter

    shown = np.maximum(edges, 0.7)  # a logarithmic axis has no 0
    axes.stairs(100 * shares["pool"], shown, fill=True, color=COLORS[run], alpha=0.3, linewidth=0)
    axes.stairs(100 * shares["kept"], shown, color=COLORS[run], linewidth=1.9)
    axes.set(title=title, xscale="log", xlabel="tokens", xlim=(shown[0], shown[-1]), ylim=(0, 105 * top))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def bars(axes: Any, title: str, shares: Mapping[int, pd.Series], xlabel: str) -> None:
    """Shares in percent by whole number, with the runs' bars side by side."""
    width = 0.84 / len(shares)
    for place, (run, share) in enumerate(shares.items()):
        left = share.index.to_numpy(dtype=float) - 0.42 + width * (place + 0.5)
        axes.bar(left, 100 * share, width, color=COLORS[run])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title=title, xlabel=xlabel)


def bins(axes: Any, title: str, means: Mapping[int, pd.Series], labels: Mapping[str, str]) -> None:
    """One line with marks per run over named bins. The first bin stands apart."""
    order = list(labels)
    for run, values in means.items():
        places = np.array([order.index(name) for name in values.index])
        style = {"color": COLORS[run], "marker": MARKERS[run], "markersize": 5, "linewidth": 1.9}
        for part, line in ((places == 0, ""), (places > 0, DASHES[run])):
            axes.plot(places[part], values[part], linestyle=line, **style)
    axes.set_xticks(range(len(order)), labels.values())
    axes.set(title=title, xlim=(-0.5, len(order) - 0.5), ylim=(0, 1.03 * axes.get_ylim()[1]))
    axes.yaxis.get_major_locator().set_params(integer=True)


def timeline(axes: Any, title: str, run: int, running: pd.DataFrame, seconds: float, peak: int) -> None:
    """How many candidates ran, stacked by outcome, on axes up to the `seconds` and the `peak` of all runs."""
    highest, end = running["running"].max(), running.index[-1]
    bottom = np.zeros(len(running))
    for name in OUTCOMES:
        opacity, hatch = LOOKS[name]
        area = {"step": "post", "edgecolor": COLORS[run], "hatch": hatch, "linewidth": 0}
        axes.fill_between(running.index, bottom, bottom + running[name], facecolor=(COLORS[run], opacity), **area)
        bottom += running[name]
    axes.step(running.index, running["running"], where="post", color=COLORS[run], linewidth=1)
    axes.plot([0, end, end], [highest, highest, 0], color=MUTED, linewidth=1, linestyle="--")
    axes.set(title=title, xlabel="seconds", xlim=(0, 1.02 * seconds or 1), ylim=(0, 1.08 * peak))


def stacks(axes: Any, title: str, table: pd.DataFrame, names: Sequence[str], xlabel: str) -> None:
    """One horizontal bar per run (the index), split into parts (the columns)."""
    left = np.zeros(len(table))
    for part in table:
        opacity, hatch = LOOKS[part]
        for place, run in enumerate(table.index):
            look = {"facecolor": (COLORS[run], opacity), "edgecolor": COLORS[run], "hatch": hatch, "linewidth": 0.8}
            axes.barh(place, table[part].iloc[place], 0.62, left[place], **look)
        left += table[part].to_numpy()
    axes.set_yticks(range(len(table)), [shorten(names[run], 24, placeholder="…") for run in table.index])
    axes.set(title=title, xlabel=xlabel, ylim=(len(table) - 0.4, -0.6), xlim=(0, 1.02 * left.max() or 1))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def scatter(axes: Any, points: Mapping[int, pd.DataFrame], x: str, y: str) -> None:
    """Points of all runs, and the line on which both axes are equal."""
    end = 1.05 * max(float(table[[x, y]].max().max()) for table in points.values())
    axes.plot([0, end], [0, end], color=MUTED, linewidth=1)
    for run, table in points.items():
        axes.scatter(table[x], table[y], s=16, marker=MARKERS[run], color=COLORS[run], alpha=0.6, linewidths=0)
    axes.set(title=f"{y.capitalize()} seconds", xlim=(0, end), ylim=(0, end), xlabel=f"{x} seconds")
