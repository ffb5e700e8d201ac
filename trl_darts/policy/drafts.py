"""How many tokens are drafted for a sequence: none where the engine is full, many for those that all wait for."""

from __future__ import annotations


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
