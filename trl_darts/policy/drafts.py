"""Chooses the number of draft tokens of a sequence: few on a full engine, many for the last running sequences."""

import numpy as np

from ..errors import ConfigurationError
from .latency import LatencyCurve


MAX_DRAFT = 16  # longer drafts are hardly ever accepted, and vLLM reserves memory for all of them


def draft_budget(num_running: int, knee: float, acceptance: float, limit: int = MAX_DRAFT) -> int:
    """
    Choose how many tokens to draft for one sequence in the next decoding step.

    A step that computes `T` tokens takes `1 + T / knee` times as long as an almost empty one. If each of R sequences
    drafts `n` tokens, a sequence with acceptance `a` advances `(1 + a + … + aⁿ) / (1 + R · (1 + n) / knee)` tokens per
    unit of time. The function returns the `n` with the highest rate.

    Args:
        num_running (`int`):
            Number of running sequences.
        knee (`float`):
            Number of tokens at which a step takes twice as long as an almost empty one.
        acceptance (`float`):
            Probability that a drafted token is accepted once those before it are.
        limit (`int`, *optional*, defaults to `16`):
            Largest number of draft tokens.

    Returns:
        `int`: Number of draft tokens, 0 to `limit`.

    Example:

    ```python
    >>> from trl_darts.policy import draft_budget
    >>> [draft_budget(running, 64, 0.8) for running in (1, 8, 32, 64, 512)]
    [12, 5, 3, 2, 0]

    ```
    """
    room = knee / num_running
    gained, chance = 1.0, acceptance  # expected tokens of this step, and the probability that one more is accepted
    budget = 0
    # One more draft pays while it increases the tokens by a larger factor than the time. Both factors only shrink.
    while budget < limit and chance * (room + 1 + budget) > gained:
        gained, chance = gained + chance, chance * acceptance
        budget += 1
    return budget


def drafted_latency(latency: LatencyCurve, acceptance: float, limit: int = MAX_DRAFT) -> LatencyCurve:
    """
    Predict the latency curve of an engine with speculative decoding, with the best number of drafts at each size.

    A step in which B sequences draft `n` tokens each is assumed to take as long as one of `B · (1 + n)` sequences.
    Each advances `1 + a + … + aⁿ` tokens, where `a` is the acceptance.

    Args:
        latency ([`LatencyCurve`]):
            Curve without drafts.
        acceptance (`float`):
            Probability that a drafted token is accepted once those before it are. More than 0 and less than 1.
        limit (`int`, *optional*, defaults to `16`):
            Largest number of draft tokens per sequence and step.

    Returns:
        [`LatencyCurve`]: Seconds per token with drafts, nowhere above `latency`.

    Raises:
        [`ConfigurationError`]: If the acceptance is out of bounds.

    Example:

    ```python
    >>> from trl_darts.policy import LatencyCurve, drafted_latency
    >>> plain = LatencyCurve([32, 256], [0.010, 0.080])
    >>> drafted = drafted_latency(plain, 0.8)
    >>> [round(plain(size) / drafted(size), 1) for size in (1, 8, 64, 256)]
    [4.9, 3.0, 1.0, 1.0]

    ```
    """
    if not 0 < acceptance < 1:
        raise ConfigurationError(
            f"`draft_acceptance` ({acceptance:g}) must be more than 0 and less than 1: the probability that a drafted "
            "token is accepted once those before it are."
        )
    drafts = np.arange(limit + 1)
    sizes = np.union1d(np.geomspace(1, 32 * max(1.0, latency.knots[-1]), 300).round(), latency.knots)
    seconds = latency(np.outer(sizes, 1 + drafts)) / np.cumsum(acceptance**drafts)
    return LatencyCurve(sizes.tolist(), np.maximum.accumulate(seconds.min(axis=1)).tolist(), latency.metadata)
