"""
Measures the bias of training on rows that were selected by their length.

An importance ratio compares two policies on one response; it can't see which responses were kept. This module compares
the kept rows of a rollout with an *unbiased sample* of its pool: the first `num_generations` candidates of every
group, which were started before any length was known. The method is ours.

Candidates that are carried over to the next rollout come first in their group, so its first `num_generations` are
still the ones that were started first.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray


Floats: TypeAlias = NDArray[np.float64]

MAX_STRATA = 8
"""
Largest number of length strata. In a simulation that stopped every group at half its pool (true gap 0.13), two strata
underestimated the gap by 0.06. Four, eight and sixteen were right within their spread, which grows with their number.
"""

ROWS_PER_STRATUM = 16
"""Average number of kept rows per stratum. Smaller rollouts get fewer strata."""


class LengthBias(NamedTuple):
    """
    Difference in length between the kept rows and an unbiased sample, logged as `darts/bias/*`.

    Without bias, the ratios are 1 and `length_ks` (the Kolmogorov-Smirnov distance) is 0. Two independent samples of n
    lengths have a distance of about 1.2 / √n, whatever the selection.
    """

    length_mean_ratio: float  # mean length of the kept rows over that of the unbiased sample
    length_p90_ratio: float  # the same ratio of the 90th percentiles
    length_ks: float
    aborted_share: float  # of the unbiased sample: their lengths are estimates


class RewardBias(NamedTuple):
    """Difference in reward between the kept rows and an unbiased sample, logged as `darts/bias/*`."""

    reward_gap: float  # mean reward of the kept rows minus the estimate for the unbiased sample; NaN without rewards
    unseen_share: float  # of the unbiased sample, in strata without comparable kept rows; excluded from the gap


def length_bias(
    lengths: Sequence[Sequence[int]],
    finished: Sequence[Sequence[bool]],
    selected: Sequence[Sequence[int]],
    num_generations: int,
) -> LengthBias:
    """
    Compare the lengths of the kept rows, M per group, with those of an unbiased sample.

    `lengths` and `finished` have one entry for each of the M'_i candidates of each group. `finished` is `False` for
    aborted candidates, `True` for all that plain GRPO would have trained on. `selected` holds the indices of the rows
    that are trained on. It is empty for a group that a later batch trains on; such a group still counts in the
    unbiased sample. Every field is NaN if no row is selected. A ratio to 0 tokens is infinite, or 1 if both are 0.

    The length of an aborted candidate is a lower bound. Its final length is distributed by the Kaplan-Meier estimate
    of its own group's pool, because a group stops by its own lengths and prompts differ in scale. Beyond the group's
    longest finished candidate, the estimate over all groups is used. Beyond the longest of all, the length counts as
    that of the longest candidate. This last part makes the unbiased sample too short, and both ratios too large. The
    second part assumes that prompts differ little in scale: with all groups stopped at half their pools and scales
    that differ by a factor of 1.8, the ratio of the means was 0.47 instead of 0.53 (0.82 with bounds used as lengths).
    """
    if not any(selected):
        return LengthBias(math.nan, math.nan, math.nan, math.nan)
    grid, kept, unbiased = _both(lengths, finished, selected, num_generations)
    num_aborted = sum(not done for group in finished for done in group[:num_generations])
    return LengthBias(
        _ratio(float(grid @ kept), float(grid @ unbiased)),
        _ratio(*(float(_quantiles(grid, weights, 0.9)) for weights in (kept, unbiased))),
        float(np.abs(np.cumsum(kept - unbiased)).max()),
        num_aborted / (len(lengths) * num_generations),
    )


def reward_bias(
    lengths: Sequence[Sequence[int]],
    finished: Sequence[Sequence[bool]],
    selected: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float]],
    num_generations: int,
) -> RewardBias:
    """
    Estimate how much better or worse the kept rows score than an unbiased sample would. `rewards` are those of the
    `selected` rows. A row whose reward is NaN is assumed to score like the others of its prompt and stratum. The other
    arguments are those of [`length_bias`]. The gap is NaN without any reward.

    Rewards are known for the kept rows only. The selection looks at lengths and completeness alone, so among responses
    to one prompt with one length, kept and dropped ones have the same expected reward. The kept rows are therefore
    reweighted by length (post-stratification). The strata are quantiles of the unbiased sample's lengths, at most
    `MAX_STRATA`, with `ROWS_PER_STRATUM` kept rows each on average. Short and long kept responses come from different
    prompts, so the difference between two strata is estimated within prompts (least squares with one level per
    prompt). A stratum is left out if it has no kept row, or if no prompt has rows both in it and in the others.

    The estimate is unbiased, up to the width of a stratum, if prompt and length have additive effects on the reward.
    In our simulation (48 prompts, binary rewards that fall with the length, true gaps of 0.00 to 0.03) it was off by
    at most 0.004 on average, with a spread of 0.01 between rollouts. It fails if the slope of the reward over the
    length differs between prompts by as much as its mean (off by 0.02 to 0.05), and if every group is stopped at half
    its pool (true gap 0.13, off by 0.02 with a spread of 0.07; by 0.09 if the slopes differ as well).
    """
    if not any(selected):
        return RewardBias(math.nan, math.nan)
    grid, kept, unbiased = _both(lengths, finished, selected, num_generations)
    num_strata = min(MAX_STRATA, max(1, sum(map(len, selected)) // ROWS_PER_STRATUM))
    cuts = _quantiles(grid, unbiased, np.arange(1, num_strata) / num_strata)
    kept, unbiased = (
        np.bincount(np.searchsorted(cuts, grid), share, num_strata).astype(np.float64)  # (S,)
        for share in (kept, unbiased)
    )
    strata = np.searchsorted(cuts, [group[i] for group, rows in zip(lengths, selected, strict=True) for i in rows])
    groups = np.repeat(np.arange(len(selected)), list(map(len, selected)))
    values = np.array([reward for group in rewards for reward in group], np.float64)
    scored = ~np.isnan(values)
    counts = np.zeros((len(selected), num_strata))  # (N, S)
    np.add.at(counts, (groups[scored], strata[scored]), 1.0)
    seen = _comparable(counts, unbiased)
    if not (kept @ seen and unbiased @ seen):
        return RewardBias(math.nan, float(unbiased @ ~seen))
    contrast = kept * seen / (kept @ seen) - unbiased * seen / (unbiased @ seen)
    gap = _contrast(contrast, counts, strata[scored], groups[scored], values[scored])
    return RewardBias(gap, float(unbiased @ ~seen))


def _both(
    lengths: Sequence[Sequence[int]],
    finished: Sequence[Sequence[bool]],
    selected: Sequence[Sequence[int]],
    num_generations: int,
) -> tuple[Floats, Floats, Floats]:
    """Returns the pool's distinct lengths `(G,)`, and the share of each in the kept rows and in an unbiased sample."""
    pools = [(np.array(group, np.float64), np.array(ok, bool)) for group, ok in zip(lengths, finished, strict=True)]
    grid = np.unique(np.concatenate([group for group, _ in pools]))
    rows = np.concatenate([group[list(chosen)] for (group, _), chosen in zip(pools, selected, strict=True)])
    kept = np.bincount(np.searchsorted(grid, rows), minlength=len(grid)) / len(rows)
    return grid, kept, _unbiased(pools, grid, num_generations)


