"""The page's panel of predicted against real time, and what curve it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ..errors import ConfigurationError
from ..policy import LatencyCurve
from . import charts, timing
from .compare import Comparison
from .drawing import Chart
from .formats import number, percent, times
from .sections import Panel, Table


def prediction(comparison: Comparison, curve: LatencyCurve | None) -> Panel:
    """The cost model's seconds against those that rollouts took."""
    title = "Predicted against real time"
    lead = (
        "Each point is a rollout: what the latency curve makes of the lengths in its trace (DARTS, Eq. 4), against "
        "the seconds it took. On the line both are equal; above it, the rollout took longer than predicted. The model "
        "starts all candidates at once, on one engine: queues, prefill and requests are not in it."
    )
    if curve is None:
        note = (
            "Left out: no latency curve was given. `trl-darts profile` measures one; then add "
            "`--latency-curve FILE` to this report's command."
        )
        return Panel("prediction", title, lead, [], notes=[note])
    predicted = {
        i: timing.predicted_times(run.traces, curve) for i, run in enumerate(comparison.runs) if not run.traces.empty
    }
    found = _charts(predicted, comparison.names) if predicted else []
    rows = [_row(comparison.names[i], table) for i, table in predicted.items()]
    header = ["Run", "Rollouts", "Predicted / real, median", "Off by, median", "Rank correlation"]
    table = Table(f"All rollouts of each run{_about(curve)}", header, rows) if rows else None
    notes = [f"{run.name}: no traces, and a prediction needs lengths." for run in comparison.runs if run.traces.empty]
    return Panel("prediction", title, lead, found, table, notes=notes)


def _charts(predicted: Mapping[int, pd.DataFrame], names: Sequence[str]) -> list[Chart]:
    ratios = {i: table["predicted"] / table["real"] for i, table in predicted.items()}
    medians = " ".join(
        f"{names[i]}: predicted {times(ratio.median())} the real time in the median." for i, ratio in ratios.items()
    )
    by_step = {i: ratio.groupby("step").mean() for i, ratio in ratios.items()}
    return [
        charts.scatter("Real seconds", f"Real against predicted seconds. {medians}", predicted, "predicted", "real"),
        charts.lines("Predicted / real", f"Predicted over real seconds, over steps. {medians}", by_step, level=1.0),
    ]


def _row(name: str, table: pd.DataFrame) -> list[str]:
    ratio = table["predicted"] / table["real"]
    off = (ratio - 1).abs().median()
    return [name, str(len(table)), times(ratio.median()), percent(off), number(_correlation(table))]


def check_curve(comparison: Comparison, curve: LatencyCurve, path: Any) -> None:
    """
    Refuses a curve that was measured with another model.

    Args:
        comparison ([`Comparison`]):
            Runs.
        curve ([`LatencyCurve`]):
            The curve. One that does not tell its model fits any run, as does a run that does not tell its own.
        path (`str` or `Path`):
            Where it came from.

    Raises:
        [`ConfigurationError`]: If a run's model has another name. Directories before the name don't count.
    """
    own = curve.metadata.get("model")
    for run in comparison.runs:
        model = run.settings.get("model")
        if not curve.is_of(model):
            raise ConfigurationError(
                f"`latency_curve` ({str(path)!r}) must be of the runs' model, and is of {own!r}, while {run.name!r} "
                f"trained {model!r}. Measure one with `trl-darts profile`, or leave the option out."
            )


def _about(curve: LatencyCurve) -> str:
    known = [f"{name} {value}" for name, value in curve.metadata.items() if isinstance(value, str | int | float)]
    return f"; curve: {', '.join(known)}" if known else "; the curve does not tell its model"


def _correlation(table: pd.DataFrame) -> float:
    """Spearman's, without SciPy."""
    ranks = table.rank()
    return float(ranks["predicted"].corr(ranks["real"])) if len(table) > 2 else math.nan
