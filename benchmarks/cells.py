"""
How the tables of benchmarks/REPORT.md show numbers: geometric means of ratios as `1.16 (1.09 to 1.23)`, other means as
`0.74 ± 0.02`, each with the 95 % interval by Student's t.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trl_darts.analysis.estimates import Estimate


Run = Mapping[str, Any]
Pairs = Sequence[tuple[Run, Run]]  # an arm's run and the baseline's, by seed
Columns = Mapping[str, tuple[Callable[[Run, Run], float], Callable[[Sequence[float]], str]]]
"""Of a table: by title, a value of an arm's run and the baseline's, and how the values of all seeds are shown."""


def geometric(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios and the ends of its interval, which are NaN for a single ratio."""
    logs = Estimate.of(np.log(ratios).tolist())
    half = math.nan if math.isinf(logs.half_width) else logs.half_width
    return math.exp(logs.mean), math.exp(logs.mean - half), math.exp(logs.mean + half)


def ratio(ratios: Sequence[float]) -> str:
    """Formats the geometric mean of ratios. It is `1` where all are, as those of a baseline to itself."""
    if not len(ratios):
        return "–"
    if all(value == 1 for value in ratios):
        return "1"
    mean, low, high = geometric(ratios)
    return _digits(mean) if math.isnan(low) else f"{_digits(mean)} ({_digits(low)} to {_digits(high)})"


def _digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def mean(values: Sequence[float]) -> str:
    """Formats a mean: two digits of its interval, but no more than three of the mean."""
    if not len(values):
        return "–"
    estimate = Estimate.of(values)
    if math.isinf(estimate.half_width) or not estimate.half_width:
        return f"{estimate.mean:.3g}"
    largest = max(abs(estimate.mean), estimate.half_width)
    decimals = max(0, min(1 - _power(estimate.half_width), 2 - _power(largest)))
    return f"{estimate.mean:z.{decimals}f} ± {estimate.half_width:.{decimals}f}"


def _power(value: float) -> int:
    return math.floor(math.log10(value))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown whose first column is text."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arms_of(runs: Iterable[Run]) -> list[str]:
    """Returns the arms in the order of their first runs."""
    return list(dict.fromkeys(run["arm"] for run in runs))


def pairs_of(runs: Sequence[Run], arm: str, baseline: str = "grpo") -> Pairs:
    """Pairs the runs of an arm with the baseline's runs of the same seeds."""
    base = {run["seed"]: run for run in runs if run["arm"] == baseline}
    return [(run, base[run["seed"]]) for run in runs if run["arm"] == arm and run["seed"] in base]


def compare(
    title: str, cases: Mapping[str, Sequence[Run]], columns: Columns, arms: Iterable[str], baseline: str = "grpo"
) -> str:
    """Returns a row for each case and arm that has the baseline of a seed beside it."""
    rows = []
    for case, runs in cases.items():
        for arm in arms:
            if pairs := pairs_of(runs, arm, baseline):
                found = {name: [value(*pair) for pair in pairs] for name, (value, _) in columns.items()}
                shown = [form(list(filter(math.isfinite, found[name]))) for name, (_, form) in columns.items()]
                rows.append([f"{case}{arm} ({len(pairs)})", *shown])
    return table([title, *columns], rows)
