"""
Writes the report: one HTML page with its figures in it.

Invariant: the page loads nothing, runs no script, and is the same for the same runs.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import ConfigurationError
from ...import_utils import require_matplotlib
from ..colors import GRID, INK, MUTED, ON_DARK, colors_of
from ..simulation.recorded import curve_of
from . import charts
from .panels import Panel, panels_of
from .runs import Run, read_runs
from .tables import Window, compared_steps
from .verdict import UNKNOWN, busy, cautions, compare_settings, in_short, summary


# Colours of charts that follow the page's theme
THEME = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--line)"}
THEME |= {color: f"var(--{color[1:]})" for color in ON_DARK}


def write_report(
    directories: Sequence[str | Path],
    output: str | Path = "report.html",
    *,
    names: Sequence[str] = (),
    step: int | None = None,
    latency_curve: str | Path | None = None,
) -> Path:
    """
    Writes a report of one or several runs.

    Args:
        directories (`Sequence[str | Path]`):
            The `output_dir` of each training, at most six. A folder stands for all runs in it, of which those without
            over-sampling come first. The first run is the baseline.
        output (`str` or `Path`, *optional*, defaults to `"report.html"`):
            The page. Its directory is created.
        names (`Sequence[str]`, *optional*):
            The runs' names. Defaults to their directories'.
        step (`int`, *optional*):
            The step whose first rollout is shown, counted from 1. Defaults to one whose rollouts took the median time.
        latency_curve (`str` or `Path`, *optional*):
            File of a [`LatencyCurve`], with which predicted times are shown against real ones.

    Returns:
        `Path`: The page.

    Raises:
        [`ConfigurationError`]: If a directory has no run, a run is empty or broken, an argument is wrong, or the page
            can't be written.
        [`ImportError`]: If matplotlib or Jinja is missing.

    Example:

    ```python
    from trl_darts.analysis.report import write_report

    write_report(["outputs/grpo", "outputs/darts"], "report.html")
    ```
    """
    require_matplotlib()
    output = _check_output(Path(output))
    runs = read_runs(directories, names)
    models = {run.name: run.settings.get("model") for run in runs}
    curve = None if latency_curve is None else curve_of(latency_curve, models)
    window = compared_steps(runs)
    page = render(runs, window, list(panels_of(runs, window, step, curve)))
    output.write_text(page, encoding="utf-8")
    return output


def render(runs: Sequence[Run], window: Window | None, panels: Sequence[Panel]) -> str:
    """Returns the page."""
    import jinja2
    from markupsafe import Markup, escape

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
    settings = compare_settings(runs)
    names = [run.name for run in runs]
    return environment.get_template("page.html.jinja").render(
        runs=runs,
        window=window,
        in_short=in_short(runs, settings, window),
        cautions=[*cautions(runs, settings, window), *filter(None, map(busy, runs))],
        summary=summary(runs, window),
        settings=settings,
        unknown=UNKNOWN,
        panels=panels,
        figures={panel.key: [Markup(picture) for picture in figures(panel, names)] for panel in panels},
        lines=legend(names),
        looks=charts.LOOKS,
        on_dark=ON_DARK,
        version=__version__,
    )


def figures(panel: Panel, names: Sequence[str]) -> list[str]:
    """Draws a panel's charts in the colours of the page's theme."""
    drawn = [charts.svg([own], names, f"{panel.key}{i}", panel.height) for i, own in enumerate(panel.charts)]
    return [re.sub("|".join(THEME), lambda color: THEME[color[0]], picture) for picture in drawn]


def legend(names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns name, colour and dashes of each run."""
    dashes = [" ".join(f"{1.9 * length:g}" for length in own) for own in charts.DASHES]
    return [
        {"name": name, "color": THEME[color], "dashes": own}
        for name, color, own in zip(names, colors_of(names), dashes, strict=False)
    ]


def _check_output(output: Path) -> Path:
    if os.path.isdir(output) or output.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(
            f"`--output` ({str(output)!r}) must be the name of an HTML file. Choose one such as 'report.html'."
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    return output
