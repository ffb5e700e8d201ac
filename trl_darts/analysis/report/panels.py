"""
The page's panels: what each shows, its charts, its table, and notes on what is missing.

Charts are drawn on white, for light and dark pages. A run has the same colour and dashes in all of them; outcomes of
tokens and parts of time differ in opacity and hatching.
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
from ..colors import colors_of
from ..estimates import Estimate, number, percent, plus_minus, ratio_of_sums
from . import tables
from .runs import OUTCOMES, Run
from .tables import ENGINES, PHASES, common_traces, in_common


Draw = Callable[[Any], None]  # on matplotlib's axes

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


@dataclass(frozen=True)
class Panel:
    """A section of the page."""

    key: str  # its anchor, and the end of its picture's name
    title: str
    lead: str  # how to read it
    charts: Sequence[Draw] = ()
    caption: str = ""  # of the table
    rows: Sequence[Sequence[str]] = ()  # of the table: the header, then rows that begin with their names
    looks: Sequence[str] = ()  # fillings that need a legend
    notes: Sequence[str] = ()  # what is missing


def reward(runs: Sequence[Run]) -> Panel:
    """Shows the reward against steps and against time."""
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
        "Mean reward of the rows trained on, against steps and against time. If a schedule chooses rows by their "
        "lengths, their reward does not compare between runs; evaluation reward against time does, within its noise"
        + (". " if evaluated else ", and no log has `eval_reward`: train with `eval_strategy`. ")
        + "Time is the sum of `step_time`, without evaluation, checkpoints and the optimizer's update."
        + (f" Strong lines are means of up to {smooth} log entries, faint lines the entries." if smooth > 1 else ""),
        charts,
        notes=notes,
    )


def time(runs: Sequence[Run]) -> Panel:
    """Shows the seconds of generating, scoring, training and sending weights."""
    splits, window = in_common([tables.time_split(run) for run in runs])
    known = {i: own for i, split in enumerate(splits) if len(own := split.dropna(subset=["train"]))}
    means = {i: {name: _mean(own, name) for name in (*PHASES, *ENGINES, "total")} for i, own in known.items()}
    names = [run.name for run in runs]
    charts, rows = [], []
    for title, part in (("Seconds per step", PHASES), ("Engines, seconds per step", ENGINES)) if known else ():
        parts = {i: {name: own[name].mean for name in part} for i, own in means.items()}
        charts.append(partial(stacks, title=title, parts=parts, names=names))
    for i, own in means.items():
        seconds = own["total"].mean
        phases = [f"{plus_minus(own[name])} ({percent(own[name].mean / seconds)})" for name in PHASES]
        rows.append([names[i], *phases, plus_minus(own["total"]), percent(own["idle"].mean / seconds)])
    notes = []
    needed = ("step_time", "darts/rollout/seconds", "darts/score/seconds")
    for i, run in enumerate(runs):
        if missing := [f"`{name}`" for name in needed if not run.logged(name)]:
            notes.append(f"{run.name}: the log lacks {', '.join(missing)}.")
        elif left := len(splits[i]) - len(known.get(i, ())):
            notes.append(f"{run.name}: {left} of {len(splits[i])} log entries are left out: parts are missing.")
    return Panel(
        "time",
        "Where the time goes",
        "Where a step's time (`step_time`) goes. Generate: the trainer waits for rollouts. Score: rewards, log-probs "
        "of the old and the reference policy. Sync: weights to the servers. Train: the rest, forward and backward. "
        "Engines are idle while no rollout is running; `rollout_ahead=1` overlaps training and rollouts.",
        charts,
        f"Seconds per step and share, mean over {window}, ± 95 % intervals",
        [["Run", *map(str.capitalize, PHASES), "Step", "Engines idle"], *rows] if rows else (),
        (*PHASES, *ENGINES),
        notes,
    )


def _mean(split: pd.DataFrame, name: str) -> Estimate:
    """Returns the mean of a column of a time split over the steps."""
    return ratio_of_sums([split[name] * split["num_steps"]], [split["num_steps"]])


def occupancy(runs: Sequence[Run], step: int | None) -> Panel:
    """Shows how many candidates ran during one step's first rollout."""
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
        "Inside one rollout",
        "Each candidate runs from its submission to its end. Kept: trained on. Unused: complete, but not kept. "
        "Aborted: stopped before its end. White below the dashed line: idle slots, the bubble. "
        f"{f'This is step {step}; choose another with `--step`.' if step else ''}",
        charts,
        looks=OUTCOMES,
        notes=[f"{run.name}: no trace of this step." for i, run in enumerate(runs) if i not in rolls],
    )


