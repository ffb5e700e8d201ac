"""The page's first words: what was gained and why, or what must be known before numbers are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .compare import Comparison, Setting, same_prompts
from .formats import faster, listing, number, percent, times
from .panels import length_stats
from .summary import Quantity, weighted_mean


@dataclass(frozen=True)
class Card:
    """
    One question's answer, run by run.

    Args:
        title (`str`):
            What it is.
        values (`list[str]`):
            One per run.
        remark (`str`):
            How the last run stands to the first, or over what the numbers are.
    """

    title: str
    values: list[str]
    remark: str


SUSPICIOUS = 1.5  # times as long for a step's training as its rows' lengths explain

CARDS = {
    "step": "Seconds per step",
    "rollout": "Seconds per rollout",
    "bubble": "Bubble",
    "waste": "Tokens thrown away",
    "shape": "Length, kept / pool",
    "reward_last": "Reward at the end",
}


def cards(rows: Sequence[Quantity]) -> list[Card]:
    """The quantities that answer most. A card without a value in any run is left out."""
    found = {row.key: row for row in rows}
    return [Card(title, found[key].cells, _remark(found[key])) for key, title in CARDS.items() if key in found]


def _remark(row: Quantity) -> str:
    if len(row.values) == 2 and row.key in ("step", "rollout") and all(value > 0 for value in row.values):
        return f"{faster(row.values[1] / row.values[0])}, {row.over}"
    return row.over


def verdict(
    comparison: Comparison, rows: Sequence[Quantity], settings: Sequence[Setting] = ()
) -> list[tuple[str, list[str]]]:
    """
    What the numbers say, in sentences.

    Args:
        comparison ([`Comparison`]):
            Runs.
        rows (`Sequence[Quantity]`):
            What `quantities` made of them.
        settings (`Sequence[Setting]`, *optional*):
            What `compare_settings` made of them: a heading says where runs did different work.

    Returns:
        `list[tuple[str, list[str]]]`: A heading and sentences for each run but the first; for a single run, of itself.
    """
    found = {row.key: row for row in rows}
    names = comparison.names
    if len(names) == 1:
        return [(f"{names[0]}, by itself", _alone(found))]
    return [
        (f"{names[i]} against {names[0]}{_unlike(i, settings)}", _against(found, i, names))
        for i in range(1, len(names))
    ]


def _unlike(i: int, settings: Sequence[Setting]) -> str:
    unlike = [setting.name for setting in settings if setting.tells_apart(i)]
    return f" (not the same work: {listing(unlike)})" if unlike else ""


def _alone(found: Mapping[str, Quantity]) -> list[str]:
    sentences = []
    if (step := _pair(found, "step", 0)) and (share := _pair(found, "share", 0)):
        sentences.append(f"A step took {number(step[0])} s, {percent(share[0])} of it in rollouts.")
    if (bubble := _pair(found, "bubble", 0)) and (longest := _pair(found, "longest", 0)):
        sentences.append(
            f"{percent(bubble[0])} of the decoding slots stood idle; the longest candidate of a rollout was "
            f"{number(longest[0])} tokens."
        )
    if waste := _pair(found, "waste", 0):
        sentences.append(f"{percent(waste[0])} of the generated tokens were thrown away.")
    return [*sentences, 'Name a second run, such as one with `schedule="grpo"`, to see what was gained.']


def _against(found: Mapping[str, Quantity], i: int, names: Sequence[str]) -> list[str]:
    sentences = []
    if step := _pair(found, "step", i):
        sentences.append(
            f"A step took {number(step[1])} s instead of {number(step[0])} s: {faster(step[1] / step[0])}."
        )
    if rollout := _pair(found, "rollout", i):
        sentences.append(
            f"A rollout took {number(rollout[1])} s instead of {number(rollout[0])} s: "
            f"{faster(rollout[1] / rollout[0])}."
        )
    if (longest := _pair(found, "longest", i)) and (bubble := _pair(found, "bubble", i)):
        is_why = rollout is not None and (rollout[1] < rollout[0]) == (longest[1] < longest[0])
        sentences.append(
            f"{'Why: its' if is_why else 'Its'} longest candidate was {number(longest[1])} instead of "
            f"{number(longest[0])} tokens (mean over rollouts), and {percent(bubble[1])} instead of "
            f"{percent(bubble[0])} of the decoding slots stood idle."
        )
    if (tokens := _pair(found, "tokens", i)) and (waste := _pair(found, "waste", i)) and tokens[0]:
        sentences.append(
            f"It generated {times(tokens[1] / tokens[0])} the tokens, and threw away {percent(waste[1])} of them "
            f"({names[0]}: {percent(waste[0])})."
        )
    if (shape := _pair(found, "shape", i)) and abs(shape[1] - 1) > 0.005:
        word = "shorter" if shape[1] < 1 else "longer"
        sentences.append(
            f"The data changed: rows it trained on were {word} than all it sampled ({times(shape[1])} in the mean)."
        )
    if _pair(found, "reward_last", i):
        row = found["reward_last"]
        sentences.append(
            f"Reward at the end: {row.cells[i]}, and {row.cells[0]} of {names[0]}: {_difference(row, i)} ({row.over})."
        )
    return sentences


def _difference(row: Quantity, i: int) -> str:
    """How a run's mean stands to the first run's, and whether that is more than what both scatter."""
    change = row.values[i] - row.values[0]
    if not change:
        return "the same"
    word = "more" if change > 0 else "less"
    largest = max((std for std in (row.stds or []) if math.isfinite(std)), default=0.0)
    return f"{word}, but by less than their std" if abs(change) < largest else word


def _pair(found: Mapping[str, Quantity], key: str, i: int) -> tuple[float, float] | None:
    """A quantity of the first run and of another, where both are known."""
    if key not in found:
        return None
    first, own = found[key].values[0], found[key].values[i]
    return (first, own) if math.isfinite(first) and math.isfinite(own) else None


def cautions(comparison: Comparison, settings: Sequence[Setting]) -> list[str]:
    """
    What a reader must know before he compares.

    Args:
        comparison ([`Comparison`]):
            Runs.
        settings (`Sequence[Setting]`):
            What `compare_settings` made of them.

    Returns:
        `list[str]`: Sentences; none, where nothing stands in the way.
    """
    runs = comparison.runs
    found = []
    if matters := [setting.name for setting in settings if setting.matters]:
        found.append(
            f"The runs did different work: they differ in {listing(matters)}. Times, tokens and rewards are those of "
            "different tasks; don't take a ratio for a gain."
        )
    if len(runs) > 1 and (unknown := [run.name for run in runs if not run.settings]):
        found.append(
            f"Settings of {listing(unknown)} are unknown, so it can't be said whether the runs did the same work."
        )
    if len({run.num_steps for run in runs}) > 1:
        counts = listing([f"{run.name} {run.num_steps}" for run in runs])
        found.append(f"The runs have different numbers of steps ({counts}). Comparisons are over the steps all have.")
    if len(runs) > 1 and comparison.rollout_window is None:
        found.append("There is no step of which all runs have rollouts: nothing about them can be compared.")
    if len(runs) > 1 and comparison.log_window is None and any(not run.log.empty for run in runs):
        found.append("There is no step of which all runs have a log entry: times and rewards can't be compared.")
    found += _busy_machine(comparison, settings)
    if (prompts := same_prompts(runs)) and prompts[0] < prompts[1]:
        found.append(
            f"The runs saw the same prompts in {prompts[0]} of {prompts[1]} common steps only: their order or data "
            "differ."
        )
    return found


def _busy_machine(comparison: Comparison, settings: Sequence[Setting]) -> list[str]:
    """
    Forward and backward cost about the same per token in all runs, be it per token of the rows or per token with
    padding. Where they don't, something else ran beside a training, and all its seconds are in doubt.
    """
    splits = comparison.in_log_window(comparison.splits)
    seconds = [weighted_mean(split, "train") for split in splits]
    sizes = comparison.in_log_window([length_stats(run, kept=True) for run in comparison.runs])
    found = []
    for i in range(1, len(seconds)):
        if any(setting.tells_apart(i) for setting in settings):
            continue  # it was other work anyway
        ratios = [
            (seconds[i] / seconds[0]) / (sizes[i][stat].mean() / sizes[0][stat].mean())
            for stat in ("mean", "max")
            if seconds[0] and stat in sizes[i] and stat in sizes[0]
        ]
        if ratios and (min(ratios) > SUSPICIOUS or max(ratios) < 1 / SUSPICIOUS):
            found.append(
                f"Training itself, forward and backward, took {number(seconds[0])} s a step in {comparison.names[0]} "
                f"and {number(seconds[i])} s in {comparison.names[i]}, and their rows' lengths don't explain it. If "
                "other work ran beside one of them, none of their seconds can be compared."
            )
    return found
