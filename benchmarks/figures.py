"""
Draws the figures of docs/results.md from raw lines of `benchmarks/results`.

    python -m benchmarks.figures [--output docs/figures]

Each is 360 pixels wide, so that its letters are as large as a page's on a phone and on a screen, and has a white
ground, which dark pages leave as it is. The same lines and the same matplotlib give the same bytes.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import geometric
from benchmarks.lines import RESULTS, ROOT
from benchmarks.page_numbers import NUMBERS, WITHIN
from benchmarks.smollm2 import against_trl as runs_against_trl
from benchmarks.smollm2 import parts_of
from benchmarks.speedups import (
    Pairs,
    agreement,
    continuous,
    each,
    learning,
    mean_of,
    reward_difference,
    simulated,
    smollm2,
    time_to_reward,
    training,
)
from trl_darts.analysis.colors import BLUE, GREEN, GREY, GRID, INK, MUTED, OLIVE, PALETTE, PURPLE, VERMILION
from trl_darts.analysis.estimates import Estimate


WIDTH = 3.75  # inches of 96 pixels: as wide as the text on a phone
COLORS = {  # of arms, the same in all figures
    "GRPO": GREY,
    "TRL": MUTED,
    "default": BLUE,
    "guard off": PALETTE[6],
    "paper": VERMILION,
    "ahead": PALETTE[8],
    "continuous": PALETTE[7],
    "tail batching": GREEN,
    "partial rollout": PURPLE,
    "sorted": OLIVE,
}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "trl_darts",
    "svg.fonttype": "none",  # letters stay letters
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "lines.linewidth": 1.8,
}
FOREST = {  # by basis: label, number and colour
    "Real GPU (H100)": [
        ("default, step", "gpu.step", "default"),
        ("default, rollout", "gpu.rollout", "default"),
        ("GRPO over TRL's", "gpu.trl", "GRPO"),
    ],
    "Real server at a GPU's pace": [
        ("paper", "paced.paper", "paper"),
        ("guard off", "paced.unguarded", "guard off"),
        ("rollout_ahead=1", "paced.ahead", "ahead"),
        ("partial rollout", "paced.partial_rollout", "partial rollout"),
        ("equal lengths", "equal", "guard off"),
        ("SmolLM2, new", "rollouts.default.new", "guard off"),
        ("SmolLM2, known", "rollouts.default.known", "guard off"),
    ],
    "Virtual time": [
        ("GRPO, continuous", "continuous.grpo", "continuous"),
        ("paper", "learning.paper", "paper"),
        ("default", "learning.default", "default"),
        ("guard off", "learning.unguarded", "guard off"),
        ("default, easy task", "learning.easy", "default"),
        ("default, long right", "learning.needs_120", "default"),
        ("guard off, long right", "learning.needs_120.unguarded", "guard off"),
        ("full engine", "engines.1", "guard off"),
    ],
    "Two CPU cores": [
        ("GRPO over TRL's", "cpu.exact", "GRPO"),
        ("default, step", "cpu.step", "default"),
        ("SmolLM2, new", "cpu.new", "guard off"),
        ("SmolLM2, known", "rollouts.default.cpu", "guard off"),
    ],
}
ROW, MARGIN = 0.25, 0.6  # inches


def forest(plt: Any) -> Any:
    """Every speed-up with its interval, by basis."""
    height = ROW * (sum(map(len, FOREST.values())) + 2 * len(FOREST)) + MARGIN
    figure, axes = plt.subplots(figsize=(WIDTH, height))
    figure.subplots_adjust(left=0.5, right=0.86, top=1.0, bottom=MARGIN / height)
    place, write = 0.0, partial(axes.text, transform=axes.get_yaxis_transform(), va="center")
    for basis, numbers in FOREST.items():
        place += 1
        write(-1.34, place, basis, weight="bold", backgroundcolor="white")
        for label, name, arm in numbers:
            place += 1
            mean, low, high = geometric(NUMBERS[name].values())
            axes.plot([low, high], [place, place], color=COLORS[arm], linewidth=2.4, solid_capstyle="butt")
            axes.plot(mean, place, "o", color=COLORS[arm], markersize=6)
            write(-1.34, place, label)
            write(1.06, place, f"{mean:.2f}")
        place += 0.6
    axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    axes.set(ylim=(place, 0), xlabel="speed-up over GRPO", yticks=[])
    _ratios(axes)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure


def _ratios(axes: Any) -> None:
    """A logarithmic axis of ratios."""
    axes.set(xscale="log", xlim=(0.36, 4.4))
    axes.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.minorticks_off()


def reward(plt: Any) -> Any:
    """Reward of plain sampling against seconds: means and ranges over seeds, in virtual time and on a server."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 6.2))
    figure.subplots_adjust(left=0.19, right=0.97, top=0.95, bottom=0.085, hspace=0.36)
    virtual = {  # arm: label, its side and its shift to the right in points, runs
        "continuous": ("GRPO,\ncontinuous", "right", 9, continuous("grpo, continuous")),
        "default": ("default", "left", 8, learning("published", "default")),
        "paper": ("paper", "right", -4, learning("published", "paper")),
        "GRPO": ("GRPO", "center", 3, learning("published", "grpo")),
    }
    real = {
        "ahead": ("one batch\nahead", "right", 8, training("tail", "default_ahead")),
        "guard off": ("guard off", "left", -3, training("tail", "default")),
        "paper": ("paper", "right", 0, training("tail", "darts_paper")),
        "GRPO": ("GRPO", "center", 5, training("tail", "grpo")),
    }
    for axes, name, arms in ((above, "hard", virtual), (below, "reward", real)):
        for arm, (label, side, shift, pairs) in arms.items():
            end = _curve(axes, pairs, name, COLORS[arm])
            axes.annotate(label, end, (shift, 3), textcoords="offset points", ha=side, va="bottom", linespacing=1.0)
        axes.grid()
    above.set(title="Virtual time", ylabel="reward", xlim=(0, 570), ylim=(0.37, 0.82))
    below.set(title="Real server at a GPU's pace", ylabel="reward", xlabel="seconds", xlim=(0, 320), ylim=(0.38, 0.62))
    return figure


