"""
Estimates a latency curve from recorded rollouts: when each candidate began and ended, and how many tokens it got.

A candidate's tokens are its speed, integrated over its life. The speed depends on how many candidates run at once.
With ranges j of that number, `tokens_i = Σ_j seconds_ij · speed_j − lost`, where `lost` stands for the time before the
first token. This is linear in the speeds, of which none exceeds that of a smaller range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .latency import Array, LatencyCurve, robust_least_squares, rollout_time


MIN_CANDIDATES = 32
MIN_SHARE = 1e-3  # of all seconds, for a range of numbers of candidates


class TimedRollout(NamedTuple):
    """The candidates of one rollout, with the tokens that it decoded, not an earlier one."""

    starts: Array  # (C,), seconds
    ends: Array  # (C,)
    num_tokens: Array  # (C,)


@dataclass(frozen=True)
class TracedCurve:
    """
    A curve, and its `errors`: the seconds of each rollout as predicted from its lengths (Eq. 4), over the real ones,
    minus 1.
    """

    curve: LatencyCurve
    num_candidates: int
    errors: Array  # (R,)


def fit_rollouts(rollouts: Sequence[TimedRollout], num_engines: int = 1) -> TracedCurve | None:
    """
    Fits the latency curve of one engine to rollouts on `num_engines` equal ones, among which candidates are spread
    evenly. A candidate that waits in an engine's queue counts as running.

    Args:
        rollouts (`Sequence[TimedRollout]`):
            Rollouts that had the engines to themselves.
        num_engines (`int`, *optional*, defaults to `1`):
            Number of engines.

    Returns:
        [`TracedCurve`] or `None`: The curve and its errors. `None` if fewer than 32 candidates ran, or a time is NaN.
    """
    known = [_ran(rollout) for rollout in rollouts]
    num_tokens = np.concatenate([rollout.num_tokens for rollout in known]) if known else np.array([])
    if len(num_tokens) < MIN_CANDIDATES or not all(np.isfinite(own.starts + own.ends).all() for own in known):
        return None
    most = max(len(rollout.starts) for rollout in known) / num_engines
    edges = np.unique(np.round(2 ** np.arange(0.5, np.log2(max(most, 1)) + 1, 0.5))) + 0.5  # 1, 2, 3, 4 to 6, …
    parts = [_seconds(rollout, edges, num_engines) for rollout in known]
    seconds = np.concatenate([own for own, _ in parts])  # (C, ranges)
    weighted = np.concatenate([own for _, own in parts]).sum(axis=0)  # by range: Σ seconds × candidates on the engine
    total = seconds.sum(axis=0)
    used = total > MIN_SHARE * total.sum()
    seconds, sizes = seconds[:, used], weighted[used] / total[used]
    speeds = _speeds(seconds, num_tokens)
    curve = LatencyCurve.fit(sizes[speeds > 0], 1 / speeds[speeds > 0])
    errors = [
        rollout_time(own.num_tokens, lambda batch_sizes: curve(batch_sizes / num_engines))
        / np.ptp([*own.starts, *own.ends])
        for own in known
        if len(own.starts)
    ]
    return TracedCurve(curve, len(num_tokens), np.array(errors) - 1)


def _ran(rollout: TimedRollout) -> TimedRollout:
    """Leaves out candidates without a token, which were aborted before they ran."""
    ran = (rollout.num_tokens > 0) & ~(rollout.ends <= rollout.starts)
    return TimedRollout(*(np.asarray(column, float)[ran] for column in rollout))


def _seconds(rollout: TimedRollout, edges: Array, num_engines: int) -> tuple[Array, Array]:
    """
    Returns each candidate's seconds by range of the number of candidates on its engine, and the same multiplied by
    that number. Shapes are (C, ranges).
    """
    times = np.unique(np.concatenate([rollout.starts, rollout.ends]))
    begun, ended = (np.searchsorted(np.sort(own), times[:-1], "right") for own in (rollout.starts, rollout.ends))
    running = (begun - ended) / num_engines
    spent = np.zeros((len(times), len(edges) + 1))
    spent[np.arange(1, len(times)), np.digitize(running, edges)] = np.diff(times)
    weighted = spent * np.append(0.0, running)[:, None]
    first, last = np.searchsorted(times, rollout.starts), np.searchsorted(times, rollout.ends)
    spent, weighted = np.cumsum(spent, axis=0), np.cumsum(weighted, axis=0)
    return spent[last] - spent[first], weighted[last] - weighted[first]


def _speeds(seconds: Array, num_tokens: Array) -> Array:
    """Returns tokens per second by range, by a robust fit. What is uncertain about a candidate are its seconds."""
    from scipy.optimize import nnls

    # The speed of a range is the sum of the decrements from it on, none of which is negative.
    lost = -np.ones(len(num_tokens))
    scale = seconds.sum(axis=1) * num_tokens.sum() / seconds.sum()  # tokens at the mean speed
    design = np.column_stack([np.cumsum(seconds, axis=1), lost]) / scale[:, None]
    weights = np.full(len(num_tokens), 1 / len(num_tokens))
    steps = robust_least_squares(design, num_tokens / scale, weights, lambda *problem: nnls(*problem)[0])
    return np.cumsum(steps[-2::-1])[::-1]
