"""
What can be compared between runs, and the summary that compares them.

Invariant: no number of one run stands beside another's unless both are over the same steps, and each says over which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from ...scheduling import ScheduleSettings
from .runs import OUTCOMES, Run
from .tables import rollouts, time_split


# What a schedule may change. A difference anywhere else means that runs did not do the same work.
METHOD_SETTINGS = frozenset(
    {field.name for field in fields(ScheduleSettings)} - {"num_generations"} | {"latency_curve"}
)


@dataclass(frozen=True)
class Window:
    """Steps from `first` to `last`, both included."""

    first: int
    last: int

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows that lie in it as a whole: one with `num_steps` stands for as many steps up to its own."""
        return table[(_begins(table) >= self.first) & (table.index <= self.last)]

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def common_window(tables: Sequence[pd.DataFrame]) -> Window | None:
    """The steps that all tables cover, if there are any. Empty tables don't count."""
    tables = [table for table in tables if len(table)]
    first = max((int(_begins(table)[0]) for table in tables), default=1)
    last = min((int(table.index[-1]) for table in tables), default=0)
    return Window(first, last) if first <= last else None


def _begins(table: pd.DataFrame) -> Any:
    return table.index.to_numpy() - (table["num_steps"].to_numpy() - 1 if "num_steps" in table else 0)


def in_common(tables: Sequence[pd.DataFrame]) -> tuple[list[pd.DataFrame], Window | None]:
    """The rows of each table in the steps that all of them cover, and these steps."""
    window = common_window(tables)
    return [window.of(table) if window else table.iloc[:0] for table in tables], window


def common_traces(runs: Sequence[Run]) -> tuple[list[pd.DataFrame], Window | None]:
    """Each run's candidates of the steps that all runs with traces have, and these steps."""
    tables, window = in_common([run.traces.set_index("step", drop=False) for run in runs])
    return [table.reset_index(drop=True) for table in tables], window


