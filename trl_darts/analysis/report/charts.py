"""
Draws charts as SVG. "C0", "C1", … are the colours of the runs.

A run has the same colour and dashes in all charts. What was trained on is strong, what was discarded is faint, and
idle is empty. Charts are transparent and drawn for light pages; the page replaces their colours in its dark mode.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd

from ..colors import GRID, INK, MUTED, colors_of
from ..estimates import number
from . import tables


Draw = Callable[[Any], None]  # on matplotlib's axes

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2), (10, 3), (1, 1))
MARKERS = "o^sDvP"
STRONG, MIDDLE, FAINT = 0.95, 0.6, 0.35  # opacity
LOOKS = {"trained on": STRONG, "discarded": FAINT, "idle": 0.0}
LOOKS |= {"generate": STRONG, "score": MIDDLE, "train": FAINT, "sync": 0.12, "not known": 0.05, "busy": STRONG}
WIDTH = 4.9  # inches, so that text of 11 points has 11 pixels on a phone
MAX_LANES = 300  # that are drawn
_RC: dict[Any, Any] = {
    **{"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "svg.fonttype": "none"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.edgecolor": MUTED},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.6},
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
}
BINS = {tables.FIRST_SEEN: "new", "1": "least", "2": "", "3": "middle", "4": "", "5": "most spread"}


def svg(
    draws: Sequence[Draw],
    names: Sequence[str],
    key: str,
    height: float = 2.9,
    *,
    looks: Sequence[str] = (),
    background: str = "none",
) -> str:
    """
    Draws charts under each other, with a legend of some `looks`. The `key` makes identifiers unique on a page, and the
    same for the same charts.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    settings: dict[Any, Any] = {"axes.prop_cycle": cycler(color=colors_of(names)), "svg.hashsalt": key}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_RC, **settings}):
        # Without pyplot, whose state belongs to the caller.
        picture = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=background)
        for place, draw in enumerate(draws, start=1):
            draw(picture.add_subplot(len(draws), 1, place, facecolor="none"))
        if looks:
            handles = [Patch(facecolor=(MUTED, LOOKS[look]), edgecolor=MUTED, label=look) for look in looks]
            picture.legend(handles=handles, loc="outside lower left", ncols=len(looks), frameon=False, fontsize=10)
        buffer = io.StringIO()
        picture.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text[text.index("<svg") :])  # names of parts, which repeat


def lines(
    axes: Any, title: str, curves: Mapping[int, pd.Series], *, xlabel: str = "step", from_zero: bool = True
) -> None:
    """Draws one smoothed line per run, in front of its own values in a faint line."""
    window = smoothing(curves)
    for run, curve in curves.items():
        if window > 1:
            axes.plot(curve, color=f"C{run}", linewidth=0.8, alpha=0.3)
        style = {"linewidth": 1.9, "linestyle": dashes(run), "marker": "o" if len(curve) == 1 else ""}
        axes.plot(curve.rolling(window, min_periods=1).mean(), color=f"C{run}", **style)
    axes.set(title=title, xlabel=xlabel)
    if from_zero:
        axes.set_ylim(0, 1.03 * axes.get_ylim()[1])


def dashes(run: int) -> Any:
    """Returns a run's line style."""
    return (0, DASHES[run]) if DASHES[run] else "-"


