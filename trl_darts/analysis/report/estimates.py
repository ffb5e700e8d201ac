"""
Numbers with 95 % intervals (Student's t), and how they are written.

An interval is over the steps of one run: it does not say what another seed would give.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..simulation import Estimate
from ..simulation.comparison import half_width


MIN_ENTRIES = 4  # with fewer, intervals are many times the mean


def mean_of(values: pd.Series) -> Estimate:
    """The mean of the known values."""
    known = values.dropna()
    if len(known) < MIN_ENTRIES:
        return Estimate(float(known.mean()), math.inf)
    return Estimate.of(known.to_list())


def ratio_of_sums(above: Sequence[pd.Series], below: Sequence[pd.Series]) -> Estimate:
    """
    The product of some columns' sums over the product of others', from one row per step. The interval is that of the
    first-order expansion, in which each row moves the logarithm by its share of each sum.
    """
    table = pd.concat([*above, *below], axis=1).dropna()
    sums = table.sum().to_numpy()
    over, under = sums[: len(above)], sums[len(above) :]
    if not len(table) or not under.all():
        return Estimate(math.nan, math.inf)
    if not over.all():
        return Estimate(0.0, 0.0)
    moves = (table.to_numpy() / sums) @ np.repeat([1.0, -1.0], [len(above), len(below)])
    value = float(np.prod(over) / np.prod(under))
    error = math.sqrt(len(table)) * float(np.std(moves, ddof=1)) if len(table) >= MIN_ENTRIES else math.inf
    return Estimate(value, abs(value) * half_width(error, len(table) - 1))


def quotient(value: Estimate, first: Estimate) -> Estimate:
    """One run's value over another's."""
    ratio = value.mean / first.mean
    return Estimate(ratio, abs(ratio) * math.hypot(value.half_width / value.mean, first.half_width / first.mean))


def fit_linear(
    columns: pd.DataFrame, y: pd.Series, weights: pd.Series, sums: Sequence[Sequence[float]]
) -> list[Estimate]:
    """
    Weighted least squares of `y`: an estimate of each weighted sum of the coefficients. One that the entries do not
    determine is NaN.
    """
    root = np.sqrt(weights.to_numpy(float))
    design, target = columns.to_numpy(float) * root[:, None], y.to_numpy(float) * root
    inverse = np.linalg.pinv(design)
    coefficients = inverse @ target
    degrees = len(y) - int(np.linalg.matrix_rank(design))
    variance = float(((target - design @ coefficients) ** 2).sum()) / degrees if degrees else math.nan
    found = []
    for wanted in np.array(sums, float):
        if not np.allclose(wanted @ inverse @ design, wanted):
            found.append(Estimate(math.nan, math.inf))
            continue
        error = math.sqrt(variance) * float(np.linalg.norm(wanted @ inverse)) if degrees else math.nan
        found.append(Estimate(float(wanted @ coefficients), half_width(error, degrees)))
    return found


def number(value: float) -> str:
    """Three significant digits, or all digits of the whole part."""
    return f"{value:,.{_places(value, 3)}f}" if math.isfinite(value) else "–"


def _places(value: float, significant: int) -> int:
    """Decimal places of a number with so many significant digits."""
    return min(6, max(0, significant - 1 - math.floor(math.log10(abs(value))))) if value else 0


def percent(value: float) -> str:
    """A share in whole percent; with one decimal below ten."""
    return f"{100 * value:.{1 if 0 < abs(value) < 0.0995 else 0}f} %" if math.isfinite(value) else "–"


def plus_minus(estimate: Estimate, unit: str = "") -> str:
    """A number and half of its interval: two digits of the interval, and at most three of the number."""
    mean, half = estimate.mean, estimate.half_width
    digits = min(_places(half, 2), _places(mean or half, 3)) if _has_interval(estimate) else 0
    if not _has_interval(estimate) or not round(half, digits):
        return number(mean) + unit
    return f"{mean:,.{digits}f} ± {half:,.{digits}f}{unit}".replace("-", "−")


def plus_minus_percent(estimate: Estimate) -> str:
    """A share and half of its interval, in percent."""
    if not _has_interval(estimate):
        return percent(estimate.mean)
    return plus_minus(Estimate(100 * estimate.mean, 100 * estimate.half_width), " %")


def _has_interval(estimate: Estimate) -> bool:
    """A rounding error alone is no interval."""
    return math.isfinite(estimate.mean) and 1e-9 * abs(estimate.mean) < estimate.half_width < math.inf