def _check_step(runs: Sequence[Run], step: int | None) -> int | None:
    if step is None:
        return tables.typical_step(runs)
    steps = pd.concat([run.traces["step"] for run in runs])
    if not (steps == step).any():
        there = f"there are traces of steps {steps.min()} to {steps.max()}" if len(steps) else "there are no traces"
        raise ConfigurationError(
            f"`--step` ({step}) must be a step with a trace, and {there}. Steps count from 1: the file "
            "rollout_00000_00.parquet is step 1."
        )
    return step


def lengths(runs: Sequence[Run]) -> Panel:
    """Shows lengths of the pool and of the kept rows: distributions, and over training."""
    traces, window = common_traces(runs)
    shown = {i: table for i, table in enumerate(traces) if len(table)}
    edges = tables.length_edges(max((int(table["length"].max()) for table in shown.values()), default=1))
    shares = {i: tables.length_shares(table, edges) for i, table in shown.items()}
    top = max((float(share.max().max()) for share in shares.values()), default=1.0)
    rows, charts = [], []
    for i, table in shown.items():
        parts = (tables.ended(table)["length"], table["length"][table["selected"]])
        stats = [(p.mean(), p.median(), p.quantile(0.99), p.max()) for p in parts]
        rows.append([runs[i].name, *(f"{number(a)} → {number(b)}" for a, b in zip(*stats, strict=True))])
        title = f"{runs[i].name}: % of candidates"
        charts.append(partial(distribution, title=title, run=i, shares=shares[i], edges=edges, top=top))
    return Panel(
        "lengths",
        "Lengths of the pool and of the kept rows",
        "Distributions: the area is all candidates, the line the rows trained on. Aborted candidates count with the "
        "tokens they had, so with early stops the pool's tail is longer than it looks. A rollout waits for the "
        "longest.",
        [*charts, *_lengths_over_training(runs)],
        f"Tokens, all candidates → kept rows, {window}",
        [["Run", "Mean", "Median", "p99", "Longest"], *rows] if rows else (),
        notes=_without_traces(runs, "no traces, so no distribution; curves are from the log"),
    )


def _without_traces(runs: Sequence[Run], note: str) -> list[str]:
    return [f"{run.name}: {note}." for run in runs if run.traces.empty]


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
    """Shows how many candidates prompts got, and which prompts."""
    traces, window = common_traces(runs)
    shares = {i: tables.budget_shares(table) for i, table in enumerate(traces) if len(table)}
    spreads = {i: tables.budget_by_spread(traces[i]) for i in shares}
    notes = [f"{run.name}: no traces, and budgets need them." for i, run in enumerate(runs) if i not in shares]
    if spreads and all(set(means.index) == {tables.FIRST_SEEN} for means in spreads.values()):
        notes.append("No prompt was sampled twice in these steps, so there is no history to compare with.")
    return Panel(
        "budget",
        "Budget",
        "Left: how many candidates prompts got. Right: which prompts got them, by how much the lengths of a prompt's "
        "earlier answers differed, in five bins of equally many prompts. “New” prompts have no history."
        f"{f' Over {window}.' if window else ''}",
        [partial(bars, shares=shares), partial(bins, means=spreads)] if shares else [],
        notes=notes,
    )


def faults(runs: Sequence[Run]) -> Panel:
    """Shows the faults that the run survived."""
    counted = [tables.faults(run) for run in runs]
    rows = [
        [label, *(_fault_cell(table[label]) if label in table else "–" for table in counted)]
        for label in tables.FAULTS
        if any(label in table for table in counted)
    ]
    return Panel(
        "faults",
        "Faults",
        "Lost or full servers and late rewards that the run survived, and their steps. A dropped prompt's rows repeat "
        "another's, with zero loss weight. A server that was lost while nothing ran on it is not counted.",
        caption="Over each run's own steps",
        rows=[["Fault", *(run.name for run in runs)], *rows] if rows else (),
        notes=[f"{run.name}: the log counts none." for run, table in zip(runs, counted, strict=True) if table.empty],
    )


