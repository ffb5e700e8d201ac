"""Draws training runs and simulations on white, which is readable on light and dark pages."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ..import_utils import require_matplotlib
from .colors import GREY, PALETTE, color_of, colors_of


LogHistory = Sequence[Mapping[str, Any]]


def save_picture(draw: Callable[[], Any], path: str | Path, dpi: int = 150, names: Sequence[str] = ()) -> None:
    """Writes a picture, in which "C0", "C1", … are the colours of these names, or else of the palette."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot as plt

    settings: dict[Any, Any] = {"axes.prop_cycle": cycler(color=colors_of(names) or PALETTE), "grid.color": "#d5dae0"}
    with plt.rc_context(settings | {"axes.axisbelow": True, "axes.edgecolor": "#57606a"}):
        figure = draw()
        figure.savefig(path, dpi=dpi)  # inside the context: "C0" is looked up here
    plt.close(figure)


def series(log_history: LogHistory, name: str) -> list[float]:
    """Returns the values of one metric in `trainer.state.log_history`, without entries that lack it."""
    return [float(entry[name]) for entry in log_history if entry.get(name) is not None]


def smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Returns trailing means over up to `window` values."""
    return [float(np.mean(values[max(0, end - window) : end])) for end in range(1, len(values) + 1)]


def plot_comparison(runs: Mapping[str, LogHistory], path: str | Path) -> None:
    """Draws runs side by side: reward against steps and against time spent on rollouts, and lengths over training."""
    save_picture(lambda: _comparison(runs), path, names=list(runs))


def _comparison(runs: Mapping[str, LogHistory]) -> Any:
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (by_step, by_time, lengths) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for place, (name, log_history) in enumerate(runs.items()):
        reward = smooth(series(log_history, "reward"))
        style = {"color": f"C{place}", "marker": "o" if len(reward) == 1 else ""}  # one point makes no line
        seconds = list(accumulate(series(log_history, "darts/rollout/seconds")))
        steps = range(1, len(reward) + 1)
        by_step.plot(steps, reward, label=name, **style)
        by_time.plot(seconds[: len(reward)], reward, **style)
        lengths.plot(steps, smooth(series(log_history, "completions/mean_length")), **style)
        lengths.plot(steps, smooth(series(log_history, "darts/pool/length_p99")), linestyle="--", **style)
    by_step.set(xlabel="step", ylabel="reward (mean of 5 steps)", title="Reward against steps")
    by_time.set(xlabel="seconds of rollout", title="Reward against rollout time")
    lengths.set(xlabel="step", ylabel="tokens", title="Response lengths", yscale="log")
    for axes in (by_step, by_time, lengths):
        axes.grid()
    by_step.legend(frameon=False, fontsize=8)  # the colors are those of all axes
    lines = [lengths.plot([], [], color=GREY, linestyle=style)[0] for style in ("-", "--")]
    labels = ["rows trained on, mean", "all candidates, p99 (aborted ones: tokens until then)"]
    figure.legend(lines, labels, loc="outside lower right", ncols=2, frameon=False, fontsize=8)
    lengths.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    lengths.yaxis.set_major_formatter("{x:.0f}")
    lengths.yaxis.set_minor_formatter(NullFormatter())
    return figure


def plot_simulation(outcomes: Sequence[Any], path: str | Path) -> None:
    """Draws a simulation's comparison: speed-ups over the first of the `outcomes`, and their costs."""
    save_picture(lambda: _simulation(outcomes), path)


def _simulation(outcomes: Sequence[Any]) -> Any:
    from matplotlib import pyplot as plt

    names = [outcome.name.replace(", ", "\n") for outcome in outcomes]
    rows = range(len(names))
    height = 1.8 + sum(0.15 + 0.2 * len(name.splitlines()) for name in names)
    figure, (speed, cost) = plt.subplots(1, 2, figsize=(12, height), layout="constrained", sharey=True)
    speedups = [outcome.speedup for outcome in outcomes]
    whiskers = [speedup.half_width if speedup.half_width < 1e3 else 0.0 for speedup in speedups]
    colors = [color_of(outcome.name) or GREY for outcome in outcomes]
    speed.barh(rows, [speedup.mean for speedup in speedups], xerr=whiskers, color=colors, error_kw={"capsize": 3})
    speed.axvline(1.0, color="0.3", linewidth=1, linestyle="--")
    speed.set(yticks=rows, yticklabels=names, xlabel="speed-up over the first (95 % interval over seeds)")
    speed.invert_yaxis()
    quantities = {
        "wasted tokens": [outcome.estimate("wasted_share").mean for outcome in outcomes],
        "idle slots (bubble)": [outcome.estimate("bubble_ratio").mean for outcome in outcomes],
        "kept / pool length": [outcome.estimate("kept_vs_pool_length_ratio").mean for outcome in outcomes],
    }
    for place, (label, values) in enumerate(quantities.items(), start=1):
        cost.plot(values, rows, linestyle="none", marker="osD"[place - 1], color=f"C{place + 2}", label=label)
    cost.set(xlabel="share, or ratio", xlim=(0, None))
    figure.legend(*cost.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside upper right", ncols=3)
    for axes in (speed, cost):
        axes.grid(axis="x")
    return figure