def _survival(lengths: Floats, finished: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Returns Kaplan-Meier's distinct finished lengths `(E,)`, and the share `(E + 1,)` beyond the first k."""
    ends, counts = np.unique(lengths[finished], return_counts=True)
    at_risk = len(lengths) - np.searchsorted(np.sort(lengths), ends)
    return ends, np.append(1.0, np.cumprod(1.0 - counts / at_risk))


def _unbiased(pools: Sequence[tuple[Floats, NDArray[np.bool_]]], grid: Floats, num_generations: int) -> Floats:
    """Estimates the distribution of the first candidates' lengths over the grid, see [`length_bias`]."""
    all_ends, all_alive = _survival(*(np.concatenate(parts) for parts in zip(*pools, strict=True)))
    passed_on = np.zeros(len(all_ends) + 1)  # weight beyond a group's last end, by the next end of all groups
    weights = np.zeros(len(grid))
    for lengths, finished in pools:
        first, done = lengths[:num_generations], finished[:num_generations]
        np.add.at(weights, np.searchsorted(grid, first[done]), 1.0)
        if done.all():
            continue
        ends, alive = _survival(lengths, finished)
        for bound in first[~done]:
            ahead = np.searchsorted(ends, bound, "right")
            weights[np.searchsorted(grid, ends[ahead:])] -= np.diff(alive[ahead:]) / alive[ahead]
            if alive[-1] > 0:
                start = np.searchsorted(all_ends, np.append(ends, bound).max(), "right")
                passed_on[start] += alive[-1] / alive[ahead] / all_alive[start]
    weights[np.searchsorted(grid, all_ends)] -= np.cumsum(passed_on)[:-1] * np.diff(all_alive)
    weights[-1] += passed_on.sum() * all_alive[-1]
    weights /= weights.sum()
    return weights


def _quantiles(grid: Floats, weights: Floats, levels: Any) -> Any:
    """Returns the smallest lengths at which the distribution function reaches `levels`, all of them below 1."""
    return grid[np.searchsorted(np.cumsum(weights), levels - 1e-9)]


def _ratio(kept: float, unbiased: float) -> float:
    if kept == unbiased:
        return 1.0
    return kept / unbiased if unbiased else math.inf


def _comparable(counts: Floats, unbiased: Floats) -> NDArray[np.bool_]:
    """Returns a mask `(S,)` of the set of strata with the largest share that are connected by prompts."""
    shared = (counts.T @ counts > 0).astype(np.float64)
    linked = np.linalg.matrix_power(shared, len(shared)) > 0  # a path has fewer steps than there are strata
    largest: NDArray[np.bool_] = linked[int(np.argmax(linked @ unbiased))]
    return largest


def _contrast(contrast: Floats, counts: Floats, strata: NDArray[Any], groups: NDArray[Any], rewards: Floats) -> float:
    """Returns the sum of contrast times stratum effect, with effects estimated within groups."""
    sizes = np.maximum(counts.sum(axis=1), 1.0)
    means = np.bincount(groups, rewards, len(sizes)) / sizes
    normal = np.diag(counts.sum(axis=0)) - counts.T @ (counts / sizes[:, None])
    weights = np.linalg.pinv(normal, rcond=1e-9, hermitian=True) @ contrast
    return float(weights @ np.bincount(strata, rewards - means[groups], len(contrast)))
