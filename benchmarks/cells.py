"""
How the tables of benchmarks/REPORT.md show numbers: geometric means of ratios as `1.16 (1.09 to 1.23)`, other means as
`0.74 ± 0.02`, each with the 95 % interval by Student's t.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from trl_darts.analysis.estimates import Estimate


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
