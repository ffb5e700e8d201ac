"""
Mean and variance of a group of response lengths of which some are only lower bounds.

A candidate that was aborted, or that hit the length limit, is *censored*: it would have been longer than what was
seen. Counted as observed, or left out, the censored candidates make the worst prompts look calm. Here they are filled
in:

1. a log-normal distribution is fitted by probability plotting: the logarithms of the complete lengths are regressed on
   the
   normal scores of their Kaplan-Meier positions (Michael and Schucany, 1986; Blom's constant), a closed form;
2. every censored length is replaced by its conditional mean, and second moment, beyond its bound under that fit, while
   the
   complete lengths count as they are.

Without censoring the result is the plain sample mean and the plain sample variance, whatever the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple


BLOM = 0.375
"""Offset of the plotting positions: (i - 0.375) / (n + 0.25) where nothing is censored."""

MAX_SIGMA = 1.5
"""
Largest log-scale standard deviation that a fit may report. The second moment grows with exp(2 sigma²), and a slope
through a few points is noisy: 1.5 is a p99 of 33 times the median, the heaviest tail reported for reasoning models.
"""

MIN_SIGMA = 0.05
"""Smallest one: complete lengths that happen to be equal don't prove that an aborted candidate was about to end."""

MIN_COMPLETE = 3
"""Fewer complete lengths than this say too little of the spread: sigma then comes from the data set."""

DEFAULT_RHO = 1.0
"""Standard deviation over mean that stands in for the data set's before there is any."""

_FAR_TAIL = 25.0  # normal score beyond which erfc is replaced by its asymptote, long before it underflows at 38
_SQRT2 = math.sqrt(2.0)


class GroupMoments(NamedTuple):
    """
    Estimated moments of one prompt's response lengths.

    Attributes:
        mean (`float`):
            Mean, in tokens.
        variance (`float`):
            Sample variance (divided by n - 1; 0 for one complete length), in tokens².
        square (`float`):
            Mean of the squares, in tokens²: what pools over groups of different sizes.
    """

    mean: float
    variance: float
    square: float


@lru_cache(maxsize=8192)
def _plotting_scores(num: int, pattern: int) -> tuple[tuple[float, ...], float, float]:
    """
    Normal scores of the complete lengths less their mean, that mean, and their sum of squares. Bit i = i-th censored.
    """
    inv_cdf = NormalDist().inv_cdf
    survival = (num - BLOM + 1) / (num - 2 * BLOM + 1)
    scores = []
    for i in range(num):
        if not pattern >> i & 1:
            survival *= (num - i - BLOM) / (num - i - BLOM + 1)
            scores.append(inv_cdf(1.0 - survival))
    mean = sum(scores) / len(scores) if scores else 0.0
    centred = tuple(score - mean for score in scores)
    return centred, mean, sum(score * score for score in centred)


def _fit_log_normal(lengths: Sequence[float], censored: Sequence[bool], prior_rho: float) -> tuple[float, float]:
    """Location and scale of the logarithm of the lengths."""
    logs, pattern = [], 0
    for i, (length, is_censored) in enumerate(sorted(zip(lengths, censored, strict=True))):
        if is_censored:
            pattern |= 1 << i
        else:
            logs.append(math.log(length) if length > 1 else 0.0)
    centred, score_mean, score_squares = _plotting_scores(len(lengths), pattern)
    if len(logs) >= MIN_COMPLETE:
        slope = sum(map(float.__mul__, centred, logs)) / score_squares
        sigma = min(max(slope, MIN_SIGMA), MAX_SIGMA)
    else:
        rho = prior_rho if prior_rho == prior_rho else DEFAULT_RHO
        sigma = min(max(math.sqrt(math.log1p(rho * rho)), MIN_SIGMA), MAX_SIGMA)
    if logs:
        return sum(logs) / len(logs) - sigma * score_mean, sigma
    # Nothing complete: the bounds are taken for the median. Anything bolder would dwarf every other prompt of the
    # batch.
    return sum(math.log(length) if length > 1 else 0.0 for length in lengths) / len(lengths), sigma


def _beyond(bound: float, mu: float, sigma: float, horizon: float) -> tuple[float, float]:
    """Mean and variance of a log-normal length that is cut off at `horizon`, given that it exceeds `bound`."""
    bound = max(bound, 1.0)
    if bound >= horizon:
        return bound, 0.0
    z = (math.log(bound) - mu) / sigma
    if z <= _FAR_TAIL and horizon < math.inf:
        return _between(bound, z, mu, sigma, horizon)
    if z > _FAR_TAIL:
        mean = bound * z / (z - sigma)
        square = bound * bound * z / (z - 2 * sigma)
    else:
        survival = math.erfc(z / _SQRT2)
        mean = math.exp(mu + sigma * sigma / 2) * math.erfc((z - sigma) / _SQRT2) / survival
        square = math.exp(2 * (mu + sigma * sigma)) * math.erfc((z - 2 * sigma) / _SQRT2) / survival
    mean = max(mean, bound)
    if mean >= horizon:
        return horizon, 0.0
    return mean, max(square - mean * mean, 0.0)


