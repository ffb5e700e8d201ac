"""
What keeping rollouts by their length does to what is trained on.

An importance ratio compares two policies on one response; it can't see which responses were kept. Here the kept rows
of a rollout are compared with an *unbiased sample* of its pool: the first `num_generations` candidates of every group,
which were started before anything was known of any of them. The method is ours.

Candidates that are carried over to the next rollout come first in their group, so that its first `num_generations`
are still those that were started first.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray


Floats: TypeAlias = NDArray[np.float64]

MAX_STRATA = 8
"""
Most strata of length. Where every group was cut off at half its pool and the true gap was 0.13, two hid 0.06 of it;
four, eight and sixteen were right within their spread, which grows with their number.
"""

ROWS_PER_STRATUM = 16
"""Kept rows that a stratum should have on average: a smaller rollout gets fewer strata."""


class LengthBias(NamedTuple):
    """
    How the kept rows differ in length from an unbiased sample. The names are those of `darts/bias/*`.

    The ratios are 1 and `length_ks`, the largest distance between the two distribution functions, is 0 without bias;
    two independent samples of n lengths are about 1.2 / √n apart, whatever the selection.
    """

    length_mean_ratio: float  # mean length of the kept rows over that of the unbiased sample
    length_p90_ratio: float  # the same of the 90th percentiles
    length_ks: float
    aborted_share: float  # of the unbiased sample: how much of the report rests on an estimate


class RewardBias(NamedTuple):
    """How the kept rows differ in reward from an unbiased sample. The names are those of `darts/bias/*`."""

    reward_gap: float  # mean reward of the kept rows less the estimate for the unbiased sample; NaN without rewards
    unseen_share: float  # of the unbiased sample, whose lengths no kept row can speak for; the gap leaves it out


def length_bias(
    lengths: Sequence[Sequence[int]],
    finished: Sequence[Sequence[bool]],
    selected: Sequence[Sequence[int]],
    num_generations: int,
) -> LengthBias:
    """
    Compare the lengths of the kept rows, M per group, with those of an unbiased sample.

    `lengths` and `finished` have an entry for each of the M'_i candidates of each group, also the aborted ones:
    `finished` is everything but aborted, which is what plain GRPO would have trained on. `selected` are the indices of
    the rows that are trained on; none of a group that a batch leaves to a later one, which is part of the unbiased
    sample all the same. The report is NaN without any row, a ratio to 0 tokens infinite, or 1 where both are 0.

    The length of an aborted candidate is a lower bound. What it would have become follows the Kaplan-Meier estimate of
    its own group's pool, as far as that reaches: a group stops by its own lengths, and prompts differ in scale. Beyond
    the group's last end it follows the estimate of all groups' pools, and beyond the last end of all, it counts as
    long as the longest candidate. That last part makes the unbiased sample too short, and both ratios too large. The
    part before it supposes that prompts differ little in scale: where all groups were cut off at half their pools and
    differed by a factor of 1.8, the ratio of the means was 0.47 instead of 0.53 (0.82 with bounds taken for lengths).
    """
    if not any(selected):
        return LengthBias(math.nan, math.nan, math.nan, math.nan)
    grid, kept, unbiased = _both(lengths, finished, selected, num_generations)
    num_aborted = sum(not done for own in finished for done in own[:num_generations])
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
    Estimate how much better, or worse, the kept rows score than an unbiased sample would. `rewards` are those of the
    `selected` rows, NaN where there is none: such a row is taken to score like the others of its prompt and stratum.
    The other arguments are those of [`length_bias`]. The gap is NaN without any reward.

    Rewards are known of the kept rows only. A selection that looks at lengths and ends alone keeps, of the responses
    with one prompt and one length, no better ones than it drops. So the kept rows are weighted anew by length
    (post-stratification): strata are quantiles of the unbiased sample's lengths, at most `MAX_STRATA`, with
    `ROWS_PER_STRATUM` kept rows each on average. Short responses are kept of other prompts than long ones, so the
    difference between two strata is estimated within prompts (least squares with one level per prompt). A stratum
    without a kept row, or whose rows can't be compared with the others because no prompt has rows in both, is left
    out, and the rest stand for it.

    That is unbiased, up to the width of a stratum, where prompt and length add up in the reward: in our simulation (48
    prompts, binary rewards that fall with the length, true gaps of 0.00 to 0.03) it was off by at most 0.004 on
    average, with a spread of 0.01 between rollouts. It fails where the slope of the reward over the length differs
    between prompts by as much as its mean (off by 0.02 to 0.05), and where every group is cut off at half its pool
    (true gap 0.13, off by 0.02 with a spread of 0.07; by 0.09 if the slopes differ as well).
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
    strata = np.searchsorted(cuts, [own[i] for own, rows in zip(lengths, selected, strict=True) for i in rows])
    groups = np.repeat(np.arange(len(selected)), list(map(len, selected)))
    values = np.array([reward for own in rewards for reward in own], np.float64)
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
    """Every length of the pool, ascending `(G,)`, and its share of the kept rows and of an unbiased sample."""
    pools = [(np.array(own, np.float64), np.array(ok, bool)) for own, ok in zip(lengths, finished, strict=True)]
    grid = np.unique(np.concatenate([own for own, _ in pools]))
    rows = np.concatenate([own[list(chosen)] for (own, _), chosen in zip(pools, selected, strict=True)])
    kept = np.bincount(np.searchsorted(grid, rows), minlength=len(grid)) / len(rows)
    return grid, kept, _unbiased(pools, grid, num_generations)


def _survival(lengths: Floats, finished: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Kaplan-Meier estimate: the distinct ends `(E,)`, and the share `(E + 1,)` that outlives the first k of them."""
    ends, counts = np.unique(lengths[finished], return_counts=True)
    at_risk = len(lengths) - np.searchsorted(np.sort(lengths), ends)
    return ends, np.append(1.0, np.cumprod(1.0 - counts / at_risk))