def _curve(axes: Any, pairs: Pairs, name: str, color: str) -> tuple[float, float]:
    """Draws an arm's mean and its range over seeds, up to the reward at GRPO's end. Returns where the mean ends."""
    runs = [(run["now"] if "now" in run else np.cumsum(run["seconds"]), np.array(run[name])) for run, _ in pairs]
    target, low = min(base[name][-1] for _, base in pairs), max(reward[0] for _, reward in runs)
    grid = np.linspace(low, target, 60)
    seconds = np.array([np.interp(grid, np.maximum.accumulate(reward), now) for now, reward in runs])
    axes.fill_betweenx(grid, seconds.min(0), seconds.max(0), color=color, alpha=0.25, linewidth=0)
    axes.plot(seconds.mean(0), grid, color=color)
    return float(seconds.mean(0)[-1]), float(target)


WORLDS = {
    "published": "as published",
    "longer": "long often right",
    "spread": "no equal groups",
    "rare": "rarely right",
    "turns": "rare and easy",
    "easy": "easy",
    "endless": "10 % endless",
    "needs_80": "needs 80 tokens",
    "needs_120": "needs 120 tokens",
    "needs_120_small": "120, small batch",
}
WORLD_ARMS = {"default": "default", "unguarded": "guard off", "paper": "paper"}


def worlds(plt: Any) -> Any:
    """Time to reward and reward at the end, by world, for the default, without its guard, and as in the paper."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 8.2))
    figure.subplots_adjust(left=0.45, right=0.97, top=0.925, bottom=0.04, hspace=0.22)
    for axes, value, middle in ((above, time_to_reward, 1.0), (below, reward_difference, 0.0)):
        for place, world in enumerate(WORLDS):
            for offset, (arm, name) in zip((-0.25, 0, 0.25), WORLD_ARMS.items(), strict=True):
                found = each(learning(world, arm), value)
                mean, low, high = geometric(found) if middle else _interval(found)
                axes.plot([low, high], [place + offset] * 2, color=COLORS[name], linewidth=2, solid_capstyle="butt")
                axes.plot(mean, place + offset, "o", color=COLORS[name], markersize=5)
        axes.axvline(middle, color=MUTED, linewidth=1, zorder=1)
        axes.set_yticks(range(len(WORLDS)), WORLDS.values())
        axes.set_ylim(len(WORLDS) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    _ratios(above)
    below.set_xticks([-0.1, -0.05, 0], ["−0.1", "", "0"])
    figure.text(0.02, 0.975, "Time to reward: speed-up over GRPO", weight="bold")
    for x, arm in ((0.02, "default"), (0.33, "guard off"), (0.68, "paper")):
        figure.text(x, 0.945, "●", color=COLORS[arm])
        figure.text(x + 0.05, 0.945, arm)
    figure.text(0.02, below.get_position().y1 + 0.01, "Reward at the end minus GRPO's", weight="bold")
    return figure


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    own = Estimate.of(values)
    return own.mean, own.mean - own.half_width, own.mean + own.half_width


PARTS = {"rollout": "darts/rollout/seconds", "sync": "darts/sync/seconds", "training": "darts/train/seconds"}


def anatomy(plt: Any) -> Any:
    """Seconds of a step on the H100, by what they are spent on."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    figure.subplots_adjust(left=0.17, right=0.99, top=0.99, bottom=0.04)
    for place, arm in enumerate(("GRPO", "default")):
        runs = [run for run, _ in smollm2("smollm2.gpu", arm.lower())]
        total = float(np.mean([mean_of(run, "step_seconds") for run in runs]))
        parts = {name: float(np.mean([mean_of(run, key) for run in runs])) for name, key in PARTS.items()}
        _stack(axes, place, arm, parts | {"rest": total - sum(parts.values())}, 2.8, ".2f")
    return figure