def _between(bound: float, z: float, mu: float, sigma: float, horizon: float) -> tuple[float, float]:
    """The same for a finite horizon; `z` is the normal score of `bound`."""
    end = (math.log(horizon) - mu) / sigma
    survival = math.erfc(z / _SQRT2)
    cut = math.erfc(end / _SQRT2) / survival
    moments = []
    for power in (1, 2):
        shift = power * sigma
        part = (math.erfc((z - shift) / _SQRT2) - math.erfc((end - shift) / _SQRT2)) / survival
        moments.append(math.exp(power * mu + shift * shift / 2) * part + horizon**power * cut)
    mean = min(max(moments[0], bound), horizon)
    return mean, max(moments[1] - mean * mean, 0.0)


def group_moments(
    lengths: Sequence[int],
    censored: Sequence[bool] | None = None,
    prior_rho: float = math.nan,
    horizon: float = math.inf,
) -> GroupMoments:
    """
    Mean and variance of one prompt's response lengths, σ²_L(q_i) of
    [DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2, with lower bounds taken for what they are.

    Args:
        lengths (`Sequence[int]` of shape `(B,)`):
            Response lengths in tokens, in any order.
        censored (`Sequence[bool]` of shape `(B,)`, *optional*):
            Whether the length is a lower bound: the candidate was aborted or hit the limit. By default none is.
        prior_rho (`float`, *optional*, defaults to NaN):
            The data set's standard deviation over mean. Gives the fit its spread where fewer than `MIN_COMPLETE`
            lengths are complete; NaN stands for `DEFAULT_RHO`.
        horizon (`float`, *optional*, defaults to infinity):
            No censored length is taken to be longer than this. The second moment of a log-normal tail that is fitted
            to a few points is mostly made of lengths that no engine would let happen.

    Returns:
        [`GroupMoments`]: All finite; the mean is never below the mean of `lengths`.

    Raises:
        [`ValueError`]: If there are no lengths, one is negative, or `censored` has another length.
    """
    filled, extra = _fill_in(lengths, censored, prior_rho, horizon)
    num = len(filled)
    mean = sum(filled) / num
    spread = sum([(length - mean) ** 2 for length in filled])
    variance = spread / (num - 1) if num > 1 else 0.0
    # E[sample variance] of independent lengths with these means and variances
    return GroupMoments(mean, variance + extra / num, mean * mean + (spread + extra) / num)


def expected_lengths(
    lengths: Sequence[int],
    censored: Sequence[bool],
    prior_rho: float = math.nan,
    horizon: float = math.inf,
) -> list[float]:
    """
    One prompt's response lengths, with what can be expected of those that are lower bounds.

    Args:
        lengths (`Sequence[int]` of shape `(B,)`):
            See [`group_moments`], as all other arguments.
        censored (`Sequence[bool]` of shape `(B,)`):
            Whether the length is a lower bound.
        prior_rho (`float`, *optional*, defaults to NaN):
            The data set's standard deviation over mean.
        horizon (`float`, *optional*, defaults to infinity):
            No censored length is taken to be longer than this.

    Returns:
        `list[float]` of shape `(B,)`: None of them below the one given.

    Raises:
        [`ValueError`]: As [`group_moments`].
    """
    return _fill_in(lengths, censored, prior_rho, horizon)[0]


def _fill_in(
    lengths: Sequence[int], censored: Sequence[bool] | None, prior_rho: float, horizon: float
) -> tuple[list[float], float]:
    """Lengths with expectations in the place of lower bounds, and the sum of their variances."""
    num = len(lengths)
    if num == 0 or min(lengths) < 0:
        raise ValueError(f"`lengths` ({list(lengths)}) must hold at least one length and no negative one.")
    if censored is not None and len(censored) != num:
        raise ValueError(f"`censored` has {len(censored)} entries and `lengths` has {num}. Give one flag per length.")
    filled, extra = list(map(float, lengths)), 0.0
    if censored is not None and any(censored):
        mu, sigma = _fit_log_normal(filled, censored, prior_rho)
        beyond: dict[float, tuple[float, float]] = {}  # aborted candidates of a group mostly share their bound
        for i, is_censored in enumerate(censored):
            if is_censored:
                bound = filled[i]
                if bound not in beyond:
                    beyond[bound] = _beyond(bound, mu, sigma, horizon)
                filled[i], variance = beyond[bound]
                extra += variance
    return filled, extra
