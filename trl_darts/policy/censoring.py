"""
Mean and variance of a group of response lengths of which some are only lower bounds.

A candidate that was aborted, or that hit the length limit, is *censored*: it would have been longer than what was
seen. Counted as observed, or left out, the censored candidates make the worst prompts look calm. Here they are filled
in:

1. a log-normal distribution is fitted by probability plotting: the logarithms of the complete lengths are regressed on
   the normal scores of their Kaplan-Meier positions (Michael and Schucany, 1986; Blom's constant), a closed form;
2. its log-scale deviation is drawn towards that of the data set's groups: the slope through a few points is noisy, and
   the variance grows with exp(2 sigma²), so that noise makes it larger;
3. every censored length is replaced by its conditional mean, and second moment, beyond its bound under that fit, while
   the complete lengths count as they are.

Without censoring the result is the plain sample mean and the plain sample variance, whatever the distribution.
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
Complete lengths that the data set's log-scale deviation counts for in a group's. With half of each group cut off and
sigma = 1, the median of the estimated deviation is 1.25 times the true one (1.7 without). More would hide differences
between prompts: where half of them have sigma = 0.25 and half 1, the medians are 1.7 and 0.85 (2.2 and 0.6 with 8).
"""

DEFAULT_LOG_STD = 0.8
"""Stands for the data set's before there is any: the standard deviation is then about the mean."""

MIN_LOG_STD, MAX_LOG_STD = 0.05, 1.5
"""
Bounds of a fit. Complete lengths that happen to be equal don't prove that an aborted candidate was about to end, and
1.5 is a p99 of 33 times the median, the heaviest tail reported for reasoning models.
"""

MAX_CACHED = 64  # lengths
FAR_TAIL = 25.0  # normal score from which on a bound is beyond what the fit knows of; erfc underflows at 38
_SQRT2 = math.sqrt(2.0)


class GroupMoments(NamedTuple):
    """Estimated moments of one prompt's response lengths."""

    mean: float  # tokens
    variance: float  # of the sample (divided by n - 1; 0 for one complete length), tokens²
    square: float  # mean of the squares, tokens²: what pools over groups of different sizes
    log_std: float  # log-scale deviation by the group's complete lengths alone; NaN for fewer than two
    num_complete: int


def group_moments(
    lengths: Sequence[int],
    censored: Sequence[bool] | None = None,
    log_std: float = math.nan,
    horizon: float = math.inf,
) -> GroupMoments:
    """
    Mean and variance of one prompt's response lengths, σ²_L(q_i) of
    [DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2, with lower bounds taken for what they are.

    `log_std` is the log-scale deviation within the data set's groups, NaN for `DEFAULT_LOG_STD`. No censored length is
    taken to be longer than `horizon`: the second moment of a log-normal tail that is fitted to a few points is mostly
    made of lengths that no engine would let happen. The moments are finite, and the mean is never below that of
    `lengths`.
    """
    num = len(lengths)
    if num == 0 or min(lengths) < 0:
        raise ValueError(f"`lengths` ({list(lengths)}) must hold at least one length and no negative one.")
    if censored is None:
        censored = [False] * num
    if len(censored) != num:
        raise ValueError(f"`censored` has {len(censored)} entries and `lengths` has {num}. Give one flag per length.")
    filled, extra = list(map(float, lengths)), 0.0
    mu, sigma, own, num_complete = log_normal_fit(lengths, censored, log_std)
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
    return GroupMoments(mean, variance + extra / num, mean * mean + (spread + extra) / num, own, num_complete)


def log_normal_fit(
    lengths: Sequence[float],
    censored: Sequence[bool],
    log_std: float = math.nan,
    min_log_std: float = MIN_LOG_STD,
) -> tuple[float, float, float, int]:
    """
    Location and scale of the log-normal that lengths come from, some of them lower bounds; the scale before it was
    drawn towards `log_std`, NaN for fewer than two complete lengths; and the number of these. The scale is at
    least `min_log_std`: few lengths can be equal by chance, those of a whole rollout can't.
    """
    num, ordered = len(lengths), sorted(zip(lengths, censored, strict=True))
    logs = [math.log(max(length, 1)) for length, is_censored in ordered if not is_censored]
    # Small groups have few patterns, and see them again; those of whole rollouts would fill the memory.
    scores = _plotting_scores if num <= MAX_CACHED else _plotting_scores.__wrapped__
    centred, score_mean, score_squares = scores(num, sum(cut << i for i, (_, cut) in enumerate(ordered)))
    own = sum(map(float.__mul__, centred, logs)) / score_squares if len(logs) > 1 else math.nan
    sigma = max(_shrunk(own, len(logs), log_std), min_log_std)
    if logs:
        mu = sum(logs) / len(logs) - sigma * score_mean
    else:  # the bounds are taken for the median: anything bolder would dwarf every other prompt of the batch
        mu = sum(math.log(max(length, 1)) for length in lengths) / num
    return mu, sigma, own, len(logs)


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


def _shrunk(own: float, num_complete: int, prior: float) -> float:
    """The log-scale deviation of a group: its own and the data set's, weighted."""
    if math.isnan(prior):
        prior = DEFAULT_LOG_STD
    if math.isnan(own):
        own, num_complete = 0.0, 1
    weight = num_complete - 1  # of a slope
    sigma = (PRIOR_WEIGHT * prior + weight * own) / (PRIOR_WEIGHT + weight)
    return min(sigma, MAX_LOG_STD)


def _beyond(bound: float, mu: float, sigma: float, horizon: float) -> tuple[float, float]:
    """Mean and variance of a log-normal length that is cut off at `horizon`, given that it exceeds `bound`."""
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
