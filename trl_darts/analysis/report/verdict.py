"""
Compares runs: settings, cautions, the summary, and the seconds of a step that a run saved.

Training and scoring take longer the wider their micro-batches are: with `trim_padding` as wide as their own longest
row, otherwise as wide as the longest of the whole batch. The seconds per token are fitted to the steps within each
run, so that a slower machine, or other work on it, is not mistaken for shorter rows.

Invariants: the parts of a saving sum to it; headline and table have the same steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from ...scheduling import ScheduleSettings
from ..estimates import (
    MIN_ENTRIES,
    Estimate,
    fit_linear,
    mean_of,
    number,
    percent,
    plus_minus,
    plus_minus_percent,
    quotient,
    ratio_of_sums,
)
from ..simulation.sweep import has_effect
from .runs import OUTCOMES, Run
from .tables import Window, rollouts, time_split, within


# Settings of the method. Runs that differ in any other setting did different work.
METHOD_SETTINGS = frozenset(
    {field.name for field in fields(ScheduleSettings)} - {"num_generations"} | {"latency_curve", "length_history"}
)
SWITCHES = ("rollout_ahead", "drop_uniform_groups", "tail_share")  # listed only if a run turns them on
ENGINE_METRICS = {
    "darts/drafts/step_share": ("Decoding steps with a draft", plus_minus_percent),
    "darts/drafts/accepted_per_step": ("Tokens accepted in each of these", plus_minus),
    "darts/tail/switches": ("Rollouts whose last candidates moved to tail servers", plus_minus_percent),
    "darts/tail/gain_seconds": ("Seconds saved in each of these", plus_minus),
}
WIDTH = "darts/train/completion_width"  # tokens computed per row, padding included
LONGEST_ROW = "completions/max_length"  # the width of TRL's own trainer
NOTABLE = 0.1  # share of a step: a larger rest is not explained by the schedule
BUSY = 1.5  # times the usual seconds of rows of the same length
BUSY_SHARE, MIN_BUSY = 0.1, 3  # of the log entries, at least


UNKNOWN: Any = Ellipsis  # value of a setting


@dataclass(frozen=True)
class Setting:
    """
    One setting of all runs, `UNKNOWN` where a run's log has none or its schedule does not read it. `None` is a value:
    the paper's wait, for example. It `differs` if two runs have different known values, and `matters` if such runs did
    different work, so that their times can't be compared.
    """

    name: str
    values: list[Any]
    differs: bool
    matters: bool


def compare_settings(runs: Sequence[Run]) -> list[Setting]:
    """Compares the settings that have an effect, then the work that traces show."""
    work = [{**_meaningful(run.settings), **_work(run)} for run in runs]
    # A run's name in its log is its directory, or a name that says nothing about its work.
    names = dict.fromkeys(name for settings in work for name in settings if name != "name")
    settings = []
    for name in names:
        values = [settings.get(name, UNKNOWN) for settings in work]
        known = {repr(value) for value in values if value is not UNKNOWN}
        is_set = any(value not in (None, UNKNOWN) for value in values)
        if is_set and (name not in SWITCHES or any(value for value in values if value is not UNKNOWN)):
            differs = len(known) > 1
            settings.append(Setting(name, values, differs, differs and name not in METHOD_SETTINGS))
    return settings


def _meaningful(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the settings that the run's schedule does not read."""
    schedule = settings.get("schedule")
    return {
        name: value
        for name, value in settings.items()
        if name not in METHOD_SETTINGS - {"schedule"} or schedule is None or has_effect(name, schedule, settings)
    }


def _work(run: Run) -> dict[str, Any]:
    trained_on = run.traces[run.traces["selected"]]  # a schedule may start more prompts
    if trained_on.empty:
        return {}
    prompts = trained_on.groupby(["step", "micro"])["group"].nunique()
    return {
        "prompts per rollout": int(prompts.median()),
        "rollouts per step": int(prompts.groupby("step").size().median()),
    }


