"""
Estimates the mean and variance of a group of response lengths, some of which are only lower bounds.

A candidate that was aborted, or that hit the length limit, is *censored*: it would have been longer than observed.
If censored lengths were used as they are, or left out, the variance of the prompts with the longest tails would be
underestimated. They are imputed instead:

1. a log-normal distribution is fitted by probability plotting: the logarithms of the complete lengths are regressed on
   the normal scores of their Kaplan-Meier positions (Michael and Schucany, 1986; Blom's constant), a closed form;
2. its log-scale deviation is shrunk towards that of the data set's groups: a slope through a few points is noisy, and
   because the variance grows with exp(2 sigma²), that noise inflates it;
3. every censored length is replaced by its conditional mean and second moment beyond its bound under that fit. The
   complete lengths are used unchanged.

Without censoring, the result is the sample mean and the sample variance, whatever the distribution.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple


BLOM = 0.375
"""Offset of the plotting positions: (i - 0.375) / (n + 0.25) where nothing is censored."""

PRIOR_WEIGHT = 4
"""
Weight of the data set's log-scale deviation in a group's, in complete lengths. With half of each group cut off and
sigma = 1, the median of the estimated deviation is 1.25 times the true one (1.7 without). A larger weight would hide
differences between prompts: if half of them have sigma = 0.25 and half 1, the medians are 1.7 and 0.85 (2.2 and 0.6
with 8).
"""

DEFAULT_LOG_STD = 0.8
"""Used before the data set's is known. It makes the standard deviation about as large as the mean."""

MIN_LOG_STD, MAX_LOG_STD = 0.05, 1.5
"""
Bounds of the fitted log-scale deviation. The lower one applies when a few complete lengths are equal by chance. The
upper one gives a p99 of 33 times the median, the heaviest tail reported for reasoning models.
"""

MAX_CACHED = 64  # lengths
FAR_TAIL = 25.0  # largest normal score of a bound: the fit says nothing beyond it, and erfc underflows at 38
_SQRT2 = math.sqrt(2.0)


class GroupMoments(NamedTuple):
    """Estimated moments of one prompt's response lengths."""

    mean: float  # tokens
    variance: float  # of the sample (divided by n - 1; 0 for one complete length), tokens²
    square: float  # mean of the squares, tokens²: can be pooled over groups of different sizes
    log_std: float  # log-scale deviation of the group's complete lengths alone; NaN for fewer than two
    num_complete: int


def group_moments(
    lengths: Sequence[int],
    censored: Sequence[bool] | None = None,
    log_std: float = math.nan,
    horizon: float = math.inf,
) -> GroupMoments:
    """
    Estimate mean and variance of one prompt's response lengths, σ²_L(q_i) of
    [DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2, with some lengths being lower bounds.

    `log_std` is the log-scale deviation within the data set's groups, NaN for `DEFAULT_LOG_STD`. Censored lengths are
    cut off at `horizon`, because the second moment of a log-normal tail fitted to a few points is dominated by lengths
    that no engine allows. The moments are finite, and the mean is never below that of `lengths`.
    """
    num = len(lengths)
    if num == 0 or min(lengths) < 0:
        raise ValueError(f"`lengths` ({list(lengths)}) must hold at least one length and no negative one.")
    if censored is None:
        censored = [False] * num
    if len(censored) != num:
        raise ValueError(f"`censored` has {len(censored)} entries and `lengths` has {num}. Give one flag per length.")
    filled, extra = list(map(float, lengths)), 0.0
    mu, sigma, raw, num_complete = log_normal_fit(lengths, censored, log_std)
    if num_complete < num:
        beyond: dict[float, tuple[float, float]] = {}  # aborted candidates of a group mostly share their bound
        for i, is_censored in enumerate(censored):
            if is_censored:
                bound = filled[i]
                if bound not in beyond:
                    beyond[bound] = _beyond(bound, mu, sigma, horizon)
                filled[i], variance = beyond[bound]
                extra += variance
    mean = sum(filled) / num
    spread = sum([(length - mean) ** 2 for length in filled])
    variance = spread / (num - 1) if num > 1 else 0.0
    # E[sample variance] of independent lengths with these means and variances
    return GroupMoments(mean, variance + extra / num, mean * mean + (spread + extra) / num, raw, num_complete)


def log_normal_fit(
    lengths: Sequence[float],
    censored: Sequence[bool],
    log_std: float = math.nan,
    min_log_std: float = MIN_LOG_STD,
) -> tuple[float, float, float, int]:
    """
    Fit a log-normal to lengths of which some are lower bounds. Returns its location and scale, the scale before it was
    shrunk towards `log_std` (NaN for fewer than two complete lengths), and the number of complete lengths. The scale
    is at least `min_log_std`, because a few lengths can be equal by chance.
    """
    num, ordered = len(lengths), sorted(zip(lengths, censored, strict=True))
    logs = [math.log(max(length, 1)) for length, is_censored in ordered if not is_censored]
    # Patterns of small groups recur. Those of whole rollouts don't, and would fill the cache.
    scores = _plotting_scores if num <= MAX_CACHED else _plotting_scores.__wrapped__
    centred, score_mean, score_squares = scores(num, sum(cut << i for i, (_, cut) in enumerate(ordered)))
    raw = sum(map(float.__mul__, centred, logs)) / score_squares if len(logs) > 1 else math.nan
    sigma = max(_shrunk(raw, len(logs), log_std), min_log_std)
    if logs:
        mu = sum(logs) / len(logs) - sigma * score_mean
    else:  # the bounds serve as the median: a larger guess would outweigh every other prompt of the batch
        mu = sum(math.log(max(length, 1)) for length in lengths) / num
    return mu, sigma, raw, len(logs)


@lru_cache(maxsize=8192)
def _plotting_scores(num: int, pattern: int) -> tuple[tuple[float, ...], float, float]:
    """
    Returns the centred normal scores of the complete lengths, their mean, and their sum of squares. Bit i of `pattern`
    is set if the i-th length is censored.
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


def _shrunk(raw: float, num_complete: int, prior: float) -> float:
    """Returns the weighted mean of a group's own log-scale deviation and the data set's."""
    if math.isnan(prior):
        prior = DEFAULT_LOG_STD
    if math.isnan(raw):
        raw, num_complete = 0.0, 1
    weight = num_complete - 1  # of a slope
    sigma = (PRIOR_WEIGHT * prior + weight * raw) / (PRIOR_WEIGHT + weight)
    return min(sigma, MAX_LOG_STD)


def _beyond(bound: float, mu: float, sigma: float, horizon: float) -> tuple[float, float]:
    """Returns mean and variance of a log-normal length cut off at `horizon`, given that it exceeds `bound`."""
    bound = max(bound, 1.0)
    if bound >= horizon:
        return bound, 0.0
    z = min((math.log(bound) - mu) / sigma, FAR_TAIL)
    mu = math.log(bound) - z * sigma
    end = (math.log(horizon) - mu) / sigma
    survival = math.erfc(z / _SQRT2)
    cut = math.erfc(end / _SQRT2) / survival
    moments = []
    for power in (1, 2):
        shift = power * sigma
        part = (math.erfc((z - shift) / _SQRT2) - math.erfc((end - shift) / _SQRT2)) / survival
        moments.append(math.exp(power * mu + shift * shift / 2) * part + (horizon**power * cut if cut else 0.0))
    mean = min(max(moments[0], bound), horizon)
    return mean, max(moments[1] - mean * mean, 0.0)
