"""
How much of an old answer the current policy would have written too, and what follows it.

An old answer's token is kept with the probability `min(1, p(y) / q(y))`, where `p` is the current policy and `q` the
one that sampled it. At the first token that is not kept, the residual `max(0, p − q)` is drawn from. Then answers
follow `p` exactly ([speculative sampling](https://huggingface.co/papers/2302.01318), Theorem 1). In
[SPEC-RL](https://huggingface.co/papers/2509.23232), drafts are the answers of an earlier epoch, and `p` is drawn from
instead of the residual. Of both policies, the log-probs of the likeliest tokens are known.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike


Top = Mapping[int, float]  # log-probs of a policy's likeliest tokens at a position


def num_accepted(old: ArrayLike, new: ArrayLike, rng: np.random.Generator) -> int:
    """
    Returns the number of tokens that are kept.

    Args:
        old (`ArrayLike` of shape `(T,)`):
            Log-probs of the answer's tokens under the policies that sampled them. An unknown one (NaN) is not kept.
        new (`ArrayLike` of shape `(T,)`):
            Log-probs under the current policy.
        rng (`np.random.Generator`):
            Source of random numbers.
    """
    ratio = np.asarray(new, dtype=float) - np.asarray(old, dtype=float)
    kept = np.log(rng.random(len(ratio))) < ratio  # False for NaN
    return int(kept.argmin()) if not kept.all() else len(ratio)


def draw_residual(old: Top, new: Top, rng: np.random.Generator) -> tuple[int | None, float]:
    """
    Draws the token in the place of one that was not kept.

    Returns:
        The token, or `None` where its log-probs are not known: then the engine draws from all of the current policy.
        And the probability of that, which bounds what the draw is off in total variation.
    """
    if not old:
        return None, 1.0
    gains = {token: np.exp(logprob) - np.exp(old.get(token, -np.inf)) for token, logprob in new.items()}
    gains = {token: float(gain) for token, gain in gains.items() if gain > 0}
    rest = max(0.0, _unknown(new.values()) - _unknown(old.values()))
    total = sum(gains.values()) + rest
    if not gains or total <= 0:
        return None, 1.0
    mark = rng.random() * total
    for token, gain in gains.items():
        mark -= gain
        if mark < 0:
            return token, rest / total
    return None, rest / total


def _unknown(logprobs: Iterable[float]) -> float:
    """Returns the probability of the tokens that are not among the likeliest."""
    return max(0.0, 1.0 - float(np.exp(list(logprobs)).sum()))
