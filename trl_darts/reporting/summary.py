"""
The top of the page: what was gained and why, in sentences, cards and one table.

Invariant: each number says over which steps it is, and numbers of several runs are over the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from .compare import Comparison
from .formats import number, percent, plus_minus, times


UNKNOWN = "–"


@dataclass(frozen=True)
class Quantity:
    """
    One quantity of all runs.

    Args:
        key (`str`):
            Its short name.
        label (`str`):
            What it is, with its unit.
        values (`list[float]`):
            One per run, NaN where it is unknown.
        cells (`list[str]`):
            The same, to be read.
        over (`str`):
            What it is a mean of.
        stds (`list[float]`, *optional*):
            Standard deviations that belong to the values.
    """

    key: str
    label: str
    values: list[float]
    cells: list[str]
    over: str
    stds: list[float] | None = None

    def ratio(self, index: int) -> str:
        """A run's value as a multiple of the first run's, as text. Empty for the first, and where it says nothing."""
        first, value = self.values[0], self.values[index]
        if index == 0 or not (first > 0 and math.isfinite(value)) or self.key.startswith("reward"):
            return ""
        return times(value / first)


@dataclass(frozen=True)
class Ends:
    """
    Reward at one end of training.

    Args:
        mean (`float`):
            Over log entries.
        std (`float`):
            Standard deviation (Bessel's) between them; NaN for a single one.
        num (`int`):
            How many there are.
    """

    mean: float
    std: float
    num: int

    def __str__(self) -> str:
        if not self.num:
            return UNKNOWN
        return plus_minus(self.mean, self.std)


def reward_ends(rewards: pd.Series) -> tuple[Ends, Ends]:
    """
    Reward in the first and in the last third of the entries, at least one each.

    Args:
        rewards (`pd.Series`):
            By step.

    Returns:
        `tuple[Ends, Ends]`: First and last third.
    """
    rewards = rewards.dropna()
    third = max(1, len(rewards) // 3)
    first, last = rewards.iloc[:third], rewards.iloc[len(rewards) - third :]
    return Ends(first.mean(), first.std(), len(first)), Ends(last.mean(), last.std(), len(last))


def quantities(comparison: Comparison) -> list[Quantity]:
    """
    What the table shows.

    Args:
        comparison ([`Comparison`]):
            Runs.

    Returns:
        `list[Quantity]`: Those that at least one run tells.
    """
    found = [*_of_log(comparison), *_of_rollouts(comparison), *_of_rewards(comparison)]
    return [quantity for quantity in found if any(map(math.isfinite, quantity.values))]


def _of_log(comparison: Comparison) -> list[Quantity]:
    splits = comparison.in_log_window(comparison.splits)
    seconds = [weighted_mean(split, "total") for split in splits]
    generate = [weighted_mean(split, "generate") for split in splits]
    share = [part / whole if whole else math.nan for part, whole in zip(generate, seconds, strict=True)]
    over = f"{comparison.log_window}, from the log"
    return [
        Quantity("step", "Seconds per step", seconds, _cells(seconds), over),
        Quantity("share", "Share of a step in rollouts", share, _cells(share, percent), over),
    ]


def _of_rollouts(comparison: Comparison) -> list[Quantity]:
    over = f"rollouts of {comparison.rollout_window}"
    tables = comparison.in_rollout_window(comparison.rollouts)
    sums = [table.sum() for table in tables]
    generated = [_sum(total, "kept", "unused", "aborted") for total in sums]
    wasted = [_sum(total, "unused", "aborted") for total in sums]
    weights = [table["num_rollouts"] for table in tables]

    def per_rollout(values: Sequence[float]) -> list[float]:
        return [_divide(value, total["num_rollouts"]) for value, total in zip(values, sums, strict=True)]

    def mean(column: str) -> list[float]:
        pairs = zip(tables, weights, strict=True)
        return [_divide((table[column] * weight).sum(min_count=1), weight.sum()) for table, weight in pairs]

    seconds = per_rollout([total["seconds"] for total in sums])
    longest, idle, tokens = mean("longest"), mean("bubble"), per_rollout(generated)
    waste = [_divide(part, whole) for part, whole in zip(wasted, generated, strict=True)]
    aborted = [_divide(total["aborted"], whole) for total, whole in zip(sums, generated, strict=True)]
    redundancy = [_divide(total["candidates"], total["rows"]) for total in sums]
    shape = [
        _divide(_divide(total["kept"], total["rows"]), _divide(whole, total["candidates"]))
        for total, whole in zip(sums, generated, strict=True)
    ]
    return [
        Quantity("rollout", "Seconds per rollout", seconds, _cells(seconds), over),
        Quantity("longest", "Longest candidate, tokens", longest, _cells(longest), over),
        Quantity("bubble", "Bubble: decoding slots that stood idle", idle, _cells(idle, percent), over),
        Quantity("candidates", "Candidates per row trained on", redundancy, _cells(redundancy), over),
        Quantity("tokens", "Tokens generated per rollout", tokens, _cells(tokens), over),
        Quantity("waste", "Tokens thrown away", waste, _cells(waste, percent), over),
        Quantity("aborted", "… of aborted candidates", aborted, _cells(aborted, percent), over),
        Quantity("shape", "Mean length, kept rows / pool", shape, _cells(shape), over),
    ]


def _of_rewards(comparison: Comparison) -> list[Quantity]:
    logs = comparison.in_log_window([run.log for run in comparison.runs])
    ends = [reward_ends(log["reward"] if "reward" in log else pd.Series(dtype=float)) for log in logs]
    rows = []
    for place, name in enumerate(("first", "last")):
        own = [end[place] for end in ends]
        num = max(end.num for end in own)
        over = f"{name} third of {comparison.log_window}: {num} log entr{'y' if num == 1 else 'ies'}, ± their std"
        means, stds = [end.mean for end in own], [end.std for end in own]
        rows.append(Quantity(f"reward_{name}", f"Reward, {name} third", means, list(map(str, own)), over, stds))
    return rows


def weighted_mean(table: pd.DataFrame, column: str) -> float:
    """
    The mean over optimizer steps of what log entries tell.

    Args:
        table (`pd.DataFrame`):
            By log entry, with `num_steps`.
        column (`str`):
            Of which column. Rows without a value don't count.

    Returns:
        `float`: NaN where no row has a value.
    """
    known = table[table[column].notna()]
    return _divide((known[column] * known["num_steps"]).sum(), known["num_steps"].sum())


def _sum(total: pd.Series, *names: str) -> float:
    return float(sum(total[name] for name in names))


def _divide(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def _cells(values: Sequence[float], form: Callable[[float], str] = number) -> list[str]:
    return [form(value) if math.isfinite(value) else UNKNOWN for value in values]
