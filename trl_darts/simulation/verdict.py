"""What can be said of a comparison, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .comparison import Outcome


# Below, a batch's mean length says little: that of 32 prompts with a log-normal spread of 0.6 differs by ±12 %.
CLEAR_SPREAD = 0.15


def verdict(outcomes: Sequence[Outcome]) -> str:
    """
    Which setting to take, in words, and when not to.

    Args:
        outcomes (`Sequence[Outcome]`):
            Of [`compare`], the baseline first.

    Returns:
        `str`: One paragraph.
    """
    baseline, *others = outcomes
    if not others:
        seconds = baseline.estimate("step_seconds")
        return f"{baseline.name} takes {seconds} s per step. There is nothing to compare it with."
    best = max(others, key=lambda outcome: outcome.speedup.mean)
    speedup = best.speedup
    if speedup.mean <= 1.0:
        words = (
            f"Stay with {baseline.name}: nothing is faster. The best of the others, {best.name}, is {speedup} times"
        )
        words += " as fast."
        more = best.estimate("candidates").mean / baseline.estimate("candidates").mean
        if more <= 1.0:
            return words
        return f"{words} It samples {more:.2f} times as many candidates, and here its tail is not that much shorter."
    if math.isinf(speedup.half_width):
        return (
            f"{best.name} is the fastest: {speedup} times as fast as {baseline.name}, with one seed. Simulate several "
            "seeds before you believe it."
        )
    if speedup.low <= 1.0:
        return (
            f"{best.name} may be the fastest, {speedup} times as fast as {baseline.name}, but the seeds differ too "
            "much to be sure. Simulate more steps or seeds."
        )
    words = f"{best.name} is the fastest: {speedup} times as fast as {baseline.name}."
    doubts = [*_doubts_about_rows(best, baseline), *_doubts_about_order(best, baseline)]
    return f"{words} Don't take it before you have looked at the reward: {'; '.join(doubts)}." if doubts else words


def _doubts_about_rows(best: Outcome, baseline: Outcome) -> list[str]:
    """What is special about the rows that it trains on, wherever they come."""
    doubts = []
    if best.settings.num_generations != baseline.settings.num_generations:
        doubts.append(
            f"it trains on {best.settings.num_generations} rows per prompt, and {baseline.name} on "
            f"{baseline.settings.num_generations}"
        )
    ratio = best.estimate("kept_vs_pool_length_ratio")
    if ratio.high < 0.8:
        doubts.append(
            f"its rows are {ratio} times as long as what the policy samples, so where the right answers are the long "
            "ones it trains on the wrong ones"
        )
    if (cut := best.estimate("truncated_ratio")).mean > 0.05:
        doubts.append(f"{100 * cut.mean:.0f} % of its rows are cut off at the limit")
    if (stale := best.off_policy_share.mean) >= 0.005:
        doubts.append(f"an older policy sampled {100 * stale:.0f} % of its tokens")
    return doubts


def _doubts_about_order(best: Outcome, baseline: Outcome) -> list[str]:
    """What is special about when prompts come."""
    doubts = []
    spread, usual = best.batch_length_spread, baseline.batch_length_spread
    if spread.mean > max(CLEAR_SPREAD, 2 * usual.mean):
        doubts.append(
            f"its batches are of short or of long answers, their mean lengths differ by ±{100 * spread.mean:.0f} % "
            f"(those of {baseline.name} by ±{100 * usual.mean:.0f} %)"
        )
    return doubts
