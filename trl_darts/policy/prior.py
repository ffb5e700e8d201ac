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
        self._weights, self._totals = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS
        self._unit = 1.0  # what the newest observation weighs: it grows, so that the others need not be touched

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
        self._unit /= max(0.5 ** (1.0 / self.half_life), 1e-100)
        if self._unit > 1e100:
            self._weights, self._totals = self._normalized()
            self._unit = 1.0
        self._weights[bucket] += self._unit
        self._totals[bucket] += self._unit * mean_length

    def expected(self, num_prompt_tokens: int) -> float:
        """Expected mean length of the responses in tokens, NaN before the first update."""
        bucket = _bucket(num_prompt_tokens)
        total = sum(self._weights)
        if not total:
            return math.nan
        overall, shrinkage = sum(self._totals) / total, self.shrinkage * self._unit
        weight = self._weights[bucket] + shrinkage
        return (self._totals[bucket] + shrinkage * overall) / weight if weight > 0 else overall

    def _normalized(self) -> tuple[list[float], list[float]]:
        """Weights and totals where the newest observation weighs 1."""
        return [x / self._unit for x in self._weights], [x / self._unit for x in self._totals]

    def state_dict(self) -> dict[str, list[float]]:
        """Everything but the configuration: two lists of `NUM_BUCKETS` numbers, and one of one."""
        return {"weights": list(self._weights), "totals": list(self._totals), "unit": [self._unit]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from what [`~PromptLengthPrior.state_dict`] returned. `half_life` and `shrinkage` stay as configured.

        Raises:
            [`StateMismatchError`]: If the keys or the shapes are not those of a prior.
        """
        wanted, found = ({name: np.shape(s[name]) for name in sorted(s)} for s in (self.state_dict(), state))
        if found != wanted:
            raise StateMismatchError(
                f"The state of a `PromptLengthPrior` has the keys and shapes {wanted}, and this one has {found}. "
                "Load the state that the prior saved, or start without one."
            )
        self._weights, self._totals = list(map(float, state["weights"])), list(map(float, state["totals"]))
        self._unit = float(state["unit"][0])


def _bucket(num_prompt_tokens: int) -> int:
    if num_prompt_tokens < 0:
        raise ValueError(f"`num_prompt_tokens` ({num_prompt_tokens}) must not be negative.")
    return min(int(2 * math.log2(max(num_prompt_tokens, 1))), NUM_BUCKETS - 1)
