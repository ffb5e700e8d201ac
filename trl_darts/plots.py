"""Figures from the logs of training runs, for light pages and for dark ones."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from .import_utils import require_matplotlib
from .reporting.drawing import INK


LogHistory = Sequence[Mapping[str, Any]]
# "C0" to "C10" in what is drawn. The first is the baseline's. In the dark, the same hues, light enough to be read.
_COLORS = (
    ("#595959", "#c4c4c4"),  # grey
    ("#0072b2", "#4aa8f0"),  # blue
    ("#d55e00", "#ff8a4c"),  # vermilion
    ("#009e73", "#3fcf9f"),  # green
    ("#cc79a7", "#f29ac9"),  # pink
    ("#e69f00", "#ffbf47"),  # amber
    ("#17a2d4", "#5cc3ff"),  # cyan
    ("#8b1a1a", "#ff7676"),  # red
    ("#7b4fb5", "#b79bff"),  # purple
    ("#7f7f00", "#cdcd58"),  # olive
    ("#2fb59a", "#45d6a0"),  # teal
)
PALETTES = dict(zip(("light", "dark"), zip(*_COLORS, strict=True), strict=True))
SURFACES = {"light": "#ffffff", "dark": "#1e2129"}  # dark: that of the site's pages, so that figures have no edge


def save_light_and_dark(draw: Callable[[], Any], path: str | Path, dpi: int = 150) -> None:
    """
    Saves a figure as `path`, on white, and once more for dark pages, beside it and with `_dark` after its name.

    Args:
        draw (`Callable[[], matplotlib.figure.Figure]`):
            Draws it. Is called for each scheme, and leaves colors to matplotlib or names them `"C0"` to `"C10"`: these
            are others in the dark.
        path (`str` or `Path`):
            Where to write the light one. The ending decides about the format.
        dpi (`int`, *optional*, defaults to `150`):
            Pixels per inch.

    Raises:
        [`ImportError`]: If matplotlib is missing.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path = Path(path)
    for scheme, place in (("light", path), ("dark", path.with_name(f"{path.stem}_dark{path.suffix}"))):
        with plt.rc_context(_colors(scheme)):
            figure = draw()
            figure.savefig(place, dpi=dpi)  # inside: "C0" is looked up only now
        plt.close(figure)


def _colors(scheme: str) -> dict[str, Any]:
    """Matplotlib's settings for a scheme."""
    from cycler import cycler

    parts = {
        "ink": ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
        "muted": ("axes.edgecolor", "xtick.color", "ytick.color"),
        "grid": ("grid.color",),
    }
    settings: dict[str, Any] = {name: INK[scheme][part] for part, names in parts.items() for name in names}
    settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), SURFACES[scheme])
    return settings | {"axes.prop_cycle": cycler(color=PALETTES[scheme]), "axes.axisbelow": True}


def series(log_history: LogHistory, name: str) -> list[float]:
    """
    The values of one metric, in the order in which they were logged.

    Args:
        log_history (`Sequence[Mapping[str, Any]]`):
            `trainer.state.log_history`.
        name (`str`):
            The metric.

    Returns:
        `list[float]`: The values; entries without the metric are left out.
    """
    return [float(entry[name]) for entry in log_history if entry.get(name) is not None]


def plot_comparison(runs: Mapping[str, LogHistory], path: str | Path) -> None:
    """
    Draws runs side by side: reward against steps and against time spent on rollouts, and lengths over training.

    Args:
        runs (`Mapping[str, LogHistory]`):
            Log history by the run's name. Each entry must stand for one step (`logging_steps=1`).
        path (`str` or `Path`):
            Where to write the picture; that for dark pages goes beside it, see [`save_light_and_dark`].

    Raises:
        [`ImportError`]: If matplotlib is missing.
    """
    save_light_and_dark(lambda: _comparison(runs), path)


def _comparison(runs: Mapping[str, LogHistory]) -> Any:
    from matplotlib import pyplot as plt

    figure, (by_step, by_time, lengths) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for color, (name, log_history) in zip((f"C{number}" for number in range(len(runs))), runs.items(), strict=False):
        reward = smooth(series(log_history, "reward"))
        seconds = list(accumulate(series(log_history, "darts/rollout/seconds")))
        steps = range(1, len(reward) + 1)
        by_step.plot(steps, reward, color=color, label=name)
        by_time.plot(seconds[: len(reward)], reward, color=color, label=name)
        lengths.plot(steps, smooth(series(log_history, "completions/mean_length")), color=color)
        lengths.plot(steps, smooth(series(log_history, "darts/pool/length_p99")), color=color, linestyle="--")
    by_step.set(xlabel="step", ylabel="reward (mean of 5 steps)", title="Reward against steps")
    by_time.set(xlabel="seconds of rollout", title="Reward against rollout time")
    lengths.set(xlabel="step", ylabel="tokens", title="Response lengths", yscale="log")
    for axes in (by_step, by_time, lengths):
        axes.grid()
    by_step.legend(frameon=False, fontsize=8)  # whose colors hold for all
    by_time.legend(frameon=False, fontsize=8)
    lines = [lengths.plot([], [], color="C0", linestyle=style)[0] for style in ("-", "--")]
    words = ["rows trained on, mean", "all candidates, p99 (aborted ones: what they had)"]
    figure.legend(lines, words, loc="outside lower right", ncols=2, frameon=False, fontsize=8)
    lengths.yaxis.set_major_formatter("{x:.0f}")
    lengths.yaxis.set_minor_formatter("{x:.0f}")
    return figure


def smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Trailing mean over up to `window` values."""
    windows = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in windows]


def plot_simulation(outcomes: Sequence[Any], path: str | Path) -> None:
    """
    Draws what [`~trl_darts.analysis.simulation.compare`] found: speed-ups, and what they cost.

    Args:
        outcomes (`Sequence[Outcome]`):
            The baseline first.
        path (`str` or `Path`):
            Where to write the picture.

    Raises:
        [`ImportError`]: If matplotlib is missing.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [outcome.name.replace(", ", "\n") for outcome in outcomes]
    rows = range(len(names))
    height = 1.8 + sum(0.15 + 0.2 * len(name.splitlines()) for name in names)
    figure, (speed, cost) = plt.subplots(1, 2, figsize=(12, height), layout="constrained", sharey=True)
    colors = ["C7", *["C0"] * (len(names) - 1)]
    speedups = [outcome.speedup for outcome in outcomes]
    whiskers = [min(speedup.half_width, 1e3) if speedup.half_width < 1e3 else 0.0 for speedup in speedups]
    speed.barh(rows, [speedup.mean for speedup in speedups], xerr=whiskers, color=colors, error_kw={"capsize": 3})
    speed.axvline(1.0, color="0.3", linewidth=1, linestyle="--")
    speed.set(yticks=rows, yticklabels=names, xlabel="speed-up over the first (95 % interval over seeds)")
    speed.invert_yaxis()
    quantities = {
        "wasted tokens": [outcome.wasted_share.mean for outcome in outcomes],
        "idle slots (bubble)": [outcome.estimate("bubble_ratio").mean for outcome in outcomes],
        "kept / pool length": [outcome.estimate("kept_vs_pool_length_ratio").mean for outcome in outcomes],
    }
    for (label, values), marker in zip(quantities.items(), ("o", "s", "D"), strict=True):
        cost.plot(values, rows, linestyle="none", marker=marker, label=label)
    cost.set(xlabel="share, or ratio", xlim=(0, None))
    figure.legend(*cost.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside upper right", ncols=3)
    for axes in (speed, cost):
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=150)
    plt.close(figure)
