"""How each kind of chart is drawn. Each function returns a [`Chart`] that draws the tables it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd

from .drawing import LOOKS, RUN_DASHES, Chart, Theme
from .outcomes import OUTCOMES
from .timing import PHASES


MAX_POINTS = 2000  # of a scatter; a page with more gets slow


def lines(
    title: str,
    alt: str,
    curves: Mapping[int, pd.Series],
    *,
    window: int = 1,
    dashed: Mapping[int, pd.Series] | None = None,
    xlabel: str = "step",
    level: float | None = None,
    from_zero: bool = True,
) -> Chart:
    """
    One line per run, smoothed, with the values themselves faintly behind it.

    Args:
        title (`str`):
            Title.
        alt (`str`):
            Description.
        curves (`Mapping[int, pd.Series]`):
            Values over the index, by the run's number.
        window (`int`, *optional*, defaults to `1`):
            The line is the mean of so many values up to each.
        dashed (`Mapping[int, pd.Series]`, *optional*):
            A second, thinner line per run, not smoothed.
        xlabel (`str`, *optional*, defaults to `"step"`):
            What the index is.
        level (`float`, *optional*):
            A horizontal line to compare with.
        from_zero (`bool`, *optional*, defaults to `True`):
            Whether the axis begins at 0.

    Returns:
        [`Chart`]: The chart.
    """

    def draw(axes: Any, theme: Theme) -> None:
        if level is not None:
            axes.axhline(level, color=theme.muted, linewidth=1)
        for run, curve in curves.items():
            color = theme.runs[run]
            smooth = curve.rolling(window, min_periods=1).mean()
            if window > 1:
                axes.plot(curve.index, curve, color=color, linewidth=0.8, alpha=0.3)
            marker = "o" if len(curve) == 1 else ""
            axes.plot(curve.index, smooth, color=color, linewidth=1.9, linestyle=RUN_DASHES[run], marker=marker)
        for run, curve in (dashed or {}).items():
            axes.plot(curve.index, curve, color=theme.runs[run], linewidth=1, linestyle=":")
        axes.set_xlabel(xlabel)
        if from_zero:
            axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
        _short_ticks(axes.yaxis)

    return Chart(title, alt, draw)


def distribution(title: str, alt: str, run: int, shares: pd.DataFrame, edges: np.ndarray, top: float) -> Chart:
    """The pool's lengths as an area, the kept rows' as a line, over a logarithmic axis; see `panels.length_shares`."""

    def draw(axes: Any, theme: Theme) -> None:
        color = theme.runs[run]
        shown = np.maximum(edges, 0.7)  # 0 has no place on a logarithmic axis
        axes.stairs(100 * shares["pool"], shown, fill=True, color=color, alpha=0.3, linewidth=0)
        axes.stairs(100 * shares["kept"], shown, color=color, linewidth=1.9)
        axes.set(xscale="log", xlabel="tokens", xlim=(shown[0], shown[-1]), ylim=(0, 105 * top))
        _plain_log_ticks(axes.xaxis)

    return Chart(title, alt, draw)


def bars(title: str, alt: str, shares: Mapping[int, pd.Series], xlabel: str) -> Chart:
    """Shares in percent by whole number, the runs' bars beside each other."""

    def draw(axes: Any, theme: Theme) -> None:
        width = 0.84 / len(shares)
        for place, (run, share) in enumerate(shares.items()):
            left = share.index.to_numpy(dtype=float) - 0.42 + width * (place + 0.5)
            axes.bar(left, 100 * share, width, color=theme.runs[run])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(xlabel)

    return Chart(title, alt, draw)


def steps_by_bin(title: str, alt: str, tables: Mapping[int, pd.Series], labels: Mapping[str, str]) -> Chart:
    """One line per run over named bins, with a mark at each. The first bin stands apart."""

    def draw(axes: Any, theme: Theme) -> None:
        order = list(labels)
        for run, values in tables.items():
            values = values.reindex([name for name in order if name in values.index])
            places = np.array([order.index(name) for name in values.index])
            style = {"color": theme.runs[run], "marker": "o", "markersize": 5}
            axes.plot(places[places == 0], values[places == 0], **style)
            axes.plot(places[places > 0], values[places > 0], linestyle=RUN_DASHES[run], linewidth=1.9, **style)
        axes.set_xticks(range(len(order)), labels.values())
        axes.set_xlim(-0.5, len(order) - 0.5)
        axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
        axes.yaxis.get_major_locator().set_params(integer=True)

    return Chart(title, alt, draw)