def _unbiased(pools: Sequence[tuple[Floats, NDArray[np.bool_]]], grid: Floats, num_generations: int) -> Floats:
    """Distribution of the first candidates' lengths over the grid, see [`length_bias`]."""
    all_ends, all_alive = _survival(*(np.concatenate(parts) for parts in zip(*pools, strict=True)))
    passed_on = np.zeros(len(all_ends) + 1)  # what outlives its group, by the first of all ends that is still ahead
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
    """The smallest lengths at which the distribution function reaches these levels, all of them below 1."""
    return grid[np.searchsorted(np.cumsum(weights), levels - 1e-9)]


def _ratio(kept: float, unbiased: float) -> float:
    if kept == unbiased:
        return 1.0
    return kept / unbiased if unbiased else math.inf


def _comparable(counts: Floats, unbiased: Floats) -> NDArray[np.bool_]:
    """The strata `(S,)` that prompts link with one another: of several such sets, the one of the largest share."""
    shared = (counts.T @ counts > 0).astype(np.float64)
    linked = np.linalg.matrix_power(shared, len(shared)) > 0  # a path has fewer steps than there are strata
    largest: NDArray[np.bool_] = linked[int(np.argmax(linked @ unbiased))]
    return largest


def _contrast(contrast: Floats, counts: Floats, strata: NDArray[Any], groups: NDArray[Any], rewards: Floats) -> float:
    """Sum of contrast times stratum effect, the effects estimated within groups."""
    sizes = np.maximum(counts.sum(axis=1), 1.0)
    means = np.bincount(groups, rewards, len(sizes)) / sizes
    normal = np.diag(counts.sum(axis=0)) - counts.T @ (counts / sizes[:, None])
    weights = np.linalg.pinv(normal, rcond=1e-9, hermitian=True) @ contrast
    return float(weights @ np.bincount(strata, rewards - means[groups], len(contrast)))