def _fault_cell(counts: pd.Series) -> str:
    steps = counts.index[counts > 0]
    return f"{number(counts.sum())} (steps {steps[0]} to {steps[-1]})" if len(steps) else "0"


def prediction(runs: Sequence[Run], curve: LatencyCurve | None) -> Panel:
    """Shows the seconds predicted by the cost model against those that rollouts took."""
    rows, predicted = [], {}
    for i, run in enumerate(runs):
        if curve is not None and not run.traces.empty:
            predicted[i] = tables.predicted_times(run.traces, curve)
            ratio = predicted[i]["predicted"] / predicted[i]["real"]
            off = percent((ratio - 1).abs().median())
            rows.append([run.name, str(len(ratio)), number(ratio.median()), off])
    notes = _without_traces(runs, "no traces, and a prediction needs lengths")
    if curve is None:
        notes = ["No latency curve was given. `trl-darts profile` measures one; then add `--latency-curve FILE`."]
    model = curve.metadata.get("model", "an unknown model") if curve else ""
    return Panel(
        "prediction",
        "Predicted against real time",
        "Each point is a rollout: the seconds predicted by the latency curve from the lengths in its trace (DARTS, "
        "Eq. 4), against the seconds it took. Above the line it took longer. The model starts all candidates at once, "
        "on one engine, and leaves out queues, prefill and requests.",
        [partial(scatter, points=predicted)] if rows else [],
        f"All rollouts of each run; curve of {model}",
        [["Run", "Rollouts", "Predicted / real, median", "Off by, median"], *rows] if rows else (),
        notes=notes,
    )


