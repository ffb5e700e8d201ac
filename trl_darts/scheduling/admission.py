"""
Admission decides how many candidates each prompt of a batch gets.

It decides before a rollout, on the main process, from the lengths in earlier rollouts, and learns from each rollout
afterwards.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import StateMismatchError
from ..policy import BudgetController, LengthTracker, allocate_redundancy
from .placement import known_lengths
from .summary import GroupSummary
from .types import GroupPlan


def prompt_key(token_ids: Sequence[int], image_digest: bytes = b"") -> int:
    """
    Returns a prompt's identity over the whole run: an unsigned 64-bit hash of its tokens and images. Data set indices
    would change with shuffling, streaming or a changed file.
    """
    data = np.asarray(token_ids, dtype="<i8").tobytes() + image_digest
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """
    Identity and length of a prompt. A group whose rows have different prompts is not `extendable`: each row gets one
    candidate of its own.
    """

    key: int
    num_tokens: int
    extendable: bool = True


@dataclass(frozen=True, slots=True)
class Admission:
    """Number of candidates per prompt, and the statistics behind it."""

    num_candidates: list[int]  # (N,), M'_i
    saturated: int = 0  # prompts at the upper bound M_up
    rho: float | None = None  # σ̃_L / L̃ used for the budget; `None` without history
    expected_lengths: list[float] | None = None  # (N,), tokens of one candidate; NaN for an unseen prompt

    def plans(self, prompts: Sequence[PromptInfo], group_ids: Sequence[int] | None = None) -> list[GroupPlan]:
        """Returns one plan per prompt, with these IDs or those of a batch's places."""
        lengths, ids = self.expected_lengths, range(len(prompts)) if group_ids is None else group_ids
        expected = [None] * len(prompts) if lengths is None else known_lengths(lengths)
        return [
            GroupPlan(group_id, count, prompt.key, prompt.num_tokens, expected_length=length)
            for group_id, prompt, count, length in zip(ids, prompts, self.num_candidates, expected, strict=True)
        ]


class AdmissionPolicy(Protocol):
    """Decides how many candidates each prompt gets."""

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        """Decides before a rollout."""

    def expected_lengths(self, prompts: Sequence[PromptInfo]) -> list[float] | None:
        """Returns the expected tokens of a candidate of each prompt. `None` if the policy does not track lengths."""

    def observe(self, summaries: Sequence[GroupSummary]) -> None:
        """Learns after a rollout."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs in addition to the length tracker."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""


class UniformAdmission:
    """
    Gives each prompt `num_generations` candidates, as GRPO does. With a tracker, it learns the lengths of responses,
    so that the longest can be started first.
    """

    def __init__(self, num_generations: int, tracker: LengthTracker | None = None) -> None:
        self.num_generations = num_generations
        self.tracker = tracker

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        counts = [self.num_generations] * len(prompts)
        return Admission(counts, expected_lengths=self.expected_lengths(prompts))

    def expected_lengths(self, prompts: Sequence[PromptInfo]) -> list[float] | None:
        """Returns smoothed mean lengths, predicted from the prompt's length if unseen. `None` without a tracker."""
        if self.tracker is None:
            return None
        means = [(prompt, self.tracker.mean(prompt.key)) for prompt in prompts]
        return [self.tracker.prior.predict(p.num_tokens)[0] if np.isnan(mean) else mean for p, mean in means]

    def observe(self, summaries: Sequence[GroupSummary]) -> None:
        if self.tracker is None:
            return
        for summary in summaries:
            # A candidate that was aborted before it started has no length.
            seen = [(n, cut) for n, cut in zip(summary.lengths, summary.censored, strict=True) if n or not cut]
            if seen:
                lengths, censored = zip(*seen, strict=True)
                self.tracker.update(summary.prompt_key, lengths, censored, summary.num_prompt_tokens)
        self.tracker.end_step()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state. Raises [`StateMismatchError`] if it was saved under another schedule."""
        own = self.state_dict()
        if set(state) != set(own):
            raise StateMismatchError(
                f"`state` ({sorted(state)}) must have the keys of `{type(self).__name__}` ({sorted(own)}). It was "
                "saved under another `schedule`. Resume with that one, or delete `darts_admission.json` from the "
                "checkpoint."
            )


class VarianceAdmission(UniformAdmission):
    """
    Variance-based adaptive redundancy ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2): Eq. 8 and 9
    give the batch's budget, and Algorithm 1 distributes it over the prompts, M_low to M_up each. If spare candidates
    don't pay, a prompt can get fewer than M_low.
    """

    tracker: LengthTracker

    def __init__(self, tracker: LengthTracker, budget: BudgetController) -> None:
        super().__init__(budget.num_generations, tracker)
        self.budget = budget

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        """Chooses M'_i from the smoothed length deviation of each prompt, or the predicted one if unseen."""
        high = self.budget.max_num_generations
        rho, extendable = self.tracker.rho, [prompt for prompt in prompts if prompt.extendable]
        total = self.budget.total(len(extendable), rho, self.tracker.prior.typical_spread())
        extended = iter(self._allocate(extendable, total) if extendable else ())
        counts = [next(extended) if prompt.extendable else self.num_generations for prompt in prompts]
        saturated = sum(count == high for count in counts) if high > self.num_generations else 0
        return Admission(counts, saturated, None if np.isnan(rho) else rho, self.expected_lengths(prompts))

    def _allocate(self, prompts: Sequence[PromptInfo], total: int) -> list[int]:
        prior, stds = self.tracker.prior, [self.tracker.std(prompt.key) for prompt in prompts]
        all_seen = not any(map(np.isnan, stds))
        stds = [prior.predict(p.num_tokens)[1] if np.isnan(std) else std for p, std in zip(prompts, stds, strict=True)]
        high = self.budget.max_num_generations
        low = min(self.budget.min_num_generations, total // len(prompts))  # less if spare candidates don't pay
        return allocate_redundancy(stds, total, low, high, None if all_seen else prior.typical_stds())

    def observe(self, summaries: Sequence[GroupSummary]) -> None:
        super().observe(summaries)
        self.budget.observe(self.tracker.rho, self.tracker.dataset_mean)

    def state_dict(self) -> dict[str, Any]:
        return {"budget": self.budget.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.budget.load_state_dict(state["budget"])