def timeline(title: str, alt: str, run: int, running: pd.DataFrame, seconds: float, peak: int) -> Chart:
    """
    How many candidates ran, stacked by what became of them; what is hatched lightly, up to the peak, stood idle.

    Args:
        title (`str`):
            Title.
        alt (`str`):
            Description.
        run (`int`):
            The run's number.
        running (`pd.DataFrame`):
            What `panels.occupancy` returned.
        seconds (`float`):
            Where the axis ends: the longest of all runs.
        peak (`int`):
            Where the other axis ends.

    Returns:
        [`Chart`]: The chart.
    """

    highest, end = running["running"].max(), running.index[-1]
    # What ran at the end of each of 200 slices: with thousands of candidates, a picture of each end gets slow.
    running = running.groupby(np.ceil(running.index / (end or 1) * 200) * (end or 1) / 200).last()

    def draw(axes: Any, theme: Theme) -> None:
        times, bottom = running.index.to_numpy(dtype=float), np.zeros(len(running))
        own_peak = np.full(len(running), highest)
        for name in OUTCOMES:
            top = bottom + running[name].to_numpy()
            opacity, hatch = LOOKS[name]
            _area(axes, times, bottom, top, theme.runs[run], opacity, hatch)
            bottom = top
        axes.fill_between(
            times,
            bottom,
            own_peak,
            step="post",
            facecolor="none",
            edgecolor=theme.muted,
            hatch=LOOKS["idle"][1],
            linewidth=0,
            alpha=0.5,
        )
        axes.step(times, running["running"], where="post", color=theme.runs[run], linewidth=1)
        axes.axvline(times[-1], color=theme.muted, linewidth=1)
        axes.set(xlabel="seconds", xlim=(0, 1.02 * seconds or 1), ylim=(0, 1.08 * peak))

    return Chart(title, alt, draw)


def stacks(title: str, alt: str, table: pd.DataFrame, names: Sequence[str], xlabel: str) -> Chart:
    """
    One horizontal bar per run, split into parts.

    Args:
        title (`str`):
            Title.
        alt (`str`):
            Description.
        table (`pd.DataFrame`):
            Parts (columns) by the run's number.
        names (`Sequence[str]`):
            All runs' names.
        xlabel (`str`):
            The unit.

    Returns:
        [`Chart`]: The chart.
    """

    def draw(axes: Any, theme: Theme) -> None:
        places = range(len(table))
        left = np.zeros(len(table))
        for part in table:
            width = table[part].fillna(0).to_numpy()
            opacity, hatch = LOOKS[part]
            for place, run in enumerate(table.index):
                _bar(axes, place, left[place], width[place], theme.runs[run], opacity, hatch)
            left += width
        axes.set_yticks(places, ["\n".join(wrap(names[run], 14, max_lines=2, placeholder="…")) for run in table.index])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_ylim(len(table) - 0.4, -0.6)
        axes.set_xlim(0, 1.02 * left.max() or 1)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", linewidth=0.6)
        _short_ticks(axes.xaxis)
        axes.set_xlabel(xlabel)

    return Chart(title, alt, draw)


def phases_over_steps(title: str, alt: str, run: int, split: pd.DataFrame, top: float) -> Chart:
    """A step's seconds, stacked by phase, over training; see `timing.time_split`."""

    def draw(axes: Any, theme: Theme) -> None:
        table = split[list(PHASES)].fillna(0)
        bottom = np.zeros(len(table))
        begins = (table.index - split["num_steps"] + 1).to_numpy()
        edges = np.append(begins, table.index[-1] + 1) - 0.5
        for phase in PHASES:
            upper = bottom + table[phase].to_numpy()
            opacity, hatch = LOOKS[phase]
            _area(
                axes,
                edges,
                np.append(bottom, bottom[-1]),
                np.append(upper, upper[-1]),
                theme.runs[run],
                opacity,
                hatch,
            )
            bottom = upper
        axes.set(xlabel="step", ylim=(0, 1.05 * top or 1), xlim=(edges[0], edges[-1]))

    return Chart(title, alt, draw)


def scatter(title: str, alt: str, points: Mapping[int, pd.DataFrame], x: str, y: str) -> Chart:
    """Points of all runs, and the line on which both axes are equal. Of more than 2000 points, every n-th is drawn."""

    def draw(axes: Any, theme: Theme) -> None:
        end = 1.05 * max(float(table[[x, y]].max().max()) for table in points.values())
        axes.plot([0, end], [0, end], color=theme.muted, linewidth=1)
        for marker, (run, table) in zip("o^sDvP", points.items(), strict=False):
            shown = table.iloc[:: -(-len(table) // MAX_POINTS)]
            axes.scatter(shown[x], shown[y], s=16, marker=marker, color=theme.runs[run], alpha=0.6, linewidths=0)
        axes.set(xlim=(0, end), ylim=(0, end), xlabel=f"{x} seconds")

    return Chart(title, alt, draw)


def _area(axes: Any, x: Any, low: Any, high: Any, color: str, opacity: float, hatch: str) -> None:
    axes.fill_between(x, low, high, step="post", color=color, alpha=opacity, linewidth=0)
    if hatch:
        axes.fill_between(
            x, low, high, step="post", facecolor="none", edgecolor=color, hatch=hatch, linewidth=0, alpha=0.7
        )


def _bar(axes: Any, place: int, left: float, width: float, color: str, opacity: float, hatch: str) -> None:
    axes.barh(place, width, 0.62, left, color=color, alpha=opacity, linewidth=0)
    axes.barh(place, width, 0.62, left, facecolor="none", edgecolor=color, hatch=hatch, linewidth=0.8)


def _plain_log_ticks(axis: Any) -> None:
    """1, 10, 100 instead of powers, and nothing at the ticks between."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_minor_formatter(NullFormatter())


def _short_ticks(axis: Any) -> None:
    """20k and 2.5M where numbers get long."""
    from matplotlib.ticker import FuncFormatter

    def text(value: float, _: int) -> str:
        for unit, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
            if abs(value) >= unit:
                return f"{value / (1e3 if sign == 'k' else unit):g}{sign}"
        return f"{value:,g}"

    axis.set_major_formatter(FuncFormatter(text))
