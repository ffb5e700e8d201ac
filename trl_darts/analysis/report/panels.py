"""The page's panels: what each shows, its charts, its table, and notes on what is missing. Empty ones vanish."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from ...errors import ConfigurationError
from ...policy import LatencyCurve
from ..estimates import Estimate, number, percent, plus_minus, ratio_of_sums
from . import charts, tables
from .charts import Draw
from .runs import Run
from .tables import PHASES, Window


Row = list[str]
DISTRIBUTION = (
    " Area: all candidates. Line: the rows trained on. If the line stands left of the area, training sees shorter "
    "answers than the model writes. Aborted candidates count with the tokens they had, so early stops hide a part of "
    "the tail."
)


@dataclass(frozen=True)
class Panel:
    """A section of the page."""

    key: str  # its anchor
    title: str
    lead: str  # how to read it
    charts: Sequence[Draw] = ()
    caption: str = ""  # of the table
    rows: Sequence[Row] = ()  # of the table: the header, then rows that begin with their names
    looks: Sequence[str] = ()  # fillings that need a legend
    notes: Sequence[str] = ()  # what is missing
    height: float = 2.9  # of a chart, in inches
    has_lines: bool = True  # whether the charts need a legend of the runs
    folded: bool = False


def panels_of(
    runs: Sequence[Run], window: Window | None, step: int | None, curve: LatencyCurve | None
) -> Iterator[Panel]:
    """Yields the panels that have something to show."""
    found = (
        evaluation(runs),
        time(runs, window),
        occupancy(runs, window, step),
        lengths(runs, window),
        prediction(runs, curve),
        faults(runs),
        reward(runs),
        budget(runs, window),
    )
    return (panel for panel in found if panel.charts or panel.rows)


def evaluation(runs: Sequence[Run]) -> Panel:
    """Shows the evaluation reward against time."""
    curves = {i: curve for i, run in enumerate(runs) if len(curve := tables.evaluation_curve(run))}
    unit, scale = ("minutes", 60) if max((c.index.max() for c in curves.values()), default=0) > 600 else ("seconds", 1)
    curves = {i: curve.set_axis(curve.index / scale) for i, curve in curves.items()}
    xlabel = f"{unit} of training steps"
    draw = partial(charts.lines, title="Evaluation reward", curves=curves, xlabel=xlabel, from_zero=False)
    return Panel(
        "evaluation",
        "Evaluation reward",
        "Of two runs, the better one is higher at the same time. Differences within the noise of an evaluation say "
        "nothing. Time is the sum of `step_time`, without evaluation, checkpoints and the optimizer's update.",
        [draw] if curves else (),
        notes=[f"{run.name}: the log has no `eval_reward`." for i, run in enumerate(runs) if i not in curves],
    )


def time(runs: Sequence[Run], window: Window | None) -> Panel:
    """Shows the seconds of generating, scoring, training and sending weights."""
    names = [run.name for run in runs]
    splits = tables.within([tables.time_split(run) for run in runs], window)
    known = {i: own for i, split in enumerate(splits) if len(own := split.dropna(subset=["train"]))}
    means = {i: {name: _mean(own, name) for name in (*PHASES, "busy", "idle", "total")} for i, own in known.items()}
    phases = [name for name in PHASES if any(own[name].mean for own in means.values())]
    parts = {i: {name: own[name].mean for name in phases} for i, own in means.items()}
    whole = {i: {"not known": _mean(split, "total").mean} for i, split in enumerate(splits) if known and len(split)}
    parts = {i: parts.get(i, own) for i, own in whole.items()}
    drawn = [partial(charts.stacks, title="Seconds of a step", parts=parts, names=names)] if known else []
    # Without a rollout ahead, engines are busy while the trainer waits, and idle otherwise.
    if any(abs(own["busy"].mean - own["generate"].mean) > 1e-9 for own in means.values()):
        engines = {i: {name: own[name].mean for name in ("busy", "idle")} for i, own in means.items()}
        drawn.append(partial(charts.stacks, title="Engines during a step", parts=engines, names=names))
    return Panel(
        "time",
        "Where the time goes",
        "Generate: the trainer waits for rollouts. Score: rewards, log-probs of the old and the reference policy. "
        f"{'Sync: weights to the servers. ' if 'sync' in phases else ''}Train: the rest, forward and backward. "
        "If “generate” is a small part, no schedule can gain much.",
        drawn,
        f"Seconds of a step and share, mean over {window}, ± 95 % intervals",
        _time_rows(names, means, phases) if means else (),
        notes=list(_unknown_times(runs, splits, known)),
        height=0.85 + 0.52 * len(parts),
        has_lines=False,
    )


def _time_rows(names: Sequence[str], means: Mapping[int, Mapping[str, Estimate]], phases: Sequence[str]) -> list[Row]:
    rows = [["Run", *map(str.capitalize, phases), "Step", "Engines idle"]]
    for i, own in means.items():
        seconds = own["total"].mean
        cells = [f"{plus_minus(own[name])} ({percent(own[name].mean / seconds)})" for name in phases]
        rows.append([names[i], *cells, plus_minus(own["total"]), percent(own["idle"].mean / seconds)])
    return rows


def _mean(split: pd.DataFrame, name: str) -> Estimate:
    """Returns the mean of a column of a time split over the steps."""
    return ratio_of_sums([split[name] * split["num_steps"]], [split["num_steps"]])


def _unknown_times(
    runs: Sequence[Run], splits: Sequence[pd.DataFrame], known: Mapping[int, pd.DataFrame]
) -> Iterator[str]:
    needed = ("step_time", "darts/rollout/seconds", "darts/score/seconds")
    for i, run in enumerate(runs):
        if missing := [f"`{name}`" for name in needed if not run.logged(name)]:
            yield f"{run.name}: the log lacks {', '.join(missing)}."
        elif left := len(splits[i]) - len(known.get(i, ())):
            yield f"{run.name}: {left} of {len(splits[i])} log entries are left out: parts are missing."


def occupancy(runs: Sequence[Run], window: Window | None, step: int | None) -> Panel:
    """Shows the candidates of a typical rollout of each run, and of a long one."""
    step = _check_step(runs, step) or tables.typical_step(runs, window)
    long = {i: own for i, run in enumerate(runs) if len(own := tables.long_steps(run, window))}
    chosen = [(i, step, "") for i in range(len(runs))]
    chosen += [(i, tables.median_of(own), ", a long one") for i, own in long.items()]
    drawn = {}
    for i, own_step, which in chosen:
        rollout = runs[i].traces[runs[i].traces["step"] == (own_step or 0)]
        rollout = rollout[rollout["micro"] == rollout["micro"].min()]
        if len(lanes := tables.lanes(rollout)):
            title = f"{runs[i].name}, step {own_step}{which}: {percent(tables.bubble(rollout))} idle"
            drawn[i, which] = (title, lanes)
    notes = [_how_many(runs[i], own, window) for i, own in long.items()]
    notes += [f"{run.name}: no times of its candidates." for i, run in enumerate(runs) if (i, "") not in drawn]
    seconds = max((float(lanes["end"].max()) for _, lanes in drawn.values()), default=1.0)
    return Panel(
        "occupancy",
        "Inside one rollout",
        "Each bar is a candidate. A slot without a bar is idle: the trainer waits for the longest. The step is one "
        "whose rollouts took the median time; choose another with `--step`. Long ones waited for all answers, as "
        "deferred groups and `long_end_every` demand, or met a slow server.",
        [
            partial(charts.candidates, title=title, color=f"C{i}", lanes=lanes, seconds=seconds)
            for (i, _), (title, lanes) in drawn.items()
        ],
        looks=("trained on", "discarded", "idle"),
        notes=notes,
        has_lines=False,
    )


def _how_many(run: Run, long: pd.Series, window: Window | None) -> str:
    (table,) = tables.within([tables.rollouts(run)], window)
    return (
        f"{run.name}: in {len(long)} of {len(table)} steps, rollouts took more than {tables.LONG} times the median, "
        f"{number(long.mean())} s on average."
    )


def _check_step(runs: Sequence[Run], step: int | None) -> int | None:
    steps = pd.concat([run.traces["step"] for run in runs])
    if step is not None and not (steps == step).any():
        there = f"there are traces of steps {steps.min()} to {steps.max()}" if len(steps) else "there are no traces"
        raise ConfigurationError(
            f"`--step` ({step}) must be a step with a trace, and {there}. Steps count from 1: the file "
            "rollout_00000_00.parquet is step 1."
        )
    return step


def lengths(runs: Sequence[Run], window: Window | None) -> Panel:
    """Shows lengths of the pool and of the kept rows: distributions, and over training."""
    shown = {i: table for i, table in enumerate(tables.traces_within(runs, window)) if len(table)}
    edges = tables.length_edges(max((int(table["length"].max()) for table in shown.values()), default=1))
    shares = {i: tables.length_shares(table, edges) for i, table in shown.items()}
    top = max((float(share.max().max()) for share in shares.values()), default=1.0)
    rows: list[Row] = []
    drawn: list[Draw] = []
    for i, table in shown.items():
        parts = (tables.ended(table)["length"], table["length"][table["selected"]])
        stats = [(p.mean(), p.median(), p.quantile(0.99), p.max()) for p in parts]
        rows.append([runs[i].name, *(f"{number(a)} → {number(b)}" for a, b in zip(*stats, strict=True))])
        title = f"{runs[i].name}: % of candidates"
        drawn.append(partial(charts.distribution, title=title, run=i, shares=shares[i], edges=edges, top=top))
    drawn += _lengths_over_training(runs)
    return Panel(
        "lengths",
        "Lengths",
        "A rollout waits for the longest candidate." + DISTRIBUTION * bool(rows),
        drawn,
        f"Tokens, all candidates → rows trained on, {window}",
        [["Run", "Mean", "Median", "p99", "Longest"], *rows] if rows else (),
        notes=[f"{run.name}: no traces, so no distribution." for run in runs if run.traces.empty],
    )


def _lengths_over_training(runs: Sequence[Run]) -> Iterator[Draw]:
    wanted = (("Longest candidate, tokens", "max", False), ("Rows trained on, mean tokens", "mean", True))
    for title, stat, kept in wanted:
        stats = {i: tables.length_stats(run, kept=kept) for i, run in enumerate(runs)}
        if curves := {i: own[stat] for i, own in stats.items() if stat in own}:
            yield partial(charts.lines, title=title, curves=curves)


def budget(runs: Sequence[Run], window: Window | None) -> Panel:
    """Shows how many candidates prompts got, and which prompts."""
    shown = {i: table for i, table in enumerate(tables.traces_within(runs, window)) if len(table)}
    shares = {i: tables.budget_shares(table) for i, table in shown.items()}
    spreads = {i: tables.budget_by_spread(table) for i, table in shown.items()}
    return Panel(
        "budget",
        "Budget",
        "How many candidates prompts got, and which prompts got them: by how much the lengths of a prompt's earlier "
        f"answers differed, in five bins of equally many prompts. “New” prompts have no history. Over {window}.",
        [partial(charts.bars, shares=shares), partial(charts.bins, means=spreads)] if shown else (),
        folded=True,
    )


def faults(runs: Sequence[Run]) -> Panel:
    """Shows the faults that the run survived."""
    counted = [tables.faults(run) for run in runs]
    rows = [
        [label, *(_fault_cell(table[label]) if label in table else "–" for table in counted)]
        for label in tables.FAULTS
        if any(label in table and table[label].any() for table in counted)
    ]
    return Panel(
        "faults",
        "Faults",
        "Lost or full servers and late rewards that the run survived, and their steps. A dropped prompt's rows repeat "
        "another's, with zero loss weight. A server that was lost while nothing ran on it is not counted.",
        caption="Over each run's own steps",
        rows=[["Fault", *(run.name for run in runs)], *rows] if rows else (),
    )


def _fault_cell(counts: pd.Series) -> str:
    steps = counts.index[counts > 0]
    return f"{number(counts.sum())} (steps {steps[0]} to {steps[-1]})" if len(steps) else "0"


def prediction(runs: Sequence[Run], curve: LatencyCurve | None) -> Panel:
    """Shows the seconds predicted by the cost model against those that rollouts took."""
    rows, predicted = [], {}
    for i, run in enumerate(runs):
        if curve is not None and not run.traces.empty:
            predicted[i] = tables.predicted_times(run.traces, curve).dropna()
            ratio = predicted[i]["predicted"] / predicted[i]["real"]
            off = percent((ratio - 1).abs().median())
            rows.append([run.name, str(len(ratio)), number(ratio.median()), off])
    model = curve.metadata.get("model", "an unknown model") if curve else ""
    return Panel(
        "prediction",
        "Predicted against real time",
        "Each point is a rollout: the seconds predicted by the latency curve from the lengths in its trace (DARTS, "
        "Eq. 4), against the seconds it took. Above the line it took longer. The model starts all candidates at once, "
        "on one engine, and leaves out queues, prefill and requests.",
        [partial(charts.scatter, points=predicted)] if rows else (),
        f"All rollouts of each run; curve of {model}",
        [["Run", "Rollouts", "Predicted / real, median", "Off by, median"], *rows] if rows else (),
    )


def reward(runs: Sequence[Run]) -> Panel:
    """Shows the reward of the rows against steps."""
    curves = {i: tables.reward_curve(run)["reward"] for i, run in enumerate(runs) if run.logged("reward")}
    smooth = charts.smoothing(curves)
    return Panel(
        "reward",
        "Training reward",
        "Mean reward of the rows trained on. A schedule that chooses rows by their lengths moves it, so it does not "
        "compare between runs: train with `eval_strategy`, and compare the evaluation reward."
        + (f" Strong lines are means of up to {smooth} log entries, faint lines the entries." if smooth > 1 else ""),
        [partial(charts.lines, title="Reward of the rows", curves=curves, from_zero=False)] if curves else (),
        notes=[f"{run.name}: the log has no `reward`." for i, run in enumerate(runs) if i not in curves],
        height=2.0,
    )
