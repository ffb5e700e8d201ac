"""Pictures of `tiny_reasoner.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from benchmarks.reward_summary import (
    ALL_CANDIDATES,
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
from trl_darts.analysis.plots import save_picture, smooth


COLORS = {
    BASELINE: BASELINE_COLOR,
    "darts (paper)": "C1",
    "darts, patience 2": "C2",
    "darts, patience auto": "C3",
    "uniform selection, auto": "C4",
    "darts, L : K 2 : 6": "C6",
    "darts, L : K 4 : 4": "C8",
    "shortest only": "C7",
    "uniform redundancy": "C9",
    "grpo, length penalty": "C5",
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
DPI = 110
RIGHT, WRONG = "C1", "C2"


def draw_training(runs: Runs, path: Path) -> None:
    """Reward against steps and against time, mean and p99 of lengths; a row of panels for each question."""
    save_picture(lambda: _training(runs), path, DPI)


def _training(runs: Runs) -> Any:
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
        axes[2].set(ylabel=f"mean length of {ALL_CANDIDATES}")
        axes[3].set(ylabel=f"p99 length of {ALL_CANDIDATES}")
        plain_log(axes[3].yaxis)
        for panel in axes:
            style(panel)
    for panel, label in zip(panels[-1], ("step", "seconds of whole steps", "step", "step"), strict=True):
        panel.set_xlabel(label)
    return _titled(figure, _seeds(runs))


def draw_waits(prompts: Mapping[str, Runs], path: Path) -> None:
    """Tokens that each step waited for, one panel for each kind of prompts."""
    save_picture(lambda: _waits(prompts), path, DPI)


def _waits(prompts: Mapping[str, Runs]) -> Any:
    shape = (1, len(prompts))
    figure, (panels,) = plt.subplots(*shape, figsize=(14, 4.2), layout="constrained", sharey=True, squeeze=False)
    for panel, (kind, runs) in zip(panels, prompts.items(), strict=True):
        for name in filter(runs.__contains__, WAITS):
            waits = [smooth(run.critical.astype(float).tolist(), WINDOW) for run in runs[name]]
            draw_mean(panel, waits, name, COLORS[name])
        panel.set_title(f"prompts: {kind}", loc="left", fontsize=11)
        panel.set(xlabel="step")
        style(panel)
    panels[0].set(ylabel=f"tokens waited for (mean of {WINDOW} steps)")
    panels[0].legend(frameon=False, fontsize=8)
    return _titled(figure, _seeds(*prompts.values()))


def draw_distributions(before: Mapping[str, Mapping[str, Answers]], runs: Runs, path: Path) -> None:
    """Lengths of right and wrong answers to held-out prompts; a row of panels for each family."""
    save_picture(lambda: _distributions(before, runs), path, DPI)


def _distributions(before: Mapping[str, Mapping[str, Answers]], runs: Runs) -> Any:
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
    return _titled(figure, "Answers to held-out prompts. Dashed: mean length")


def _draw_lengths(panel: Any, answers: Sequence[tuple[int, float]]) -> None:
    lengths, rewards = np.array(answers).T
    edges = np.geomspace(2, 257, 29)
    for label, color, chosen in (("right", RIGHT, rewards == 1.0), ("wrong", WRONG, rewards != 1.0)):
        own = lengths[chosen]
        weights = np.full(len(own), 1 / len(lengths))
        panel.hist(own, edges, weights=weights, histtype="stepfilled", color=color, alpha=0.5, label=label)
        if len(own):
            panel.axvline(own.mean(), color=color, linestyle="--", linewidth=1.2)
    plain_log(panel.xaxis)
    panel.set_xticks([4, 8, 16, 32, 64, 128, 256], minor=False)
    panel.set_xticks([], minor=True)
    style(panel)


def _seeds(*groups: Runs) -> str:
    return caption(max(len(own) for runs in groups for own in runs.values()))


def _titled(figure: Any, words: str) -> Any:
    figure.suptitle(words, fontsize=10)
    return figure
