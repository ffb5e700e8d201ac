"""How long the responses to a prompt will be that was never seen, judged by the length of the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import StateMismatchError


NUM_BUCKETS = 40
"""Two buckets of prompt length per doubling, up to 2^20 tokens. Longer prompts share the last one."""

HALF_LIFE = 1024
"""Groups after which an observation counts half, because the policy's lengths drift: 16 steps of 64 prompts."""

SHRINKAGE = 8
"""Groups of the overall mean that are added to each bucket."""


class PromptLengthPrior:
    """
    Expected response length by prompt length, for dispatching by length before a prompt has a history.

    Dispatch wants the order of the prompts more than their lengths (StreamRL trains a model to rank them). This one is
    ours and needs no training: a mean per geometric bucket of prompt lengths, drawn to the overall mean where a bucket
    has seen little.
    """

    def __init__(self) -> None:
        self._weights, self._totals = np.zeros(NUM_BUCKETS), np.zeros(NUM_BUCKETS)

    def update(self, num_prompt_tokens: int, mean_length: float) -> None:
        """
        Add one group.

        Args:
            num_prompt_tokens (`int`):
                Length of its prompt in tokens.
            mean_length (`float`):
                Mean length of its responses in tokens, the aborted ones estimated, see [`group_moments`].
        """
        fading = 0.5 ** (1 / HALF_LIFE)
        self._weights *= fading
        self._totals *= fading
        bucket = _bucket(num_prompt_tokens)
        self._weights[bucket] += 1
        self._totals[bucket] += mean_length

    def expected(self, num_prompt_tokens: int) -> float:
        """Expected mean length of the responses in tokens, NaN before the first update."""
        total = self._weights.sum()
        if not total:
            return math.nan
        bucket, overall = _bucket(num_prompt_tokens), self._totals.sum() / total
        return float((self._totals[bucket] + SHRINKAGE * overall) / (self._weights[bucket] + SHRINKAGE))

    def state_dict(self) -> dict[str, list[float]]:
        """Everything but the constants, as JSON has it: two lists of `NUM_BUCKETS` numbers."""
        return {"weights": self._weights.tolist(), "totals": self._totals.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from what [`~PromptLengthPrior.state_dict`] returned.

        Raises:
            [`StateMismatchError`]: If the keys or the shapes are not those of a prior.
        """
        wanted, found = ({name: np.shape(s[name]) for name in sorted(s)} for s in (self.state_dict(), state))
        if found != wanted:
            raise StateMismatchError(
                f"The state of a `PromptLengthPrior` has the keys and shapes {wanted}, and this one has {found}. "
                "Load the state that the prior saved, or start without one."
            )
        self._weights, self._totals = (np.array(state[name], float) for name in ("weights", "totals"))


def _bucket(num_prompt_tokens: int) -> int:
    return min(int(2 * math.log2(max(num_prompt_tokens, 1))), NUM_BUCKETS - 1)
