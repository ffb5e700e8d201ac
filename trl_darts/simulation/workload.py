"""What a training in virtual time is trained on: prompts, lengths, and what a step costs beside its rollout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigurationError
from .lengths import IntArray, LengthModel


@dataclass(frozen=True)
class Workload:
    """
    What is trained on, and what a step costs beside its rollout.

    Args:
        lengths ([`LengthModel`]):
            Response lengths of the data set's prompts.
        prompts_per_step (`int`):
            N.
        max_completion_length (`int`):
            Tokens at which responses are cut off.
        prompt_tokens (`int`, *optional*, defaults to `0`):
            Length of each prompt.
        train_seconds_per_token (`float`, *optional*, defaults to `0.0`):
            Forward and backward pass, per token of prompts and kept responses.
        fixed_seconds (`float`, *optional*, defaults to `0.0`):
            Per step: weight sync, rewards, optimizer.
        shaping (`float`, *optional*, defaults to `0.0`):
            How fast the policy follows what is selected, an assumption: in each step, all log-lengths move by
            `shaping` times the mean over the batch's prompts of (mean log-length of the kept candidates − that of all
            complete ones). Rewards play no part in it.
        redraws (`bool`, *optional*, defaults to `False`):
            Whether a candidate that begins anew gets a new length, as one that is sampled anew would. Otherwise it has
            its length again, so that all schedules that keep all candidates train on the same ones.

    Raises:
        [`ConfigurationError`]: If a number is out of range.
    """

    lengths: LengthModel
    prompts_per_step: int
    max_completion_length: int
    prompt_tokens: int = 0
    train_seconds_per_token: float = 0.0
    fixed_seconds: float = 0.0
    shaping: float = 0.0
    redraws: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.prompts_per_step <= self.lengths.num_prompts:
            raise ConfigurationError(
                f"`prompts_per_step` ({self.prompts_per_step}) must be at least 1, and at most the number of prompts "
                f"({self.lengths.num_prompts})."
            )
        if self.max_completion_length < 1:
            raise ConfigurationError(f"`max_completion_length` ({self.max_completion_length}) must be at least 1.")
        for name in ("prompt_tokens", "train_seconds_per_token", "fixed_seconds", "shaping"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be finite and not negative.")

    def epochs(self, seed: int) -> Iterator[list[IntArray]]:
        """Batches of prompts, a new order in each epoch; what does not fill a batch at its end is left out."""
        rng = np.random.default_rng([seed, 3])
        size = self.prompts_per_step
        while True:
            order = rng.permutation(self.lengths.num_prompts)
            yield [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
