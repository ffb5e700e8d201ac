"""
What can be compared between runs: the steps that all of them have, their settings, their prompts.

Invariant: no number of one run stands beside another's unless both are over the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from ..scheduling import ScheduleSettings
from .panels import rollouts
from .runs import Run
from .timing import time_split


# What a schedule may change. A difference anywhere else means that runs did not do the same work.
METHOD_SETTINGS = frozenset(
    {field.name for field in fields(ScheduleSettings)} - {"num_generations"} | {"latency_curve"}
)


@dataclass(frozen=True)
class Window:
    """
    Steps that are compared, both ends included.

    Args:
        first (`int`):
            The first.
        last (`int`):
            The last.
    """

    first: int
    last: int

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        """
        The rows that lie in it as a whole.

        Args:
            table (`pd.DataFrame`):
                Indexed by step. With a column `num_steps`, a row stands for as many steps up to its own.

        Returns:
            `pd.DataFrame`: These rows.
        """
        steps = table.index.to_series()
        begin = steps - table["num_steps"] + 1 if "num_steps" in table else steps
        return table[(begin >= self.first) & (steps <= self.last)]

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def common_window(tables: Sequence[pd.DataFrame]) -> Window | None:
    """
    The steps that all tables cover.

    Args:
        tables (`Sequence[pd.DataFrame]`):
            Indexed by step, see [`Window.of`]. Empty ones don't count.

    Returns:
        [`Window`], *optional*: From the latest first to the earliest last step. `None` if there is no such step.
    """
    tables = [table for table in tables if len(table)]
    if not tables:
        return None
    first = max(
        int(table.index[0] - (table["num_steps"].iloc[0] if "num_steps" in table else 1) + 1) for table in tables
    )
    last = min(int(table.index[-1]) for table in tables)
    return Window(first, last) if first <= last else None


@dataclass(frozen=True)
class Setting:
    """
    One setting of all runs.

    Args:
        name (`str`):
            Its name.
        values (`list[Any]`):
            One per run; `None` where it is unknown.
        differs (`bool`):
            Whether two runs that tell it tell different values.
        matters (`bool`):
            Whether runs that differ in it did different work, so that their times can't be compared.
    """

    name: str
    values: list[Any]
    differs: bool
    matters: bool

    def tells_apart(self, index: int) -> bool:
        """Whether a run is known to have done other work than the first one, by this setting."""
        first, own = self.values[0], self.values[index]
        return self.matters and None not in (first, own) and first != own


def compare_settings(runs: Sequence[Run]) -> list[Setting]:
    """
    Lines up the settings of runs, and what their traces and logs say of the work they did.

    Args:
        runs (`Sequence[Run]`):
            Runs.

    Returns:
        `list[Setting]`: In the order of the first run's log, then prompts per rollout and rollouts per step.
    """
    work = [{**run.settings, **_work(run)} for run in runs]
    # A run's name in its log is its directory, or says nothing about the work.
    names = dict.fromkeys(name for settings in work for name in settings if name != "name")
    settings = []
    for name in names:
        values = [settings.get(name) for settings in work]
        if all(value is None for value in values):  # of a schedule that none of them has
            continue
        known = {repr(value) for value in values if value is not None}
        differs = len(known) > 1
        settings.append(Setting(name, values, differs, differs and name not in METHOD_SETTINGS))
    return settings


def _work(run: Run) -> dict[str, Any]:
    trained_on = run.traces[run.traces["selected"]]  # a schedule may start more prompts than that
    if trained_on.empty:
        return {}
    rolls = trained_on.drop_duplicates(["step", "micro", "group"]).groupby(["step", "micro"]).size()
    return {
        "prompts per rollout": int(rolls.median()),
        "rollouts per step": int(rolls.groupby("step").size().median()),
    }


def same_prompts(runs: Sequence[Run]) -> tuple[int, int] | None:
    """
    Whether runs saw the same prompts in the same steps.

    Args:
        runs (`Sequence[Run]`):
            Runs. Those without traces don't count.

    Returns:
        `tuple[int, int]`, *optional*: In how many of the steps that all have a trace of, and of how many. `None` with
        fewer than two runs that have traces.
    """
    prompts = [run.traces.groupby("step")["prompt_key"].agg(frozenset) for run in runs if not run.traces.empty]
    if len(prompts) < 2:
        return None
    table = pd.concat(prompts, axis=1, join="inner")
    return int((table.nunique(axis=1) == 1).sum()), len(table)


def typical_step(runs: Sequence[Run], tables: Sequence[pd.DataFrame]) -> int | None:
    """
    A step whose rollouts, over all runs together, took neither long nor short.

    Args:
        runs (`Sequence[Run]`):
            Runs. Those without traces don't count.
        tables (`Sequence[pd.DataFrame]`):
            What `panels.rollouts` says of each.

    Returns:
        `int`, *optional*: The step with the (lower) median of the time, among those that all have a trace of.
    """
    seconds = [table["seconds"] for run, table in zip(runs, tables, strict=True) if not run.traces.empty]
    if not seconds:
        return None
    total = pd.concat(seconds, axis=1, join="inner").sum(axis=1).sort_values(kind="stable")
    return int(total.index[(len(total) - 1) // 2]) if len(total) else None


@dataclass(frozen=True)
class Comparison:
    """
    Runs, the numbers behind several panels, and the steps over which they can be compared.

    Args:
        runs (`tuple[Run, ...]`):
            The runs. The first is what the others are compared with.
        rollouts (`tuple[pd.DataFrame, ...]`):
            What `panels.rollouts` says of each.
        splits (`tuple[pd.DataFrame, ...]`):
            What `timing.time_split` says of each.
        rollout_window ([`Window`], *optional*):
            The steps of which all runs have rollouts.
        log_window ([`Window`], *optional*):
            The steps of which all runs that have a log have entries.
    """

    runs: tuple[Run, ...]
    rollouts: tuple[pd.DataFrame, ...]
    splits: tuple[pd.DataFrame, ...]
    rollout_window: Window | None
    log_window: Window | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Comparison:
        """Lines up runs."""
        tables = tuple(rollouts(run) for run in runs)
        return cls(
            tuple(runs),
            tables,
            tuple(time_split(run) for run in runs),
            common_window(tables),
            common_window([run.log for run in runs]),
        )

    @property
    def names(self) -> list[str]:
        """The runs' names."""
        return [run.name for run in self.runs]

    def in_rollout_window(self, tables: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
        """Of each run's table, the rows of the common steps with rollouts; none, where there are no such steps."""
        return [self.rollout_window.of(table) if self.rollout_window else table.iloc[:0] for table in tables]

    def in_log_window(self, tables: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
        """Of each run's table, the rows of the common steps with log entries; none, where there are no such steps."""
        return [self.log_window.of(table) if self.log_window else table.iloc[:0] for table in tables]

    def common_traces(self) -> list[pd.DataFrame]:
        """Each run's candidates of the steps that all runs with traces have."""
        windows = common_window(
            [table for run, table in zip(self.runs, self.rollouts, strict=True) if not run.traces.empty]
        )
        if windows is None:
            return [run.traces.iloc[:0] for run in self.runs]
        return [run.traces[run.traces["step"].between(windows.first, windows.last)] for run in self.runs]