def typical_step(runs: Sequence[Run]) -> int | None:
    """The step whose rollouts took the (lower) median of time over all runs, of those that all have traces of."""
    seconds = [rollouts(run)["seconds"] for run in runs if not run.traces.empty]
    if not seconds:
        return None
    total = pd.concat(seconds, axis=1, join="inner").sum(axis=1).sort_values(kind="stable")
    return int(total.index[(len(total) - 1) // 2]) if len(total) else None


@dataclass(frozen=True)
class Setting:
    """
    One setting of all runs, `None` where it is unknown. `differs`: two runs that tell it tell different values;
    `matters`: such runs did different work, so that their times can't be compared.
    """

    name: str
    values: list[Any]
    differs: bool
    matters: bool


def compare_settings(runs: Sequence[Run]) -> list[Setting]:
    """Lines up the settings of runs, then what their traces say of the work they did."""
    work = [{**run.settings, **_work(run)} for run in runs]
    # A run's name in its log is its directory, or says nothing about the work.
    names = dict.fromkeys(name for settings in work for name in settings if name != "name")
    settings = []
    for name in names:
        values = [settings.get(name) for settings in work]
        known = {repr(value) for value in values if value is not None}
        if known:
            differs = len(known) > 1
            settings.append(Setting(name, values, differs, differs and name not in METHOD_SETTINGS))
    return settings


def _work(run: Run) -> dict[str, Any]:
    trained_on = run.traces[run.traces["selected"]]  # a schedule may start more prompts than that
    if trained_on.empty:
        return {}
    prompts = trained_on.groupby(["step", "micro"])["group"].nunique()
    return {
        "prompts per rollout": int(prompts.median()),
        "rollouts per step": int(prompts.groupby("step").size().median()),
    }


def cautions(runs: Sequence[Run], settings: Sequence[Setting]) -> list[str]:
    """What a reader must know before comparing; nothing for a single run."""
    if len(runs) == 1:
        return []
    found = []
    if matters := [setting.name for setting in settings if setting.matters]:
        found.append(
            f"The runs did different work: they differ in {', '.join(matters)}. Times, tokens and rewards are those "
            "of different tasks; don't take a ratio for a gain."
        )
    if unknown := [run.name for run in runs if not run.settings]:
        found.append(f"Settings are unknown: {', '.join(unknown)}. Check that the runs did the same work.")
    if len({run.num_steps for run in runs}) > 1:
        counts = ", ".join(f"{run.name} {run.num_steps}" for run in runs)
        found.append(f"The runs have different numbers of steps: {counts}. Comparisons are over the steps all have.")
    if common_window([rollouts(run) for run in runs]) is None:
        found.append("No step has rollouts of all runs: nothing about them can be compared.")
    if common_window([run.log for run in runs]) is None and any(not run.log.empty for run in runs):
        found.append("No step has a log entry of all runs: times and rewards can't be compared.")
    same, steps = same_prompts(runs)
    if same < steps:
        found.append(f"The runs saw the same prompts in {same} of {steps} common steps only: order or data differ.")
    return found


def same_prompts(runs: Sequence[Run]) -> tuple[int, int]:
    """In how many of the steps that all runs with traces have they saw the same prompts, and of how many steps."""
    prompts = [run.traces.groupby("step")["prompt_key"].agg(frozenset) for run in runs if not run.traces.empty]
    if len(prompts) < 2:
        return 0, 0
    table = pd.concat(prompts, axis=1, join="inner")
    return int((table.nunique(axis=1) == 1).sum()), len(table)


@dataclass(frozen=True)
class Quantity:
    """One quantity of all runs: numbers (NaN where unknown), the same to be read, and what they are a mean of."""

    key: str
    label: str
    values: list[float]
    cells: list[str]
    over: str

    def ratio(self, index: int) -> str:
        """A run's value as a multiple of the first run's. Empty for the first, and where it says nothing."""
        first, value = self.values[0], self.values[index]
        if index == 0 or not (first > 0 and math.isfinite(value)) or self.key.startswith("reward"):
            return ""
        return f"{value / first:.2f}×"


def summary(runs: Sequence[Run]) -> list[Quantity]:
    """The quantities that at least one run tells, over the steps that all runs have."""
    splits, log_window = in_common([time_split(run) for run in runs])
    tables, window = in_common([rollouts(run) for run in runs])
    rewards, _ = in_common([run.log.reindex(columns=["reward", "num_steps"]) for run in runs])
    found = [
        *_lined_up(LOG_LABELS, [_of_log(split) for split in splits], f"{log_window}, from the log"),
        *_lined_up(DRAFT_LABELS, [_of_drafts(run.log) for run in runs], "the whole log of each run"),
        *_lined_up(ROLLOUT_LABELS, [_of_rollouts(table) for table in tables], f"rollouts of {window}"),
    ]
    for place, name in enumerate(("first", "last")):
        ends = [reward_ends(log["reward"])[place] for log in rewards]
        over = f"{name} third of {log_window}, ± standard deviation of the log entries"
        cells = [plus_minus(end) for end in ends]
        found.append(Quantity(f"reward_{name}", f"Reward, {name} third", [e.mean() for e in ends], cells, over))
    return [quantity for quantity in found if any(map(math.isfinite, quantity.values))]


def _lined_up(
    labels: Mapping[str, tuple[str, Callable[[float], str]]], numbers: Sequence[Mapping[str, float]], over: str
) -> list[Quantity]:
    rows = []
    for key, (label, form) in labels.items():
        values = [own[key] for own in numbers]
        rows.append(Quantity(key, label, values, [form(value) for value in values], over))
    return rows


def _of_log(split: pd.DataFrame) -> dict[str, float]:
    total = weighted_mean(split, "total")
    return {"step": total, "share": _divide(weighted_mean(split, "generate"), total)}


def _of_drafts(log: pd.DataFrame) -> dict[str, float]:
    table = log.reindex(columns=[*DRAFT_LABELS, "num_rollouts"])
    return {name: weighted_mean(table, name, "num_rollouts") for name in DRAFT_LABELS}


def _of_rollouts(table: pd.DataFrame) -> dict[str, float]:
    total = table.sum(min_count=1)
    generated = total[list(OUTCOMES)].sum(skipna=False)
    return {
        "rollout": _divide(total["seconds"], total["num_rollouts"]),
        "longest": weighted_mean(table, "longest", "num_rollouts"),
        "bubble": weighted_mean(table, "bubble", "num_rollouts"),
        "candidates": _divide(total["candidates"], total["rows"]),
        "tokens": _divide(generated, total["num_rollouts"]),
        "waste": _divide(total["unused"] + total["aborted"], generated),
        "aborted": _divide(total["aborted"], generated),
        "shape": _divide(_divide(total["kept"], total["rows"]), _divide(generated, total["candidates"])),
    }


def reward_ends(rewards: pd.Series) -> tuple[pd.Series, pd.Series]:
    """The entries of the first and of the last third, at least one each."""
    rewards = rewards.dropna()
    third = max(1, len(rewards) // 3)
    return rewards.iloc[:third], rewards.iloc[-third:]


def weighted_mean(table: pd.DataFrame, column: str, weight: str = "num_steps") -> float:
    """The mean of a column, in which an entry counts as often as steps (or rollouts) that it stands for."""
    known = table.dropna(subset=column)
    return _divide((known[column] * known[weight]).sum(), known[weight].sum())


def _divide(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def number(value: float) -> str:
    """Three significant digits, or all digits of the whole part."""
    if not math.isfinite(value):
        return "–"
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(6, max(0, digits))}f}"


def percent(value: float) -> str:
    """A share as whole percents; with one digit below ten."""
    return f"{100 * value:.{1 if 0 < abs(value) < 0.0995 else 0}f} %" if math.isfinite(value) else "–"


def plus_minus(values: pd.Series) -> str:
    """Mean and standard deviation (Bessel's), both with as many digits as two of the deviation's take."""
    mean, std = values.mean(), values.std()
    if not std > 0:
        return number(mean)
    digits = max(0, min(6, 1 - math.floor(math.log10(std))))
    return f"{mean:,.{digits}f} ± {std:,.{digits}f}"


LOG_LABELS = {"step": ("Seconds per step", number), "share": ("Share of a step in rollouts", percent)}
ROLLOUT_LABELS = {
    "rollout": ("Seconds per rollout", number),
    "longest": ("Longest candidate, tokens", number),
    "bubble": ("Bubble: decoding slots that stood idle", percent),
    "candidates": ("Candidates per row trained on", number),
    "tokens": ("Tokens generated per rollout", number),
    "waste": ("Tokens thrown away", percent),
    "aborted": ("… of aborted candidates", percent),
    "shape": ("Mean length, kept rows / pool", number),
}
DRAFT_LABELS = {
    "darts/drafts/step_share": ("Decoding steps with a draft", percent),
    "darts/drafts/accepted_per_step": ("Tokens accepted in each of these", number),
}