def figure(charts: Sequence[Draw], names: Sequence[str], looks: Sequence[str] = ()) -> bytes:
    """Draws charts into one PNG picture, at most three in a row, with a legend of the runs and of the looks."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = min(len(charts), 2 if len(charts) in (2, 4) else 3)
    rows = -(-len(charts) // columns)
    cycle: dict[Any, Any] = {"axes.prop_cycle": cycler(color=colors_of(names))}  # "C0" is the first run's
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_RC, **cycle}):
        # Without pyplot, whose state belongs to the caller.
        picture = Figure(figsize=(WIDTH, HEIGHT * rows + 0.4), layout="constrained")
        for place, draw in enumerate(charts, start=1):
            draw(picture.add_subplot(rows, columns, place))
        handles: list[Any] = [
            Line2D([], [], color=f"C{i}", linestyle=DASHES[i], lw=2, label=shorten(name, 60, placeholder="…"))
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
    """Draws one smoothed line per run, in front of its own values in a faint line."""
    window = smoothing(curves)
    for run, curve in curves.items():
        if window > 1:
            axes.plot(curve, color=f"C{run}", linewidth=0.8, alpha=0.3)
        style = {"linewidth": 1.9, "linestyle": DASHES[run], "marker": "o" if len(curve) == 1 else ""}
        axes.plot(curve.rolling(window, min_periods=1).mean(), color=f"C{run}", **style)
    for run, curve in (dotted or {}).items():
        axes.plot(curve.rolling(window, min_periods=1).mean(), color=f"C{run}", linewidth=1, linestyle=":")
    axes.set(title=title, xlabel=xlabel)
    if from_zero:
        axes.set_ylim(0, 1.03 * axes.get_ylim()[1])


def smoothing(curves: Mapping[int, pd.Series]) -> int:
    """Returns the number of values that a line averages: a tenth of the longest curve, at most 20."""
    return max(1, min(20, max(map(len, curves.values()), default=1) // 10))


def distribution(axes: Any, title: str, run: int, shares: pd.DataFrame, edges: np.ndarray, top: float) -> None:
    """Draws the pool's lengths as an area and the kept rows' as a line, over a logarithmic axis."""
    from matplotlib.ticker import NullFormatter

    shown = np.maximum(edges, 0.7)  # a logarithmic axis has no 0
    axes.stairs(100 * shares["pool"], shown, fill=True, color=f"C{run}", alpha=0.3, linewidth=0)
    axes.stairs(100 * shares["kept"], shown, color=f"C{run}", linewidth=1.9)
    axes.set(title=title, xscale="log", xlabel="tokens", xlim=(shown[0], shown[-1]), ylim=(0, 105 * top))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def bars(axes: Any, shares: Mapping[int, pd.Series]) -> None:
    """Draws the share of prompts by their number of candidates, with the runs' bars side by side."""
    width = 0.84 / len(shares)
    for place, (run, share) in enumerate(shares.items()):
        left = share.index.to_numpy(dtype=float) - 0.42 + width * (place + 0.5)
        axes.bar(left, 100 * share, width, color=f"C{run}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title="% of prompts", xlabel="candidates")


def bins(axes: Any, means: Mapping[int, pd.Series]) -> None:
    """Draws one line with markers per run over the `BINS`. The first bin is not connected to the others."""
    order = list(BINS)
    for run, values in means.items():
        places = np.array([order.index(name) for name in values.index])
        style = {"color": f"C{run}", "marker": MARKERS[run], "markersize": 5, "linewidth": 1.9}
        for part, line in ((places == 0, ""), (places > 0, DASHES[run])):
            axes.plot(places[part], values[part], linestyle=line, **style)
    axes.set_xticks(range(len(order)), BINS.values())
    axes.set(title="Candidates per prompt, mean", xlim=(-0.5, len(order) - 0.5), ylim=(0, 1.03 * axes.get_ylim()[1]))
    axes.yaxis.get_major_locator().set_params(integer=True)


def timeline(axes: Any, title: str, run: int, running: pd.DataFrame, seconds: float, peak: int) -> None:
    """Draws how many candidates ran, stacked by outcome, on axes up to the `seconds` and the `peak` of all runs."""
    highest, end = running["running"].max(), running.index[-1]
    bottom = np.zeros(len(running))
    for name in OUTCOMES:
        opacity, hatch = LOOKS[name]
        area = {"step": "post", "edgecolor": f"C{run}", "hatch": hatch, "linewidth": 0}
        axes.fill_between(running.index, bottom, bottom + running[name], facecolor=(f"C{run}", opacity), **area)
        bottom += running[name]
    axes.step(running.index, running["running"], where="post", color=f"C{run}", linewidth=1)
    axes.plot([0, end, end], [highest, highest, 0], color=MUTED, linewidth=1, linestyle="--")
    axes.set(title=title, xlabel="seconds", xlim=(0, 1.02 * seconds or 1), ylim=(0, 1.08 * peak))


def stacks(axes: Any, title: str, parts: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> None:
    """Draws one horizontal bar per run, split into named parts."""
    for place, (run, own) in enumerate(parts.items()):
        left = 0.0
        for name, seconds in own.items():
            opacity, hatch = LOOKS[name]
            look = {"facecolor": (f"C{run}", opacity), "edgecolor": f"C{run}", "hatch": hatch, "linewidth": 0.8}
            axes.barh(place, seconds, 0.62, left, **look)
            left += seconds
    longest = max(sum(own.values()) for own in parts.values())
    axes.set_yticks(range(len(parts)), [shorten(names[run], 24, placeholder="…") for run in parts])
    axes.set(title=title, xlabel="seconds", ylim=(len(parts) - 0.4, -0.6), xlim=(0, 1.02 * longest or 1))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def scatter(axes: Any, points: Mapping[int, pd.DataFrame]) -> None:
    """Draws the points of all runs, and the line on which predicted and real seconds are equal."""
    end = 1.05 * max(float(table[["predicted", "real"]].max().max()) for table in points.values())
    axes.plot([0, end], [0, end], color=MUTED, linewidth=1)
    for run, table in points.items():
        axes.scatter("predicted", "real", 16, f"C{run}", marker=MARKERS[run], data=table, alpha=0.6, linewidths=0)
    axes.set(title="Real seconds", xlim=(0, end), ylim=(0, end), xlabel="predicted seconds")
