"""Pictures of `tiny_reasoner.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np


matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.reward_summary import (
    BASELINE,
    BASELINE_COLOR,
    WINDOW,
    Answers,
    Runs,
    caption,
    draw_mean,
    plain_log,
    smooth_known,
    style,
)
from trl_darts.plots import smooth


COLORS = {
    BASELINE: BASELINE_COLOR,
    "darts (paper)": "#0072b2",
    "darts, patience 2": "#d55e00",
    "darts, patience auto": "#009e73",
    "uniform selection, auto": "#cc79a7",
    "darts, L : K 2 : 6": "#17a2d4",
    "darts, L : K 4 : 4": "#7b4fb5",
    "shortest only": "#8b1a1a",
    "uniform redundancy": "#7f7f00",
    "grpo, length penalty": "#e69f00",
}
PANELS = {
    "How long is waited": (
        BASELINE,
        "darts (paper)",
        "darts, patience 2",
        "darts, patience auto",
        "uniform selection, auto",
    ),
    "What is kept, and other ways": (
        BASELINE,
        "darts, L : K 2 : 6",
        "darts, L : K 4 : 4",
        "shortest only",
        "uniform redundancy",
        "grpo, length penalty",
    ),
}
WAITS = PANELS["How long is waited"][:4]
SHOWN = (BASELINE, "darts (paper)", "darts, patience auto")  # of distributions
RIGHT, WRONG = "#0072b2", "#d55e00"


def draw_training(runs: Runs, path: Path) -> None:
    """Reward against steps and against time, mean and p99 of lengths; a row of panels for each question."""
    figure, panels = plt.subplots(2, 4, figsize=(17, 8), layout="constrained", sharex="col", sharey="col")
    for (title, names), axes in zip(PANELS.items(), panels, strict=True):
        for name in filter(runs.__contains__, names):
            own, color = runs[name], COLORS[name]
            rewards = [smooth(run.reward.tolist(), WINDOW) for run in own]
            draw_mean(axes[0], rewards, name, color)
            draw_mean(axes[1], rewards, name, color, np.mean([run.step_seconds.cumsum() for run in own], axis=0))
            draw_mean(axes[2], [smooth_known(run.length) for run in own], name, color)
            draw_mean(axes[3], [smooth_known(run.p99) for run in own], name, color)
        axes[0].set_title(title, loc="left", fontsize=11)
        axes[0].legend(frameon=False, fontsize=8, loc="lower right")
        axes[0].set(ylabel=f"right answers (mean of {WINDOW} steps)")
        axes[1].set(ylabel="right answers")
        axes[2].set(ylabel="mean length of all candidates")
        axes[3].set(ylabel="p99 length of all candidates")
        plain_log(axes[3].yaxis)
        for panel in axes:
            style(panel)
    for panel, label in zip(panels[-1], ("step", "seconds of whole steps", "step", "step"), strict=True):
        panel.set_xlabel(label)
    _save(figure, runs, path)


def draw_waits(prompts: Mapping[str, Runs], path: Path) -> None:
    """Tokens that each step waited for, one panel for each kind of prompts."""
    figure, panels = plt.subplots(1, len(prompts), figsize=(14, 4.2), layout="constrained", sharey=True)
    for panel, (kind, runs) in zip(panels, prompts.items(), strict=True):
        for name in filter(runs.__contains__, WAITS):
            waits = [smooth(run.critical.astype(float).tolist(), WINDOW) for run in runs[name]]
            draw_mean(panel, waits, name, COLORS[name])
        panel.set_title(f"prompts: {kind}", loc="left", fontsize=11)
        panel.set(xlabel="step")
        style(panel)
    panels[0].set(ylabel=f"tokens waited for (mean of {WINDOW} steps)")
    panels[0].legend(frameon=False, fontsize=8)
    _save(figure, prompts["both"], path)


def draw_distributions(before: Mapping[str, Mapping[str, Answers]], runs: Runs, path: Path) -> None:
    """Lengths of right and wrong answers to held-out prompts; a row of panels for each family."""
    easy = before["easy"]
    models: dict[str, dict[str, list[tuple[int, float]]]] = {"before": {f: list(own) for f, own in easy.items()}}
    for name in filter(runs.__contains__, SHOWN):
        models[name] = {f: [answer for run in runs[name] for answer in run.held_out["easy"][f]] for f in easy}
    shape = (len(easy), len(models))
    figure, panels = plt.subplots(
        *shape, figsize=(3.6 * shape[1], 6), layout="constrained", sharex=True, sharey="row", squeeze=False
    )
    for axes, family in zip(panels, easy, strict=True):
        for panel, (name, answers) in zip(axes, models.items(), strict=True):
            _draw_lengths(panel, answers[family])
            panel.set_title(f"{family}: {name}", loc="left", fontsize=11)
        axes[0].set(ylabel="share of answers")
    for panel in panels[-1]:
        panel.set(xlabel="length (tokens)")
    panels[0][0].legend(frameon=False, fontsize=8)
    _save(figure, runs, path, words="Answers to held-out prompts")


def _draw_lengths(panel: Any, answers: Sequence[tuple[int, float]]) -> None:
    lengths, rewards = np.array(answers).T
    edges = np.geomspace(2, 257, 29)
    for label, color, chosen in (("right", RIGHT, rewards == 1.0), ("wrong", WRONG, rewards != 1.0)):
        own = lengths[chosen]
        weights = np.full(len(own), 1 / len(lengths))
        panel.hist(own, edges, weights=weights, histtype="stepfilled", color=color, alpha=0.35, label=label)
        if len(own):
            panel.axvline(own.mean(), color=color, linestyle="--", linewidth=1.2)
    plain_log(panel.xaxis)
    panel.set_xticks([4, 8, 16, 32, 64, 128, 256], minor=False)
    panel.set_xticks([], minor=True)
    style(panel)


def _save(figure: Any, runs: Runs, path: Path, words: str = "") -> None:
    seeds = caption(max(len(own) for own in runs.values()))
    figure.suptitle(f"{words}. Dashed: mean length" if words else seeds, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
