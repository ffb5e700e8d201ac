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
    return f"{mean:.2f}" if math.isnan(low) else f"{mean:.2f} ({low:.2f} to {high:.2f})"


def mean(values: Sequence[float]) -> str:
    """Formats a mean with as many decimals as its interval has meaning."""
    if not len(values):
        return "–"
    estimate = Estimate.of(values)
    if math.isinf(estimate.half_width) or not estimate.half_width:
        return f"{estimate.mean:.3g}"
    if estimate.half_width >= 10:
        return f"{estimate.mean:.0f} ± {estimate.half_width:.0f}"
    decimals = 1 - math.floor(math.log10(estimate.half_width))
    decimals -= estimate.half_width * 10**decimals >= 20  # two digits for an interval that begins with 1
    return f"{estimate.mean:z.{decimals}f} ± {estimate.half_width:.{decimals}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown whose first column is text."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