def cautions(runs: Sequence[Run], settings: Sequence[Setting], window: Window | None) -> list[str]:
    """Returns what a reader must know before comparing; nothing for a single run."""
    if len(runs) == 1:
        return []
    found = []
    if matters := [setting.name for setting in settings if setting.matters]:
        found.append(
            f"The runs did different work: they differ in {', '.join(matters)}. Times, tokens and rewards are those "
            "of different tasks, so ratios are no gains."
        )
    if unknown := [run.name for run in runs if not run.settings]:
        found.append(f"Settings are unknown: {', '.join(unknown)}. Check that the runs did the same work.")
    if len({run.num_steps for run in runs}) > 1:
        counts = ", ".join(f"{run.name} {run.num_steps}" for run in runs)
        found.append(f"The runs have different numbers of steps: {counts}. Comparisons are over their common steps.")
    if window is None:
        found.append("No step has log entries and rollouts of all runs: they can't be compared.")
    same, steps = _same_prompts(runs)
    if same < steps:
        found.append(f"The runs saw the same prompts in only {same} of {steps} common steps: order or data differ.")
    return found


def _same_prompts(runs: Sequence[Run]) -> tuple[int, int]:
    """Counts the common steps in which the runs with traces saw the same prompts, and all common steps."""
    prompts = [run.traces.groupby("step")["prompt_key"].agg(frozenset) for run in runs if not run.traces.empty]
    if len(prompts) < 2:
        return 0, 0
    table = pd.concat(prompts, axis=1, join="inner")
    return int((table.nunique(axis=1) == 1).sum()), len(table)


Form = Callable[[Estimate], str]
Quantities = dict[str, tuple[str, Form, Estimate]]  # of one run: label, format, and value


@dataclass(frozen=True)
class Quantity:
    """A row of the summary: one quantity of all runs, NaN if unknown."""

    key: str
    label: str
    form: Form
    estimates: list[Estimate]

    @property
    def cells(self) -> list[str]:
        """The values of all runs as text."""
        return [self.form(estimate) for estimate in self.estimates]

    def ratio(self, index: int) -> str:
        """Returns a run's value as a multiple of the first run's: empty for the first, and if it says nothing."""
        first, own = self.estimates[0], self.estimates[index]
        is_known = first.mean > 0 and own.mean > 0
        if index == 0 or not is_known or math.isclose(first.mean, 1.0) or self.key.startswith("reward"):
            return ""
        return plus_minus(quotient(own, first), "×")


def summary(runs: Sequence[Run], window: Window | None) -> list[Quantity]:
    """Returns the quantities that at least one run has, over the steps of the window."""
    logs = within([run.log for run in runs], window)
    sources = [
        [_of_log(split) for split in within([time_split(run) for run in runs], window)],
        [_of_engines(log) for log in logs],
        [_of_rollouts(table) for table in within([rollouts(run) for run in runs], window)],
        [_of_rewards(log.get("reward", pd.Series(dtype=float))) for log in logs],
    ]
    rows = [
        Quantity(key, label, form, [own[key][2] for own in of_runs])
        for of_runs in sources
        for key, (label, form, _) in of_runs[0].items()
    ]
    return [row for row in rows if any(math.isfinite(estimate.mean) for estimate in row.estimates)]


def _of_log(split: pd.DataFrame) -> Quantities:
    total, generate = (split[name] * split["num_steps"] for name in ("total", "generate"))
    return {
        "step": ("Seconds per step", plus_minus, ratio_of_sums([total], [split["num_steps"]])),
        "share": ("Share of a step in rollouts", plus_minus_percent, ratio_of_sums([generate], [total])),
    }


def _of_engines(log: pd.DataFrame) -> Quantities:
    found: Quantities = {}
    for name, (label, form) in ENGINE_METRICS.items():
        table = log.reindex(columns=[name, "num_rollouts"]).dropna()
        mean = ratio_of_sums([table[name] * table["num_rollouts"]], [table["num_rollouts"]])
        found[name] = (label, form, mean)
    return found


