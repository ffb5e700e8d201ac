"""
Writes the report: one HTML page, and its figures as PNG files beside it.

Invariant: the page loads nothing, runs no script, and is the same for the same runs.
"""

import base64
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import __version__
from ...errors import ConfigurationError
from ...import_utils import require_matplotlib
from ..output_files import check_directory, check_writable, writing
from ..simulation.recorded import curve_of
from . import panels
from .panels import Panel, figure
from .runs import Run, read_runs
from .verdict import UNKNOWN, busy, cautions, compare_settings, in_short, summary


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
            The `output_dir` of each training, at most six. The first is the baseline.
        output (`str` or `Path`, *optional*, defaults to `"report.html"`):
            The page. Its directory is created. Figures are written beside it, as `report-<panel>.png`.
        names (`Sequence[str]`, *optional*):
            The runs' names. Defaults to their directories'.
        step (`int`, *optional*):
            The step whose first rollout is shown, counted from 1. Defaults to one whose rollouts took the median time.
        latency_curve (`str` or `Path`, *optional*):
            File of a [`LatencyCurve`], with which predicted times are shown against real ones.

    Returns:
        `list[Path]`: The page, then the figures.

    Raises:
        [`ConfigurationError`]: If a directory is no run, a run is empty or broken, an argument is wrong, or a file
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
    found = _panels(runs, step, latency_curve)
    paths = {panel.key: output.with_name(f"{output.stem}-{panel.key}.png") for panel in found}
    for path in paths.values():
        check_writable("--output", path)
    run_names = [run.name for run in runs]
    figures = {panel.key: figure(panel.charts, run_names, panel.looks) for panel in found if panel.charts}
    with writing("--output", output):
        output.write_text(render(runs, found, figures), encoding="utf-8")
    for key, path in paths.items():
        with writing("--output", path):
            path.unlink(missing_ok=True)  # a figure of an earlier report
            if key in figures:
                path.write_bytes(figures[key])
    return [output, *(paths[key] for key in figures)]


def _panels(runs: Sequence[Run], step: int | None, latency_curve: str | Path | None) -> list[Panel]:
    models = {run.name: run.settings.get("model") for run in runs}
    curve = None if latency_curve is None else curve_of(latency_curve, models)
    return [
        panels.reward(runs),
        panels.time(runs),
        panels.occupancy(runs, step),
        panels.lengths(runs),
        panels.budget(runs),
        panels.faults(runs),
        panels.prediction(runs, curve),
    ]


def render(runs: Sequence[Run], found: Sequence[Panel], figures: Mapping[str, bytes]) -> str:
    """Returns the page, with the figures in it."""
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
    return environment.get_template("page.html.jinja").render(
        runs=runs,
        in_short=in_short(runs, settings),
        cautions=[*cautions(runs, settings), *filter(None, map(busy, runs))],
        summary=summary(runs),
        settings=settings,
        unknown=UNKNOWN,
        panels=found,
        figures={key: base64.b64encode(picture).decode() for key, picture in figures.items()},
        version=__version__,
    )


def _check_output(output: Path) -> Path:
    if os.path.isdir(output) or output.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(
            f"`--output` ({str(output)!r}) must be the name of an HTML file. Choose one such as 'report.html'."
        )
    check_directory("--output", output.parent)
    check_writable("--output", output)
    return output
