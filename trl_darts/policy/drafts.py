"""How many tokens are drafted for a sequence: none where the engine is full, many for those that all wait for."""

import numpy as np

from ..errors import ConfigurationError
from .latency import LatencyCurve


MAX_DRAFT = 16  # beyond it hardly a draft survives, and vLLM reserves room for as many
# An answer that outgrows what was expected of it is the one that the rollout waits for: its tokens may cost more than
# those of an answer that is about to end.
LOWEST_PRIORITY, HIGHEST_PRIORITY = 0.5, 2.0


def draft_budget(
    num_running: int,
    knee: float,
    length: float,
    expected_length: float,
    acceptance: float,
    limit: int = MAX_DRAFT,
) -> int:
    """
    How many tokens to draft for one sequence in the next decoding step.

    A step that computes `T` tokens takes `1 + T / knee` times as long as an almost empty one. If each of R sequences
    drafts `n` tokens, this one advances `(1 + a + … + aⁿ) / (1 + R · (1 + n) / knee)` tokens per unit of time; `a` is
    its acceptance. The `n` with the most is chosen. The knee counts up to twice for a sequence that is longer than
    expected, and half for one that has just begun.

    Args:
        num_running (`int`):
            Sequences that decode now.
        knee (`float`):
            Number of tokens at which a step takes twice as long as an almost empty one.
        length (`float`):
            Tokens that the sequence has.
        expected_length (`float`):
            Tokens that answers to its prompt have on average.
        acceptance (`float`):
            Probability that a drafted token is accepted once those before it are.
        limit (`int`, *optional*, defaults to `16`):
            The most tokens.

    Returns:
        `int`: Between 0 and `limit`. 0 where `num_running` alone reaches the knee.

    Example:

    ```python
    >>> from trl_darts.policy import draft_budget
    >>> [draft_budget(running, 64, 900, 600, 0.8) for running in (1, 8, 32, 64)]
    [14, 7, 3, 0]

    ```
    """
    if num_running >= knee:
        return 0
    priority = min(max(length / max(expected_length, 1), LOWEST_PRIORITY), HIGHEST_PRIORITY)
    room = priority * knee / num_running
    gained, chance = 1.0, acceptance  # tokens of this step so far, and the odds that one more is accepted
    budget = 0
    # One more helps while it adds to the tokens by a larger share than to the time. Both shares only shrink.
    while budget < limit and chance * (room + 1 + budget) > gained:
        gained, chance = gained + chance, chance * acceptance
        budget += 1
    return budget


def drafted_latency(latency: LatencyCurve, acceptance: float, limit: int = MAX_DRAFT) -> LatencyCurve:
    """
    Seconds per token where each sequence drafts as many tokens as pays.

    A step in which B sequences draft `n` tokens each is taken to last as long as one of `B · (1 + n)` sequences. Each
    advances `1 + a + … + aⁿ` tokens; `a` is the acceptance.

    Args:
        latency ([`LatencyCurve`]):
            Without drafts.
        acceptance (`float`):
            Probability that a drafted token is accepted once those before it are. More than 0 and less than 1.
        limit (`int`, *optional*, defaults to `16`):
            The most tokens per sequence and step.

    Returns:
        [`LatencyCurve`]: Nowhere slower.

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
