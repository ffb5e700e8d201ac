"""Means and ratios with 95 % intervals (Student's t), and their text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    import pandas as pd  # takes a second to import


MIN_ENTRIES = 4  # with fewer, intervals are many times the mean


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds or steps, and half of its 95 % confidence interval: infinity for a single value."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Returns the mean and the interval of independent values."""
        mean, num = float(np.mean(values)), len(values)
        if num == 1:
            return cls(mean, math.inf)
        return cls(mean, half_width(float(np.std(values, ddof=1)) / math.sqrt(num), num - 1))

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if math.isinf(self.half_width) else f"{self.mean:.3g} ± {self.half_width:.2g}"


def half_width(standard_error: float, degrees: int) -> float:
    """Returns half of a 95 % interval, by Student's t; infinity without degrees of freedom."""
    from scipy.special import stdtrit  # takes a third of a second to import, for which `--help` should not wait

    return float(stdtrit(degrees, 0.975) * standard_error) if degrees > 0 else math.inf


def mean_of(values: pd.Series) -> Estimate:
    """Returns the mean of the known values."""
    known = values.dropna()
    if len(known) < MIN_ENTRIES:
        return Estimate(float(known.mean()), math.inf)
    return Estimate.of(known.to_list())


def ratio_of_sums(above: Sequence[pd.Series], below: Sequence[pd.Series]) -> Estimate:
    """
    Returns the product of some columns' sums over the product of others', from one row per step. The interval is that
    of the first-order expansion, in which each row moves the logarithm by its share of each sum.
    """
    table = np.column_stack([*above, *below]).astype(float)
    table = table[~np.isnan(table).any(axis=1)]
    sums = table.sum(axis=0)
    over, under = sums[: len(above)], sums[len(above) :]
    if not len(table) or not under.all():
        return Estimate(math.nan, math.inf)
    if not over.all():
        return Estimate(0.0, 0.0)
    moves = (table / sums) @ np.repeat([1.0, -1.0], [len(above), len(below)])
    value = float(np.prod(over) / np.prod(under))
    error = math.sqrt(len(table)) * float(np.std(moves, ddof=1)) if len(table) >= MIN_ENTRIES else math.inf
    return Estimate(value, abs(value) * half_width(error, len(table) - 1))


def quotient(value: Estimate, first: Estimate) -> Estimate:
    """Returns the ratio of two independent estimates."""
    ratio = value.mean / first.mean
    return Estimate(ratio, abs(ratio) * math.hypot(value.half_width / value.mean, first.half_width / first.mean))


def fit_linear(
    columns: pd.DataFrame, y: pd.Series, weights: pd.Series, sums: Sequence[Sequence[float]]
) -> list[Estimate]:
    """
    Fits `y` by weighted least squares, and estimates each weighted sum of the coefficients: NaN if the entries do not
    determine it.
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
    """Formats a number with three significant digits, or all digits of its whole part."""
    return f"{value:,.{_places(value, 3)}f}" if math.isfinite(value) else "–"


def _places(value: float, significant: int) -> int:
    """Returns the decimal places of a number with so many significant digits."""
    return min(6, max(0, significant - 1 - math.floor(math.log10(abs(value))))) if value else 0


def percent(value: float) -> str:
    """Formats a share in whole percent, with one decimal below ten."""
    return f"{100 * value:.{1 if 0 < abs(value) < 0.0995 else 0}f} %" if math.isfinite(value) else "–"


def plus_minus(estimate: Estimate, unit: str = "") -> str:
    """Formats a number and half of its interval: two digits of the interval, and at most three of the number."""
    mean, half = estimate.mean, estimate.half_width
    digits = min(_places(half, 2), _places(mean or half, 3)) if _has_interval(estimate) else 0
    if not _has_interval(estimate) or not round(half, digits):
        return number(mean) + unit
    return f"{mean:,.{digits}f} ± {half:,.{digits}f}{unit}".replace("-", "−")


def plus_minus_percent(estimate: Estimate) -> str:
    """Formats a share and half of its interval in percent."""
    if not _has_interval(estimate):
        return percent(estimate.mean)
    return plus_minus(Estimate(100 * estimate.mean, 100 * estimate.half_width), " %")


def _has_interval(estimate: Estimate) -> bool:
    """Whether there is an interval, beyond a rounding error."""
    return math.isfinite(estimate.mean) and 1e-9 * abs(estimate.mean) < estimate.half_width < math.inf
