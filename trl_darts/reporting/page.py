"""
The report: one HTML page without external resources, and its panels as PNG files beside it.

Invariant: the page has everything in it. It loads nothing, runs no script, and is the same for the same runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import ConfigurationError
from ..import_utils import require_matplotlib
from ..output_files import check_writable, not_writable
from ..policy import LatencyCurve
from . import costs, sections
from .compare import Comparison, compare_settings
from .drawing import INK, LOOKS, RUN_COLORS, RUN_DASHES, chart_svg, panel_png
from .prediction import check_curve, prediction
from .runs import read_runs
from .sections import Panel
from .summary import quantities
from .verdict import cards, cautions, verdict


TITLE = "Training report"


def write_report(
    directories: Sequence[str | Path],
    output: str | Path = "report.html",
    *,
    names: Sequence[str] = (),
    step: int | None = None,
    latency_curve: str | Path | None = None,
) -> list[Path]:
    """
    Writes a report of one or several runs.

    Args:
        directories (`Sequence[str | Path]`):
            The `output_dir` of each training, at most six. The first is what the others are compared with.
        output (`str` or `Path`, *optional*, defaults to `"report.html"`):
            The page. Its directory is made. Panels go beside it, `report-<panel>.png`.
        names (`Sequence[str]`, *optional*):
            What to call the runs. Defaults to their directories' names.
        step (`int`, *optional*):
            Whose occupancy is shown, counted from 1. Defaults to the step whose rollouts took the median of time.
        latency_curve (`str` or `Path`, *optional*):
            File of a [`LatencyCurve`]: adds predicted against real times.

    Returns:
        `list[Path]`: The page, then the pictures.

    Raises:
        [`ConfigurationError`]: If a directory is no run, a run is empty or broken, an argument does not fit, or a file
            can't be written.
        [`ImportError`]: If matplotlib or Jinja is missing.

    Example:

    ```python
    from trl_darts.reporting import write_report

    write_report(["outputs/grpo", "outputs/darts"], "report.html")
    ```
    """
    require_matplotlib()
    output = _check_output(Path(output))
    comparison = Comparison.of(read_runs(directories, names))
    panels = _panels(comparison, step, latency_curve)
    for panel in panels:
        check_writable("output", _picture(output, panel))
    drawings = {
        panel.key: [chart_svg(chart, f"{panel.key}-{i}") for i, chart in enumerate(panel.charts)] for panel in panels
    }
    page = render(comparison, panels, drawings)
    try:
        output.write_text(page, encoding="utf-8")
        return [output, *_write_pictures(comparison, panels, output)]
    except OSError as error:  # a disk that is full
        raise not_writable("output", Path(error.filename or output), error.strerror) from error


def _panels(comparison: Comparison, step: int | None, latency_curve: str | Path | None) -> list[Panel]:
    step = costs.check_step(comparison, step)
    curve = LatencyCurve.load(latency_curve) if latency_curve is not None else None
    if curve is not None:
        check_curve(comparison, curve, latency_curve)
    return [
        sections.rewards(comparison),
        costs.time_split(comparison),
        costs.timeline(comparison, step),
        sections.lengths(comparison),
        sections.selection(comparison),
        sections.budget(comparison),
        costs.tokens(comparison),
        prediction(comparison, curve),
    ]


def render(comparison: Comparison, panels: Sequence[Panel], drawings: Mapping[str, Sequence[str]]) -> str:
    """
    The page's text.

    Args:
        comparison ([`Comparison`]):
            Runs.
        panels (`Sequence[Panel]`):
            Panels, in their order.
        drawings (`Mapping[str, Sequence[str]]`):
            The charts' `<svg>` elements by the panel's key.

    Returns:
        `str`: HTML.
    """
    import jinja2
    from markupsafe import Markup, escape

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trl_darts.reporting"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
    css = environment.get_template("report.css").render(light=_variables("light"), dark=_variables("dark"))
    rows, settings = quantities(comparison), compare_settings(comparison.runs)
    fixed = [("short", "In short"), ("numbers", "Numbers"), ("runs", "Runs and settings")]
    return environment.get_template("report.html.jinja").render(
        title=TITLE,
        css=Markup(css),  # no run's text is in it
        runs=comparison.runs,
        contents=[*fixed, *((panel.key, panel.title) for panel in panels)],
        cautions=cautions(comparison, settings),
        verdict=verdict(comparison, rows, settings),
        cards=cards(rows),
        rows=rows,
        settings=settings,
        panels=panels,
        drawings={key: [Markup(svg) for svg in svgs] for key, svgs in drawings.items()},
        dashes=[_dasharray(dash) for dash in RUN_DASHES],
        fills={name: Markup(_fill(name)) for name in LOOKS},
        version=_version(),
    )


def _variables(mode: str) -> str:
    """A mode's colours as CSS variables."""
    runs = {f"run-{i}": color for i, color in enumerate(RUN_COLORS[mode])}
    return "\n".join(f"  --{name}: {color};" for name, color in {**INK[mode], **runs}.items())


def _dasharray(dash: object) -> str:
    """Matplotlib's dashes, in units of the line's width, for a key of three pixels' width."""
    return " ".join(f"{1.4 * length:g}" for length in dash[1]) if isinstance(dash, tuple) else "none"


def _fill(name: str) -> str:
    """What a filling looks like, in the colour of text."""
    opacity, hatch = LOOKS[name]
    box = f'<rect width="26" height="14" style="fill: var(--ink); fill-opacity: {opacity}"/>'
    if not hatch:
        return box
    steps = range(-12, 26, 6)
    marks = {
        "////": "".join(f"M{x} 14l14 -14" for x in steps),
        "xxxx": "".join(f"M{x} 14l14 -14M{x} 0l14 14" for x in steps),
        "\\\\\\": "".join(f"M{x} 0l14 14" for x in steps),
    }
    style = f"stroke: var(--{'muted' if name == 'idle' else 'ink'}); stroke-width: 1; fill: none"
    frame = '<rect x="0.5" y="0.5" width="25" height="13" style="fill: none; stroke: var(--muted)"/>'
    return f'{box}<path d="{marks[hatch]}" style="{style}"/>{frame}'


def _write_pictures(comparison: Comparison, panels: Sequence[Panel], output: Path) -> list[Path]:
    paths = []
    for panel in panels:
        path = _picture(output, panel)
        path.unlink(missing_ok=True)  # one of an earlier report would be taken for this one's
        if panel.charts:
            panel_png(panel.charts, panel.title, comparison.names, path, panel.looks)
            paths.append(path)
    return paths


def _picture(output: Path, panel: Panel) -> Path:
    return output.with_name(f"{output.stem}-{panel.key}.png")


def _check_output(output: Path) -> Path:
    where = f"`output` ({str(output)!r})"
    if os.path.isdir(output) or output.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"{where} must be the name of an HTML file. Choose one such as 'report.html'.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{where} must be in a directory that can be made: {error.strerror}.") from error
    check_writable("output", output)
    return output


def _version() -> str:
    try:
        return version("trl-darts")
    except PackageNotFoundError:  # a checkout that was never installed
        return "(not installed)"
