"""Numbers as a person reads them."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Three significant digits, or all digits of the whole part."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def plus_minus(mean: float, std: float) -> str:
    """A mean and its spread, both with as many digits as two of the spread's take."""
    if not math.isfinite(std):
        return number(mean)
    digits = max(0, min(6, 1 - math.floor(math.log10(std)))) if std > 0 else 2
    return f"{mean:,.{digits}f} ± {std:,.{digits}f}"


def percent(value: float) -> str:
    """A share as whole percents; with one digit below ten."""
    return f"{100 * value:.{1 if 0 < abs(value) < 0.0995 else 0}f} %" if math.isfinite(value) else "–"


def times(ratio: float) -> str:
    """A multiple, with two digits after the point below ten."""
    return f"{ratio:.2f}×" if abs(ratio) < 9.995 else f"{number(ratio)}×"


def faster(ratio: float) -> str:
    """How time changed: `ratio` is the new time over the old one."""
    if not (math.isfinite(ratio) and ratio > 0):
        return "–"
    if 0.995 < ratio < 1.005:
        return "equally fast"
    return f"{1 / ratio:.2f}× faster" if ratio < 1 else f"{ratio:.2f}× slower"


def time_unit(longest: float) -> tuple[str, float]:
    """In which unit to show times of up to so many seconds, and its seconds."""
    if longest > 3 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if longest > 600 else ("seconds", 1.0)


def listing(words: list[str]) -> str:
    """Words with commas, and an "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
