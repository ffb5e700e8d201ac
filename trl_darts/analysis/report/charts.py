"""
The panels' figures: tables in, pictures out. All are drawn on white, and read alike on light and dark pages.

A run keeps its colour and its dashes in all figures; what became of tokens and time is told by opacity and hatching.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd

from .runs import OUTCOMES


Draw = Callable[[Any], None]  # on matplotlib's axes

# Okabe and Ito's colours, darkened until lines on white have a contrast of 4.5.
COLORS = ("#0067a5", "#c24a00", "#007a58", "#a8326f", "#6b5b00", "#555555")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (10, 3)), (0, (1, 1)))
MARKERS = "o^sDvP"
MUTED = "#57606a"
# Opacity and hatching in a run's own colour.
LOOKS = {
    "kept": (0.9, ""),
    "unused": (0.45, ""),
    "aborted": (0.18, "////"),
    "generate": (0.9, ""),
    "score": (0.45, ""),
    "train": (0.18, "////"),
    "sync": (0.25, "xxxx"),
    "busy": (0.9, ""),
    "idle": (0.0, "...."),
}
WIDTH, HEIGHT = 14.7, 3.1  # of a row of charts, in inches: text has one size in all figures
_RC: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.edgecolor": MUTED,
    "grid.color": "#d5dae0",
    "grid.linewidth": 0.6,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "hatch.linewidth": 0.6,
}


def figure(charts: Sequence[Draw], names: Sequence[str], looks: Sequence[str] = ()) -> bytes:
    """Charts in one PNG picture, at most three in a row, with a legend of the runs and of the looks."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = min(len(charts), 2 if len(charts) in (2, 4) else 3)
    rows = -(-len(charts) // columns)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_RC}):
        # Without pyplot, so that nothing of the caller's is touched.
        picture = Figure(figsize=(WIDTH, HEIGHT * rows + 0.4), layout="constrained")
        for place, draw in enumerate(charts, start=1):
            draw(picture.add_subplot(rows, columns, place))
        handles: list[Any] = [
            Line2D([], [], color=COLORS[i], linestyle=DASHES[i], lw=2, label=shorten(name, 60, placeholder="…"))
            for i, name in enumerate(names)
        ]
        handles += [Patch(facecolor=(MUTED, LOOKS[x][0]), edgecolor=MUTED, hatch=LOOKS[x][1], label=x) for x in looks]
        picture.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False)
        buffer = io.BytesIO()
        picture.savefig(buffer, dpi=144, metadata={"Software": None})  # the same bytes for the same runs
    return buffer.getvalue()


def lines(
    axes: Any,
    title: str,
    curves: Mapping[int, pd.Series],
    *,
    xlabel: str = "step",
    dotted: Mapping[int, pd.Series] | None = None,
    from_zero: bool = True,
) -> None:
    """One line per run, the mean of the last tenth of its values, at most 20, with the values faintly behind it."""
    window = smoothing(curves)
    for run, curve in curves.items():
        smooth = curve.rolling(window, min_periods=1).mean()
        if window > 1:
            axes.plot(curve.index, curve, color=COLORS[run], linewidth=0.8, alpha=0.3)
        marker = "o" if len(curve) == 1 else ""
        axes.plot(curve.index, smooth, color=COLORS[run], linewidth=1.9, linestyle=DASHES[run], marker=marker)
    for run, curve in (dotted or {}).items():
        smooth = curve.rolling(window, min_periods=1).mean()
        axes.plot(curve.index, smooth, color=COLORS[run], linewidth=1, linestyle=":")
    axes.set(title=title, xlabel=xlabel)
    if from_zero:
        axes.set_ylim(0, 1.03 * axes.get_ylim()[1])


