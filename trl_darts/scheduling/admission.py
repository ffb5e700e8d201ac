"""
Admission: how many candidates does each prompt of a batch get?

It is decided before a rollout, on the main process, from what earlier rollouts of the same prompts looked like, and it
learns from each rollout afterwards.
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
    Identity of a prompt over the whole training: an unsigned 64-bit hash of its tokens and images. Data set indices
    would not survive shuffling, streaming or a changed file.
    """
    data = np.asarray(token_ids, dtype="<i8").tobytes() + image_digest
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """
    What admission knows of a prompt: its identity and its length in tokens. A group whose rows have different prompts
    is not `extendable`: each row has its own one candidate.
    """

    key: int
    num_tokens: int
    extendable: bool = True


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision: candidates per prompt, and what it rests on."""

    num_candidates: list[int]  # (N,), M'_i
    saturated: int = 0  # prompts at the upper bound M_up
    rho: float | None = None  # σ̃_L / L̃ that the budget was computed from; `None` before anything is known
    expected_lengths: list[float] | None = None  # (N,), tokens of one candidate; NaN for a prompt never seen

    def plans(self, prompts: Sequence[PromptInfo]) -> list[GroupPlan]:
        """One plan per prompt, by index."""
        lengths = self.expected_lengths
        expected = [None] * len(prompts) if lengths is None else known_lengths(lengths)
        return [
            GroupPlan(index, count, prompt.key, prompt.num_tokens, expected_length=length)
            for index, (prompt, count, length) in enumerate(zip(prompts, self.num_candidates, expected, strict=True))
        ]


class AdmissionPolicy(Protocol):
    """How many candidates, of which prompts?"""

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        """Decides before a rollout."""

    def expected_lengths(self, prompts: Sequence[PromptInfo]) -> list[float] | None:
        """Tokens that a candidate of each prompt is expected to have; `None` where nothing is ever known."""

    def observe(self, summaries: Sequence[GroupSummary]) -> None:
        """Learns after a rollout."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs, beside the length tracker."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it."""


class UniformAdmission:
    """
    `num_generations` for each prompt: what GRPO does. With a tracker, which its callback saves, it learns how long the
    responses to each prompt are, so that the longest can be started first.
    """

    def __init__(self, num_generations: int, tracker: LengthTracker | None = None) -> None:
        self.num_generations = num_generations
        self.tracker = tracker

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        counts = [self.num_generations] * len(prompts)
        return Admission(counts, expected_lengths=self.expected_lengths(prompts))

    def expected_lengths(self, prompts: Sequence[PromptInfo]) -> list[float] | None:
        """Smoothed mean lengths; of a prompt never seen, what its own length says. `None` without a tracker."""
        if self.tracker is None:
            return None
        means = [(prompt, self.tracker.mean(prompt.key)) for prompt in prompts]
        return [self.tracker.prior.predict(p.num_tokens)[0] if np.isnan(mean) else mean for p, mean in means]

    def observe(self, summaries: Sequence[GroupSummary]) -> None:
        if self.tracker is None:
            return
        for summary in summaries:
            # A candidate that was called off before it was started says nothing.
            seen = [(n, cut) for n, cut in zip(summary.lengths, summary.censored, strict=True) if n or not cut]
            if seen:
                lengths, censored = zip(*seen, strict=True)
                self.tracker.update(summary.prompt_key, lengths, censored, summary.num_prompt_tokens)
        self.tracker.end_step()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it; [`StateMismatchError`] if it was saved under another schedule."""
        own = self.state_dict()
        if set(state) != set(own):
            raise StateMismatchError(
                f"`{type(self).__name__}` saves {sorted(own)}, but {sorted(state)} was saved, under another "
                "`schedule`. Resume with that one, or delete `darts_admission.json` from the checkpoint to learn anew."
            )


class VarianceAdmission(UniformAdmission):
    """
    Variance-based adaptive redundancy ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2): a budget for
    the batch by Eq. 8 and 9, spread over the prompts by Algorithm 1, between M_low and M_up for each. Where spare
    candidates can't pay, they are fewer than M_low says.
    """

    tracker: LengthTracker

    def __init__(self, tracker: LengthTracker, budget: BudgetController) -> None:
        super().__init__(budget.num_generations, tracker)
        self.budget = budget

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        """M'_i by the prompts' smoothed length deviation, or by the one that a prompt's length predicts."""
        high = self.budget.max_num_generations
        rho, extendable = self.tracker.rho, [prompt for prompt in prompts if prompt.extendable]
        extended = iter(self._allocate(extendable, self.budget.total(len(extendable), rho)) if extendable else ())
        counts = [next(extended) if prompt.extendable else self.num_generations for prompt in prompts]
        saturated = sum(count == high for count in counts) if high > self.num_generations else 0
        return Admission(counts, saturated, None if np.isnan(rho) else rho, self.expected_lengths(prompts))

    def _allocate(self, prompts: Sequence[PromptInfo], total: int) -> list[int]:
        prior, stds = self.tracker.prior, [self.tracker.std(prompt.key) for prompt in prompts]
        all_seen = not any(map(np.isnan, stds))
        stds = [prior.predict(p.num_tokens)[1] if np.isnan(std) else std for p, std in zip(prompts, stds, strict=True)]
        high = self.budget.max_num_generations
        low = min(self.budget.min_num_generations, total // len(prompts))  # less where spare candidates can't pay
        return allocate_redundancy(stds, total, low, high, None if all_seen else prior.typical_stds())

    def observe(self, summaries: Sequence[GroupSummary]) -> None:
        super().observe(summaries)
        self.budget.observe(self.tracker.rho, self.tracker.dataset_mean)

    def state_dict(self) -> dict[str, Any]:
        return {"budget": self.budget.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.budget.load_state_dict(state["budget"])
