"""
What can be compared between runs, and the summary that compares them.

Invariant: no number of one run stands beside another's unless both are over the same steps, and each says over which.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from ...scheduling import ScheduleSettings
from ..simulation import Estimate
from ..simulation.sweep import has_effect
from .estimates import mean_of, plus_minus, plus_minus_percent, quotient, ratio_of_sums
from .runs import OUTCOMES, Run
from .tables import rollouts, time_split


# What a schedule may change. A difference anywhere else means that runs did not do the same work.
METHOD_SETTINGS = frozenset(
    {field.name for field in fields(ScheduleSettings)} - {"num_generations"} | {"latency_curve", "length_history"}
)
# Off in most runs, and then not worth a line.
SWITCHES = ("rollout_ahead", "drop_uniform_groups", "tail_share")


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
    """Lines up those settings of runs that mean something, then what their traces say of the work they did."""
    work = [{**_meaningful(run.settings), **_work(run)} for run in runs]
    # A run's name in its log is its directory, or says nothing about the work.
    names = dict.fromkeys(name for settings in work for name in settings if name != "name")
    settings = []
    for name in names:
        values = [settings.get(name) for settings in work]
        known = {repr(value) for value in values if value is not None}
        if known and (name not in SWITCHES or any(values)):
            differs = len(known) > 1
            settings.append(Setting(name, values, differs, differs and name not in METHOD_SETTINGS))
    return settings


def _meaningful(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that the run's schedule does not read."""
    schedule = settings.get("schedule")
    return {
        name: value
        for name, value in settings.items()
        if name not in METHOD_SETTINGS - {"schedule"} or schedule is None or has_effect(name, schedule, settings)
    }


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
    """One quantity of all runs (NaN where unknown), how it is written, and what it is a mean of."""

    key: str
    label: str
    estimates: list[Estimate]
    form: Callable[[Estimate], str]
    over: str

    @property
    def cells(self) -> list[str]:
        """All runs' values, to be read."""
        return [self.form(estimate) for estimate in self.estimates]

    def ratio(self, index: int) -> str:
        """A run's value as a multiple of the first run's. Empty for the first, and where it says nothing."""
        first, own = self.estimates[0], self.estimates[index]
        if index == 0 or not (first.mean > 0 and own.mean > 0) or self.key.startswith("reward"):
            return ""
        return plus_minus(quotient(own, first), "×")


def summary(runs: Sequence[Run]) -> list[Quantity]:
    """The quantities that at least one run tells, over the steps that all runs have."""
    splits, log_window = in_common([time_split(run) for run in runs])
    tables, window = in_common([rollouts(run) for run in runs])
    rewards, _ = in_common([run.log.reindex(columns=["reward", "num_steps"]) for run in runs])
    found = [
        *_lined_up(LOG_LABELS, [_of_log(split) for split in splits], f"{log_window}, from the log"),
        *_lined_up(ENGINE_LABELS, [_of_engines(run.log) for run in runs], "the whole log of each run"),
        *_lined_up(ROLLOUT_LABELS, [_of_rollouts(table) for table in tables], f"rollouts of {window}"),
        *_lined_up(REWARD_LABELS, [_of_rewards(log["reward"]) for log in rewards], f"{log_window}, from the log"),
    ]
    return [row for row in found if any(math.isfinite(estimate.mean) for estimate in row.estimates)]


def _lined_up(
    labels: Mapping[str, tuple[str, Callable[[Estimate], str]]], numbers: Sequence[Mapping[str, Estimate]], over: str
) -> list[Quantity]:
    return [Quantity(key, label, [own[key] for own in numbers], form, over) for key, (label, form) in labels.items()]


def _of_log(split: pd.DataFrame) -> dict[str, Estimate]:
    total, generate = (split[name] * split["num_steps"] for name in ("total", "generate"))
    return {"step": ratio_of_sums([total], [split["num_steps"]]), "share": ratio_of_sums([generate], [total])}


def _of_engines(log: pd.DataFrame) -> dict[str, Estimate]:
    found = {}
    for name in ENGINE_LABELS:
        table = log.reindex(columns=[name, "num_rollouts"]).dropna()
        found[name] = ratio_of_sums([table[name] * table["num_rollouts"]], [table["num_rollouts"]])
    return found


def _of_rollouts(table: pd.DataFrame) -> dict[str, Estimate]:
    count, candidates, rows = table["num_rollouts"], table["candidates"], table["rows"]
    generated = table[list(OUTCOMES)].sum(axis=1, skipna=False)
    return {
        "rollout": ratio_of_sums([table["seconds"]], [count]),
        "longest": ratio_of_sums([table["longest"] * count], [count]),
        "bubble": ratio_of_sums([table["bubble"] * count], [count]),
        "candidates": ratio_of_sums([candidates], [rows]),
        "tokens": ratio_of_sums([generated], [count]),
        "waste": ratio_of_sums([table["unused"] + table["aborted"]], [generated]),
        "aborted": ratio_of_sums([table["aborted"]], [generated]),
        "shape": ratio_of_sums([table["kept"], candidates], [rows, generated]),
    }


def _of_rewards(rewards: pd.Series) -> dict[str, Estimate]:
    return dict(zip(REWARD_LABELS, map(mean_of, reward_ends(rewards)), strict=True))


def reward_ends(rewards: pd.Series) -> tuple[pd.Series, pd.Series]:
    """The entries of the first and of the last third; none where a third is a single one."""
    rewards = rewards.dropna()
    third = len(rewards) // 3 if len(rewards) >= 6 else 0
    return rewards.iloc[:third], rewards.iloc[len(rewards) - third :]


LOG_LABELS = {
    "step": ("Seconds per step", plus_minus),
    "share": ("Share of a step in rollouts", plus_minus_percent),
}
ROLLOUT_LABELS = {
    "rollout": ("Seconds per rollout", plus_minus),
    "longest": ("Longest candidate, tokens", plus_minus),
    "bubble": ("Bubble: decoding slots that stood idle", plus_minus_percent),
    "candidates": ("Candidates per row trained on", plus_minus),
    "tokens": ("Tokens generated per rollout", plus_minus),
    "waste": ("Tokens thrown away", plus_minus_percent),
    "aborted": ("… of aborted candidates", plus_minus_percent),
    "shape": ("Mean length, kept rows / pool", plus_minus),
}
REWARD_LABELS = {
    "reward_first": ("Reward of the rows, first third", plus_minus),
    "reward_last": ("Reward of the rows, last third", plus_minus),
}
ENGINE_LABELS = {
    "darts/drafts/step_share": ("Decoding steps with a draft", plus_minus_percent),
    "darts/drafts/accepted_per_step": ("Tokens accepted in each of these", plus_minus),
    "darts/tail/switches": ("Rollouts of which tail servers took over what was left", plus_minus_percent),
    "darts/tail/gain_seconds": ("Seconds saved in each of these", plus_minus),
}
