"""
Distributes a batch's candidates over its prompts.

Invariants: the allocation sums to the total, stays within its bounds and minimises Eq. 5 and 10 of the paper. A
prompt with a larger standard deviation never gets fewer candidates than one with a smaller.
"""

import math
from collections.abc import Sequence

import numpy as np


def allocate_redundancy(
    length_stds: Sequence[float | None],
    total: int,
    low: int,
    high: int,
    typical: tuple[float, float] | None = None,
) -> list[int]:
    """
    Distribute a batch's candidates over its prompts by their length variance
    ([DARTS](https://huggingface.co/papers/2605.30859), Eq. 5 and 10, Algorithm 1).

    The greedy algorithm gives one candidate at a time to the prompt with the largest marginal gain, which is optimal
    because the objective is convex. Prompts of equal gain get candidates in turn, lower index first. The weights are
    normalised to [0, 1] over the batch, so the prompt with the smallest standard deviation has weight 0: it gets more
    than `low` only when all others are at `high`.

    Args:
        length_stds (`Sequence[float | None]` of shape `(N,)`):
            Historical standard deviation of each prompt's response lengths, σ̃_L(q_i). NaN or `None` for a prompt
            without history: it gets the mean weight of the others.
        total (`int`):
            Number of candidates of the whole batch, M_total.
        low (`int`):
            Fewest candidates of a prompt, M_low.
        high (`int`):
            Most candidates of a prompt, M_up.
        typical (`tuple[float, float]`, *optional*):
            Range of standard deviations that the normalisation includes in addition to the batch's own. Useful when
            some are predictions, which spread less than measured ones.

    Returns:
        `list[int]`: Number of candidates of each prompt, M'_i. Sums to `total`.

    Raises:
        [`ValueError`]: If `total` is not in `[N * low, N * high]`, not `1 <= low <= high`, or a standard deviation is
            negative or infinite.
    """
    num_prompts = len(length_stds)
    if not 1 <= low <= high:
        raise ValueError(f"`low` ({low}) must be at least 1 and at most `high` ({high}).")
    if not num_prompts * low <= total <= num_prompts * high:
        raise ValueError(
            f"`total` ({total}) must be between {num_prompts * low} and {num_prompts * high} for {num_prompts} "
            f"prompts with {low} to {high} candidates each. Clip it to that range."
        )
    stds = _known_or_nan(length_stds)
    if not stds:
        return []
    stds = _with_batch_mean(stds)
    return _greedy(_normalised(stds, typical or ()), stds, total - num_prompts * low, low, high)


def _known_or_nan(length_stds: Sequence[float | None]) -> list[float]:
    """Returns the standard deviations as floats, NaN for prompts without history."""
    stds = [math.nan if std is None else float(std) for std in length_stds]
    for i, std in enumerate(stds):
        if std < 0 or std == math.inf:
            raise ValueError(
                f"`length_stds[{i}]` ({std}) must be finite and not negative. Use NaN or `None` for a prompt without "
                "history."
            )
    return stds


def _with_batch_mean(stds: Sequence[float]) -> list[float]:
    """Gives prompts without history the mean of the others. Norm is affine, so that is also the mean weight."""
    known = [std for std in stds if std == std]
    if not known:
        return [0.0] * len(stds)
    low = min(known)
    mean = low + sum((std - low) / len(known) for std in known)
    return [std if std == std else mean for std in stds]


def _normalised(stds: Sequence[float], typical: Sequence[float]) -> list[float]:
    """Normalises as in Eq. 5: min-max over the batch, 1 if all are equal."""
    low, high = min([*stds, *typical]), max([*stds, *typical])
    if low == high:
        return [1.0] * len(stds)
    return [(std - low) / (high - low) for std in stds]


def _greedy(weights: Sequence[float], stds: Sequence[float], remaining: int, low: int, high: int) -> list[int]:
    """
    Runs lines 3 to 7 of Algorithm 1 in one step. A prompt's gains fall with each candidate, so the greedy choice
    equals picking the largest gains over all prompts.
    """
    if low == high or not remaining:
        return [low] * len(weights)
    sizes = np.arange(low, high)
    gains = np.asarray(weights)[:, None] / (sizes * (sizes + 1))  # (N, M_up - M_low)
    least = np.partition(gains, -remaining, axis=None)[-remaining]
    allocation: list[int] = (low + (gains > least).sum(axis=1)).tolist()
    # Ties go to the prompt with fewer candidates (so that zero weights share evenly), then to the larger weight and
    # standard deviation (rounding can make gains or weights equal), then to the lower index.
    ties = sorted((size, -weights[i], -stds[i], i) for i, size in np.argwhere(gains == least).tolist())
    for _, _, _, i in ties[: remaining - int((gains > least).sum())]:
        allocation[i] += 1
    return allocation