def against_trl(plt: Any) -> Any:
    """Seconds of a step on two cores, of TRL's class and of our GRPO, by what they are spent on."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    figure.subplots_adjust(left=0.17, right=0.99, top=0.99, bottom=0.04)
    arms = {arm: parts_of(runs) for arm, runs in runs_against_trl(RESULTS).items()}
    for place, (arm, parts) in enumerate(arms.items()):
        _stack(axes, place, arm, parts, 1.1 * max(sum(own.values()) for own in arms.values()), ".0f")
    return figure


def _stack(axes: Any, place: int, arm: str, parts: Mapping[str, float], top: float, form: str) -> None:
    """Draws the parts of a step on each other. Parts that are too flat for a label have none."""
    total = sum(parts.values())
    for (name, seconds), begin in zip(parts.items(), accumulate([0.0, *parts.values()]), strict=False):
        axes.bar(place, seconds, bottom=begin, width=0.94, color=COLORS[arm], edgecolor="white", linewidth=1.5)
        if seconds > 0.04 * top and len(parts) > 1:
            label = f"{name} {seconds:{form}}"
            axes.text(place, begin + seconds / 2, label, ha="center", va="center", color="white")
    axes.text(place, total + 0.015 * top, f"{arm} {total:{form}}", ha="center", weight="bold")
    axes.set(ylim=(0, top), ylabel="seconds of a step")
    axes.set_xticks([])


SHARES = (0.0, 0.002, 0.01)
SPARE = {"8": 0.0, "9": 0.0, "10": 0.01, "11": -0.015, "12": 0.0}  # `min_num_generations`, and how its label moves
SLOTS = ("N·M/16", "N·M/4", "N·M", "no limit")
LENGTHS = {  # labels, and how they move
    "heavy tails": ("heavy tails", 0.0),
    "1 % never end": ("1 % endless", 0.0),
    "all equal": ("all equal", -0.01),
    "equal within a prompt": ("equal within\na prompt", 0.022),
}


def endless(plt: Any) -> Any:
    """Speed-up of rollouts against the share of never-ending answers, and against slots."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 6.4))
    figure.subplots_adjust(left=0.17, right=0.72, top=0.95, bottom=0.085, hspace=0.42)
    for least, moved in SPARE.items():
        found = [geometric(simulated("spare", least, share=share))[0] for share in SHARES]
        _line(above, found, f"{least} (default)" if least == "10" else least, least == "10", moved)
    above.set_xticks(range(len(SHARES)), ["0 %", "0.2 %", "1 %"])
    above.set(title="By min_num_generations", xlabel="answers that never end", ylabel="speed-up")
    for lengths, (label, moved) in LENGTHS.items():
        found = [geometric(simulated("slots", slots, lengths=lengths))[0] for slots in SLOTS]
        _line(below, found, label, True, moved)
    below.set_xticks(range(len(SLOTS)), ["N·M\n÷ 16", "N·M\n÷ 4", "N·M", "no\nlimit"])
    below.set(title="By slots of the engines", ylabel="speed-up")
    for axes in (above, below):
        axes.axhline(1, color=MUTED, linewidth=1, zorder=1)
        axes.grid(axis="y")
    return figure


def _line(axes: Any, values: Sequence[float], label: str, is_default: bool, moved: float = 0.0) -> None:
    """Draws a line of dots with a label at its end."""
    look = {"color": COLORS["guard off"], "zorder": 3} if is_default else {"color": MUTED, "linewidth": 1.2}
    axes.plot(range(len(values)), values, "o-", markersize=5, **look)
    axes.text(len(values) - 0.9, values[-1] + moved, label, va="center")


def simulator(plt: Any) -> Any:
    """Speed-ups in virtual time against those on a server."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.75))
    figure.subplots_adjust(left=0.15, right=0.97, top=0.97, bottom=0.15)
    ends = np.array([0.7, 4.0])
    axes.fill_between(ends, ends / math.exp(WITHIN), ends * math.exp(WITHIN), color=GRID, linewidth=0)
    axes.plot(ends, ends, color=MUTED, linewidth=1)
    for pace, schedule, _, real, virtual in agreement():
        color = COLORS["guard off"] if schedule == "default" else GREY
        axes.plot(real, virtual, "o", color=color, markersize=6, fillstyle="full" if pace == "paced" else "none")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="speed-up on a server", ylabel="speed-up in virtual time")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([1, 2, 3], ["1", "2", "3"])
    axes.minorticks_off()
    for place, (style, label) in enumerate((("full", "at a GPU's pace"), ("none", "on two cores"))):
        axes.plot(1.62, 0.95 - 0.12 * place, "o", color=GREY, fillstyle=style, markersize=6)
        axes.text(1.75, 0.95 - 0.12 * place, label, va="center")
    return figure


FIGURES: dict[str, Callable[[Any], Any]] = {
    "results_forest": forest,
    "results_reward": reward,
    "results_worlds": worlds,
    "results_anatomy": anatomy,
    "results_against_trl": against_trl,
    "results_endless": endless,
    "results_simulator": simulator,
}


def draw(name: str, path: Path) -> None:
    """Draws a figure into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure = FIGURES[name](plt)
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draws all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        draw(name, options.output / f"{name}.svg")


if __name__ == "__main__":
    main()