def _of_rollouts(table: pd.DataFrame) -> Quantities:
    count, candidates, rows = table["num_rollouts"], table["candidates"], table["rows"]
    generated = table[list(OUTCOMES)].sum(axis=1, skipna=False)
    wasted, shape = table["unused"] + table["aborted"], ratio_of_sums([table["kept"], candidates], [rows, generated])
    longest, bubble = (ratio_of_sums([table[name] * count], [count]) for name in ("longest", "bubble"))
    return {
        "rollout": ("Seconds per rollout", plus_minus, ratio_of_sums([table["seconds"]], [count])),
        "longest": ("Longest candidate, tokens", plus_minus, longest),
        "bubble": ("Bubble: idle decoding slots", plus_minus_percent, bubble),
        "candidates": ("Candidates per row trained on", plus_minus, ratio_of_sums([candidates], [rows])),
        "tokens": ("Tokens generated per rollout", plus_minus, ratio_of_sums([generated], [count])),
        "waste": ("Tokens thrown away", plus_minus_percent, ratio_of_sums([wasted], [generated])),
        "aborted": ("… of aborted candidates", plus_minus_percent, ratio_of_sums([table["aborted"]], [generated])),
        "shape": ("Mean length, kept rows / pool", plus_minus, shape),
    }


def _of_rewards(rewards: pd.Series) -> Quantities:
    first, last = reward_ends(rewards)
    return {
        "reward_first": ("Reward of the rows, first third", plus_minus, mean_of(first)),
        "reward_last": ("Reward of the rows, last third", plus_minus, mean_of(last)),
    }


