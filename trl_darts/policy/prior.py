"""How long the responses to a prompt will be that was never seen, judged by the length of the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trl_darts.errors import ConfigurationError, StateMismatchError


NUM_BUCKETS = 40
"""Two buckets of prompt length per doubling, up to 2^20 tokens. Longer prompts share the last one."""


class PromptLengthPrior:
    """
    Expected response length by prompt length, for dispatching by length before a prompt has a history.

    Dispatch wants the order of the prompts more than their lengths (StreamRL trains a model to rank them). This one is
    ours and needs no training: a mean per geometric bucket of prompt lengths, drawn to the overall mean where a bucket
    has seen little. An observation fades with every later one of any bucket, because the policy's lengths drift.

    Args:
        half_life (`float`, *optional*, defaults to `1024.0`):
            Number of groups after which an observation counts half: 16 steps of 64 prompts.
        shrinkage (`float`, *optional*, defaults to `8.0`):
            Number of groups of the overall mean that are added to each bucket. `0.0` trusts a single group.

    Raises:
        [`ConfigurationError`]: If `half_life` is not above 0, or `shrinkage` is negative or infinite.
    """

    def __init__(self, half_life: float = 1024.0, shrinkage: float = 8.0) -> None:
        if not half_life > 0:
            raise ConfigurationError(f"`half_life` ({half_life}) must be above 0, in groups.")
        if not 0 <= shrinkage < math.inf:
            raise ConfigurationError(f"`shrinkage` ({shrinkage}) must be finite and not negative, in groups.")
        self.half_life = half_life
        self.shrinkage = shrinkage
        self._sums = {"weights": np.zeros(NUM_BUCKETS), "totals": np.zeros(NUM_BUCKETS)}

    def update(self, num_prompt_tokens: int, mean_length: float) -> None:
        """
        Add one group.

        Args:
            num_prompt_tokens (`int`):
                Length of its prompt in tokens.
            mean_length (`float`):
                Mean length of its responses in tokens, the aborted ones estimated, see [`group_moments`].

        Raises:
            [`ValueError`]: If either is negative, or `mean_length` is not finite.
        """
        bucket = _bucket(num_prompt_tokens)
        if not 0 <= mean_length < math.inf:
            raise ValueError(f"`mean_length` ({mean_length}) must be finite and not negative, in tokens.")
        for name, added in (("weights", 1.0), ("totals", mean_length)):
            self._sums[name] *= 0.5 ** (1.0 / self.half_life)
            self._sums[name][bucket] += added

    def expected(self, num_prompt_tokens: int) -> float:
        """Expected mean length of the responses in tokens, NaN before the first update."""
        bucket = _bucket(num_prompt_tokens)
        weights, totals = self._sums["weights"], self._sums["totals"]
        if not weights.any():
            return math.nan
        overall = float(totals.sum() / weights.sum())
        weight = float(weights[bucket]) + self.shrinkage
        return (float(totals[bucket]) + self.shrinkage * overall) / weight if weight > 0 else overall

    def state_dict(self) -> dict[str, list[float]]:
        """Everything but the configuration: two lists of `NUM_BUCKETS` numbers."""
        return {name: column.tolist() for name, column in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from what [`~PromptLengthPrior.state_dict`] returned. `half_life` and `shrinkage` stay as configured.

        Raises:
            [`StateMismatchError`]: If the keys or the shapes are not those of a prior.
        """
        wanted, found = ({name: np.shape(s[name]) for name in sorted(s)} for s in (self._sums, state))
        if found != wanted:
            raise StateMismatchError(
                f"The state of a `PromptLengthPrior` has the keys and shapes {wanted}, and this one has {found}. "
                "Load the state that the prior saved, or start without one."
            )
        self._sums = {name: np.array(state[name], np.float64) for name in wanted}


def _bucket(num_prompt_tokens: int) -> int:
    if num_prompt_tokens < 0:
        raise ValueError(f"`num_prompt_tokens` ({num_prompt_tokens}) must not be negative.")
    return min(int(2 * math.log2(max(num_prompt_tokens, 1))), NUM_BUCKETS - 1)