def smoothing(curves: Mapping[int, pd.Series]) -> int:
    """Over how many values lines are smoothed."""
    return max(1, min(20, max(map(len, curves.values()), default=1) // 10))


def distribution(axes: Any, title: str, run: int, shares: pd.DataFrame, edges: np.ndarray, top: float) -> None:
    """The pool's lengths as an area, the kept rows' as a line, over a logarithmic axis; see `tables.length_shares`."""
    from matplotlib.ticker import NullFormatter

    shown = np.maximum(edges, 0.7)  # 0 has no place on a logarithmic axis
    axes.stairs(100 * shares["pool"], shown, fill=True, color=COLORS[run], alpha=0.3, linewidth=0)
    axes.stairs(100 * shares["kept"], shown, color=COLORS[run], linewidth=1.9)
    axes.set(title=title, xscale="log", xlabel="tokens", xlim=(shown[0], shown[-1]), ylim=(0, 105 * top))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def bars(axes: Any, title: str, shares: Mapping[int, pd.Series], xlabel: str) -> None:
    """Shares in percent by whole number, the runs' bars beside each other."""
    width = 0.84 / len(shares)
    for place, (run, share) in enumerate(shares.items()):
        left = share.index.to_numpy(dtype=float) - 0.42 + width * (place + 0.5)
        axes.bar(left, 100 * share, width, color=COLORS[run])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title=title, xlabel=xlabel)


def bins(axes: Any, title: str, tables: Mapping[int, pd.Series], labels: Mapping[str, str]) -> None:
    """One line per run over named bins, with a mark at each. The first bin stands apart."""
    order = list(labels)
    for run, values in tables.items():
        places = np.array([order.index(name) for name in values.index])
        for part, line in ((places == 0, ""), (places > 0, DASHES[run])):
            style = {"color": COLORS[run], "marker": MARKERS[run], "markersize": 5, "linewidth": 1.9}
            axes.plot(places[part], values[part], linestyle=line, **style)
    axes.set_xticks(range(len(order)), labels.values())
    axes.set(title=title, xlim=(-0.5, len(order) - 0.5), ylim=(0, 1.03 * axes.get_ylim()[1]))
    axes.yaxis.get_major_locator().set_params(integer=True)


def timeline(axes: Any, title: str, run: int, running: pd.DataFrame, seconds: float, peak: int) -> None:
    """How many candidates ran, stacked by what became of them, up to the `seconds` and the `peak` of all runs."""
    highest, end = running["running"].max(), running.index[-1]
    bottom = np.zeros(len(running))
    for name in OUTCOMES:
        opacity, hatch = LOOKS[name]
        area = {"step": "post", "edgecolor": COLORS[run], "hatch": hatch, "linewidth": 0}
        axes.fill_between(running.index, bottom, bottom + running[name], facecolor=(COLORS[run], opacity), **area)
        bottom += running[name]
    axes.step(running.index, running["running"], where="post", color=COLORS[run], linewidth=1)
    axes.plot([0, end, end], [highest, highest, 0], color=MUTED, linewidth=1, linestyle="--")
    axes.set(title=title, xlabel="seconds", xlim=(0, 1.02 * seconds or 1), ylim=(0, 1.08 * peak))


def stacks(axes: Any, title: str, table: pd.DataFrame, names: Sequence[str], xlabel: str) -> None:
    """One horizontal bar per run (the index), split into parts (the columns)."""
    left = np.zeros(len(table))
    for part in table:
        opacity, hatch = LOOKS[part]
        for place, run in enumerate(table.index):
            look = {"facecolor": (COLORS[run], opacity), "edgecolor": COLORS[run], "hatch": hatch, "linewidth": 0.8}
            axes.barh(place, table[part].iloc[place], 0.62, left[place], **look)
        left += table[part].to_numpy()
    axes.set_yticks(range(len(table)), [shorten(names[run], 24, placeholder="…") for run in table.index])
    axes.set(title=title, xlabel=xlabel, ylim=(len(table) - 0.4, -0.6), xlim=(0, 1.02 * left.max() or 1))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def scatter(axes: Any, points: Mapping[int, pd.DataFrame], x: str, y: str) -> None:
    """Points of all runs, and the line on which both axes are equal."""
    end = 1.05 * max(float(table[[x, y]].max().max()) for table in points.values())
    axes.plot([0, end], [0, end], color=MUTED, linewidth=1)
    for run, table in points.items():
        axes.scatter(table[x], table[y], s=16, marker=MARKERS[run], color=COLORS[run], alpha=0.6, linewidths=0)
    axes.set(title=f"{y.capitalize()} seconds", xlim=(0, end), ylim=(0, end), xlabel=f"{x} seconds")
