"""Whether over-provisioning can pay at all: its best case against the group size alone, on one batch's lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from trl_darts.policy.latency import rollout_time


def best_case_speedup(
    lengths: Sequence[Sequence[float]],
    num_generations: int,
    latency: Callable[[NDArray[Any]], Any],
    num_engines: int = 1,
) -> float:
    """
    Predicted seconds of a rollout with `num_generations` candidates per prompt over those of one in which all
    candidates start and each prompt ends at its `num_generations`-th shortest one: no schedule that keeps
    `num_generations` complete candidates of these pools ends earlier.

    Args:
        lengths (`Sequence[Sequence[float]]` of shape `(N, ≥ num_generations)`):
            Response lengths of each prompt's pool, had none of them been cut off by us. The first `num_generations`
            of each stand for what a rollout without over-provisioning would have sampled.
        num_generations (`int`):
            M.
        latency ([`LatencyCurve`] or callable):
            Seconds per token of one engine.
        num_engines (`int`, *optional*, defaults to `1`):
            Engines over which candidates are spread evenly.

    Returns:
        `float`: Less than 1 where over-provisioning can't pay. NaN without any prompt.

    Raises:
        [`ValueError`]: If a prompt has fewer candidates than that.
    """
    if not lengths:
        return math.nan
    if (fewest := min(map(len, lengths))) < num_generations:
        raise ValueError(
            f"`lengths` has a prompt with {fewest} candidates, and needs `num_generations` ({num_generations})."
        )
    plain = [length for own in lengths for length in own[:num_generations]]
    pruned: list[float] = []
    for own in lengths:
        bound = sorted(own)[num_generations - 1]
        pruned += [min(length, bound) for length in own]
    return _seconds(plain, latency, num_engines) / _seconds(pruned, latency, num_engines)


def _seconds(lengths: list[float], latency: Callable[[NDArray[Any]], Any], num_engines: int) -> float:
    """Of the slowest engine, which has the longest of each handful."""
    return rollout_time(sorted(lengths, reverse=True)[::num_engines], latency)