def reward_ends(rewards: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Returns the entries of the first and of the last third; none if a third has a single one."""
    rewards = rewards.dropna()
    third = len(rewards) // 3 if len(rewards) >= 6 else 0
    return rewards.iloc[:third], rewards.iloc[len(rewards) - third :]


@dataclass(frozen=True)
class Saving:
    """Seconds that a step of `other` took less than one of `first`, and their parts. NaN if the logs lack them."""

    first: Run
    other: Run
    over: Window
    entries: int  # log entries of the run that has fewer
    seconds: list[float]  # of a step of each run
    widths: list[float]  # of a row as it is computed, in tokens
    step: Estimate
    rollouts: Estimate
    shorter_rows: Estimate
    rest: Estimate


def saving(first: Run, other: Run, window: Window | None) -> Saving | None:
    """Compares two runs over the steps of the window. Returns `None` if no step has times of both."""
    tables = within([_widths_and_times(first), _widths_and_times(other)], window)
    if window is None or not all(map(len, tables)):
        return None
    both = pd.concat(tables)
    is_other = np.repeat([0.0, 1.0], [len(table) for table in tables])
    runs = pd.DataFrame({"base": 1.0, "other": is_other, "width": both["width"].to_numpy()})
    widths, seconds = (
        [float(np.average(table[name], weights=table["num_steps"])) for table in tables] for name in ("width", "total")
    )
    (step,), (rollout,), (shorter,) = (
        fit_linear(runs[["base", "other"]], both[name], both["num_steps"], [[0, -1]])
        for name in ("total", "generate", "width")
    )
    slope, rest = fit_linear(runs, both["total"] - both["generate"], both["num_steps"], [[0, 0, 1], [0, -1, 0]])
    # The error of a product of two estimates. Rows of equal lengths save nothing, whatever a token costs.
    error = math.hypot(slope.mean * shorter.half_width, shorter.mean * slope.half_width)
    shorter_rows = Estimate(slope.mean * shorter.mean, error) if widths[0] != widths[1] else Estimate(0.0, 0.0)
    return Saving(first, other, window, min(map(len, tables)), seconds, widths, step, rollout, shorter_rows, rest)


def _widths_and_times(run: Run) -> pd.DataFrame:
    width = run.log.get(WIDTH, run.log.get(LONGEST_ROW, pd.Series(np.nan, run.log.index)))
    known = time_split(run)[["total", "generate", "num_steps"]].assign(width=width)
    has_rollouts = bool(known["generate"].notna().any())  # a log of TRL's own trainer has none
    return known.dropna(subset=None if has_rollouts else ["total", "num_steps", "width"])


def in_short(runs: Sequence[Run], settings: Sequence[Setting], window: Window | None) -> list[list[str]]:
    """Returns, for each run but the first, a verdict and the parts of what it saved."""
    matters = [setting.name for setting in settings if setting.matters]
    found = [saving(runs[0], run, window) for run in runs[1:]]
    return [describe(saved, matters) for saved in found if saved is not None]


def describe(saved: Saving, matters: Sequence[str] = ()) -> list[str]:
    """Returns the verdict, then a line for each part. `matters` are settings that change the work of a step."""
    if saved.entries < MIN_ENTRIES:
        return [
            f"{saved.other.name} and {saved.first.name}: too few steps to compare. Log entries of both in "
            f"{saved.over}: {saved.entries}. At least {MIN_ENTRIES} are needed."
        ]
    verdict = _verdict(saved)
    if not math.isfinite(saved.rollouts.mean):
        return [verdict, "What of this was saved in rollouts is unknown: a log of TRL's own trainer does not say."]
    rollouts = f"Saved in rollouts: {plus_minus(saved.rollouts, ' s')}."
    if not math.isfinite(saved.rest.mean):
        unknown = "Rows had the same length in all steps: the parts of shorter rows and of the rest are unknown."
        return [verdict, rollouts, unknown]
    lengths = f"micro-batches were {saved.widths[1]:,.0f} tokens wide instead of {saved.widths[0]:,.0f}"
    shorter_rows = plus_minus(saved.shorter_rows, " s")
    return [
        verdict,
        rollouts,
        f"Saved by narrower micro-batches (less padding, shorter rows): {shorter_rows}; {lengths}.",
        f"Saved in the rest (training on the same width, and sending weights): {plus_minus(saved.rest, ' s')}."
        + _reason(saved, matters),
    ]


def _verdict(saved: Saving) -> str:
    total, (before, after) = saved.step, saved.seconds
    parts = {"in rollouts": saved.rollouts, "by narrower micro-batches": saved.shorter_rows, "in the rest": saved.rest}
    took = f"{saved.other.name} took {number(after)} s a step, {saved.first.name} {number(before)} s"
    if abs(total.mean) <= total.half_width:
        return f"{took}: no difference beyond the noise, {plus_minus(total, ' s')}."
    most = [name for name, part in parts.items() if part.mean / total.mean > 0.5]
    mostly = f", most of it {most[0]}" if most else ""
    size = plus_minus(Estimate(abs(total.mean), total.half_width), " s")
    return f"{took}: {'saved' if total.mean > 0 else 'lost'} {size} ({percent(abs(total.mean) / before)}){mostly}."


def _reason(saved: Saving, matters: Sequence[str]) -> str:
    if abs(saved.rest.mean) <= max(saved.rest.half_width, NOTABLE * saved.seconds[0]):
        return ""
    slower = saved.other if saved.rest.mean < 0 else saved.first
    what = ", ".join(matters) or "streaming"
    return f" Unless {what} explains that, the machine of {slower.name} was busy with other work, or is a slower one."


def busy(run: Run) -> str | None:
    """Names the steps in which training took much longer than usual for its rows: the machine had other work."""
    table = _widths_and_times(run)
    table = table[table.index > 1].dropna()
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
    """Evaluates a robust line through the points, which up to half of them don't influence."""
    if lengths.nunique() < 2:
        return pd.Series(seconds.median(), seconds.index)
    from scipy.stats import siegelslopes  # takes most of a second to import

    slope, base = siegelslopes(seconds.to_numpy(), lengths.to_numpy())
    return (base + slope * lengths).clip(lower=float(seconds.min()))