def smoothing(curves: Mapping[int, pd.Series]) -> int:
    """Returns the number of values that a line averages: a tenth of the longest curve, at most 20."""
    return max(1, min(20, max(map(len, curves.values()), default=1) // 10))


def distribution(axes: Any, title: str, run: int, shares: pd.DataFrame, edges: np.ndarray, top: float) -> None:
    """Draws the pool's lengths as an area and the kept rows' as a line, over a logarithmic axis."""
    from matplotlib.ticker import NullFormatter

    shown = np.maximum(edges, 0.7)  # a logarithmic axis has no 0
    axes.stairs(100 * shares["pool"], shown, fill=True, color=f"C{run}", alpha=FAINT, linewidth=0)
    axes.stairs(100 * shares["kept"], shown, color=f"C{run}", linewidth=1.9)
    axes.set(title=title, xscale="log", xlabel="tokens", xlim=(shown[0], shown[-1]), ylim=(0, 105 * top))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def bars(axes: Any, shares: Mapping[int, pd.Series]) -> None:
    """Draws the share of prompts by their number of candidates, with the runs' bars side by side."""
    width = 0.84 / len(shares)
    for place, (run, share) in enumerate(shares.items()):
        left = share.index.to_numpy(dtype=float) - 0.42 + width * (place + 0.5)
        axes.bar(left, 100 * share, width, color=f"C{run}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title="% of prompts", xlabel="candidates")


def bins(axes: Any, means: Mapping[int, pd.Series]) -> None:
    """Draws one line with markers per run over the `BINS`. The first bin is not connected to the others."""
    order = list(BINS)
    for run, values in means.items():
        places = np.array([order.index(name) for name in values.index])
        style = {"color": f"C{run}", "marker": MARKERS[run], "markersize": 5, "linewidth": 1.9}
        for part, line in ((places == 0, ""), (places > 0, dashes(run))):
            axes.plot(places[part], values[part], linestyle=line, **style)
    axes.set_xticks(range(len(order)), BINS.values())
    axes.set(title="Candidates per prompt, mean", xlim=(-0.5, len(order) - 0.5), ylim=(0, 1.03 * axes.get_ylim()[1]))
    axes.yaxis.get_major_locator().set_params(integer=True)


def candidates(axes: Any, title: str, color: str, lanes: pd.DataFrame, seconds: float) -> None:
    """
    Draws each candidate of a rollout as a bar in its lane (see [`tables.lanes`]), and the seconds at which the rollout
    ends. The axis ends at `seconds`, so that rollouts can be compared.
    """
    end, num_lanes = float(lanes["end"].max()), int(lanes["lane"].max()) + 1
    spans(axes, lanes[lanes["lane"] % -(-num_lanes // MAX_LANES) == 0], color)
    axes.plot([0, end, end], [-0.6, -0.6, num_lanes - 0.4], color=MUTED, linewidth=1)  # what is idle is inside
    side = {"ha": "right", "x": end - 0.015 * seconds} if end > 0.8 * seconds else {"x": end + 0.015 * seconds}
    axes.text(s=f"{number(end)} s", y=0.06 * num_lanes, va="top", weight="bold", **side)
    axes.set(title=title, xlabel="seconds", xlim=(0, 1.02 * seconds or 1), ylim=(num_lanes - 0.4, -0.6), yticks=[])
    axes.grid(visible=False)


def spans(axes: Any, lanes: pd.DataFrame, color: str, height: float = 0.84) -> None:
    """Draws a bar from `begin` to `end` in each `lane`: strong if it was trained on, otherwise faint."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for look, own in lanes.groupby(np.where(lanes["outcome"] == "kept", "trained on", "discarded")):
        if len(own):  # one path for all, which is a fraction of the size of one each
            begin, end, lane = own[["begin", "end", "lane"]].to_numpy(float).T
            top, bottom = lane - height / 2, lane + height / 2
            corners = [(begin, top), (end, top), (end, bottom), (begin, bottom), (begin, top)]
            boxes = np.array(corners).transpose(2, 0, 1)  # (bars, corners, 2)
            path = Path.make_compound_path(*(Path(box, Path.unit_rectangle().codes) for box in boxes))
            axes.add_patch(PathPatch(path, facecolor=color, alpha=LOOKS[str(look)], linewidth=0))


def stacks(axes: Any, title: str, parts: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> None:
    """Draws one horizontal bar per run under its name, split into parts with their names in them."""
    longest = max(sum(own.values()) for own in parts.values())
    for place, (run, own) in enumerate(parts.items()):
        left = 0.0
        axes.text(0, place - 0.32, shorten(names[run], 48, placeholder="…"), va="bottom")
        for name, seconds in own.items():
            look = {"facecolor": (f"C{run}", LOOKS[name]), "edgecolor": f"C{run}", "linewidth": 0.8}
            axes.barh(place, seconds, 0.5, left, **look)
            if seconds > 0.025 * longest * len(name):
                ink = "white" if LOOKS[name] == STRONG else INK
                axes.text(left + seconds / 2, place, name, ha="center", va="center", color=ink)
            left += seconds
    axes.set(title=title, xlabel="seconds", ylim=(len(parts) - 0.6, -0.9), xlim=(0, 1.02 * longest or 1), yticks=[])
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def scatter(axes: Any, points: Mapping[int, pd.DataFrame]) -> None:
    """Draws the points of all runs, and the line on which predicted and real seconds are equal."""
    end = 1.05 * max(float(table[["predicted", "real"]].max().max()) for table in points.values())
    axes.plot([0, end], [0, end], color=MUTED, linewidth=1)
    for run, table in points.items():
        axes.scatter("predicted", "real", 16, f"C{run}", marker=MARKERS[run], data=table, alpha=0.6, linewidths=0)
    axes.set(title="Real seconds", xlim=(0, end), ylim=(0, end), xlabel="predicted seconds")
