"""
Charts as inline SVG and as PNG.

A chart is a function that draws on axes with a [`Theme`]. In SVG, the theme's colours are stand-ins that become CSS
variables, so that the page decides what they are in light and dark; text stays text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..import_utils import require_matplotlib


# Okabe and Ito's colours, darkened on white and lightened on black until lines reach a contrast of 3, and most 4.5.
RUN_COLORS = {
    "light": ("#0067a5", "#c24a00", "#007a58", "#a8326f", "#6b5b00", "#555555"),
    "dark": ("#62b6f0", "#ff9a55", "#45d0a5", "#f08bc4", "#e5cf5b", "#c4c4c4"),
}
# A second sign beside the colour: dashes, in points.
RUN_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (10, 3)), (0, (1, 1)))
INK = {"light": {"ink": "#1b1f24", "muted": "#57606a", "grid": "#d5dae0", "surface": "#ffffff"}}
INK["dark"] = {"ink": "#e8eaed", "muted": "#a5aeb8", "grid": "#3a424c", "surface": "#14181d"}
STAND_INS = {name: f"#a1000{i}" for i, name in enumerate(INK["light"])}
RUN_STAND_INS = tuple(f"#b1000{i}" for i in range(len(RUN_DASHES)))

# How parts look in a run's own colour: opacity and hatch.
LOOKS: dict[str, tuple[float, str]] = {
    "kept": (0.9, ""),
    "unused": (0.45, ""),
    "aborted": (0.18, "////"),
    "idle": (0.0, "\\\\\\"),
    "generate": (0.9, ""),
    "score": (0.45, ""),
    "train": (0.18, "////"),
    "sync": (0.25, "xxxx"),
}

WIDTH, HEIGHT = 4.9, 3.1  # inches
_RC: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Theme:
    """
    Colours to draw with.

    Args:
        ink (`str`):
            Of text.
        muted (`str`):
            Of what stands back.
        grid (`str`):
            Of lines behind the data.
        surface (`str`):
            What is drawn on.
        runs (`tuple[str, ...]`):
            One per run.
    """

    ink: str
    muted: str
    grid: str
    surface: str
    runs: tuple[str, ...]


LIGHT = Theme(**INK["light"], runs=RUN_COLORS["light"])
_CSS = Theme(**STAND_INS, runs=RUN_STAND_INS)


@dataclass(frozen=True)
class Chart:
    """
    One chart.

    Args:
        title (`str`):
            Its title, with the unit of the vertical axis.
        alt (`str`):
            What it shows, for those who don't see it.
        draw (`Callable[[Axes, Theme], None]`):
            Draws it.
    """

    title: str
    alt: str
    draw: Callable[[Any, Theme], None]


def chart_svg(chart: Chart, key: str) -> str:
    """
    A chart as an `<svg>` element.

    Args:
        chart ([`Chart`]):
            The chart.
        key (`str`):
            Told from all other charts of the page: it begins every `id`.

    Returns:
        `str`: The element: no references but to itself, colours as CSS variables.

    Raises:
        [`ImportError`]: If matplotlib is missing.
    """
    with _figure(_CSS, (WIDTH, HEIGHT), key) as figure:
        _draw(figure.add_subplot(), chart, _CSS)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # within HTML, namespaces are known
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{key}-", svg)
    for name, color in {**STAND_INS, **{f"run-{i}": color for i, color in enumerate(RUN_STAND_INS)}}.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a pixel is enough, and half the size
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-labelledby="{key}-alt">',
        svg,
        count=1,
    ).replace(">", f'><title id="{key}-alt">{_escape(chart.alt)}</title>', 1)


def panel_png(
    charts: Sequence[Chart], title: str, names: Sequence[str], path: Path, looks: Sequence[str] = ()
) -> None:
    """
    Writes a panel's charts as one picture, on white.

    Args:
        charts (`Sequence[Chart]`):
            The charts, at most three in a row.
        title (`str`):
            Above them.
        names (`Sequence[str]`):
            The runs, for the legend.
        path (`Path`):
            Where to.
        looks (`Sequence[str]`, *optional*):
            Fillings for the legend, keys of `LOOKS`.

    Raises:
        [`ImportError`]: If matplotlib is missing.
    """
    columns = min(len(charts), 2 if len(charts) in (2, 4) else 3)
    rows = math.ceil(len(charts) / columns)
    with _figure(LIGHT, (WIDTH * columns, HEIGHT * rows + 0.7), path.stem) as figure:
        for i, chart in enumerate(charts):
            _draw(figure.add_subplot(rows, columns, i + 1), chart, LIGHT)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=LIGHT.ink)
        figure.legend(*_legend(names, looks), loc="outside lower left", ncols=6, frameon=False)
        figure.savefig(path, dpi=150, facecolor=LIGHT.surface)


def _legend(names: Sequence[str], looks: Sequence[str]) -> tuple[list[Any], list[str]]:
    from matplotlib.colors import to_rgba
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    runs = [Line2D([], [], color=LIGHT.runs[i], linestyle=RUN_DASHES[i], lw=2) for i in range(len(names))]
    fills = [
        Patch(facecolor=to_rgba(LIGHT.ink, opacity), edgecolor=LIGHT.muted, hatch=hatch)
        for opacity, hatch in map(LOOKS.__getitem__, looks)
    ]
    return [*runs, *fills], [*names, *looks]


@contextmanager
def _figure(theme: Theme, size: tuple[float, float], salt: str) -> Iterator[Any]:
    """A figure without pyplot, so that nothing of the caller's is touched."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    colors: dict[Any, Any] = {
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.muted,
        "axes.titlecolor": theme.ink,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "grid.color": theme.grid,
    }
    with matplotlib.rc_context({**_RC, **colors, "svg.hashsalt": salt}):
        yield Figure(figsize=size, layout="constrained")


def _draw(axes: Any, chart: Chart, theme: Theme) -> None:
    axes.set_title(chart.title)
    axes.grid(axis="y", linewidth=0.6)
    chart.draw(axes, theme)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
