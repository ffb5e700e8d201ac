"""
Admission: how many candidates does each prompt of a batch get?

It is decided before a rollout, on one process, from what earlier rollouts of the same prompts looked like; and it
learns from each rollout afterwards.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ..errors import StateMismatchError
from ..policy import BudgetController, LengthTracker, PromptLengthPrior, allocate_redundancy
from .placement import LengthRanked, LongestFirst, known_lengths
from .policies import SchedulePolicies
from .summary import GroupSummary
from .types import GroupPlan


def prompt_key(token_ids: Sequence[int], image_digest: bytes = b"") -> int:
    """
    Identity of a prompt over the whole training: a 64-bit hash of its tokens and images. Data set indices would not
    survive shuffling, streaming or a changed file.

    Args:
        token_ids (`Sequence[int]` of shape `(P,)`):
            The prompt.
        image_digest (`bytes`, *optional*, defaults to `b""`):
            Hash of its images, in their order. Empty without any.

    Returns:
        `int`: Unsigned 64-bit hash.
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
    """
    The decision: candidates per prompt, and what it rests on.

    Args:
        num_candidates (`list[int]` of shape `(N,)`):
            M'_i for each prompt.
        saturated (`int`):
            Prompts at the upper bound M_up.
        rho (`float`, *optional*):
            ρ = σ̃_L / L̃ that the budget was computed from. `None` before anything is known.
        cost_weight (`float`, *optional*):
            λ. `None` while it is being calibrated, or where no budget is computed.
        expected_lengths (`list[float]` of shape `(N,)`, *optional*):
            Tokens that a candidate of each prompt is expected to have; NaN for a prompt never seen.
    """

    num_candidates: list[int]
    saturated: int = 0
    rho: float | None = None
    cost_weight: float | None = None
    expected_lengths: list[float] | None = None

    def plans(self, prompts: Sequence[PromptInfo]) -> list[GroupPlan]:
        """
        One plan per prompt, by index.

        Args:
            prompts (`Sequence[PromptInfo]` of shape `(N,)`):
                What this was decided for.
        """
        lengths = self.expected_lengths
        expected = [None] * len(prompts) if lengths is None else known_lengths(lengths)
        return [
            GroupPlan(index, count, prompt.key, prompt.num_tokens, expected_length=length)
            for index, (prompt, count, length) in enumerate(zip(prompts, self.num_candidates, expected, strict=True))
        ]

    def ordered(self, policies: SchedulePolicies) -> SchedulePolicies:
        """The same policies, with the candidates that are expected to be longest first, where anything is known."""
        lengths, ranking = self.expected_lengths, policies.ranking
        if lengths is None or ranking is None:
            return policies
        if not ranking.num_long:
            return replace(policies, placement=LongestFirst(lengths))
        return replace(policies, placement=LengthRanked(lengths, ranking.num_long, ranking.long_share))


class AdmissionPolicy(Protocol):
    """How many candidates, of which prompts?"""

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        """Decides before a rollout."""
        ...

    def expected_lengths(self, prompts: Sequence[PromptInfo]) -> list[float] | None:
        """Tokens that a candidate of each prompt is expected to have; `None` where nothing is ever known."""
        ...

    def observe(self, summaries: Sequence[GroupSummary], seconds: float) -> None:
        """Learns after a rollout that took `seconds`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs, beside the length tracker."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it."""
        ...


class LengthExpectations:
    """
    How long the responses to a prompt will be: by its own history, or, where it was never seen, by its length.

    Args:
        tracker ([`LengthTracker`]):
            Length statistics per prompt. Shared with the callback that saves it.
    """

    def __init__(self, tracker: LengthTracker) -> None:
        self.tracker = tracker
        self.prior = PromptLengthPrior()

    def __call__(self, prompts: Sequence[PromptInfo]) -> list[float]:
        """Expected tokens of one response to each; NaN before anything is known."""
        means = [self.tracker.mean(prompt.key) for prompt in prompts]
        return [
            self.prior.expected(prompt.num_tokens) if np.isnan(mean) else mean
            for prompt, mean in zip(prompts, means, strict=True)
        ]

    def load_prior(self, state: Mapping[str, Any]) -> None:
        """Restores what is known of prompts by their lengths, where it was saved."""
        if "prior" in state:
            self.prior.load_state_dict(state["prior"])

    def learn(self, summaries: Sequence[GroupSummary]) -> None:
        """Takes note of a rollout's lengths."""
        learned = []
        for summary in summaries:
            # A candidate that was called off before it was started says nothing.
            seen = [(n, cut) for n, cut in zip(summary.lengths, summary.censored, strict=True) if n or not cut]
            if seen:
                lengths, censored = zip(*seen, strict=True)
                self.tracker.update(summary.prompt_key, lengths, censored)
                learned.append(summary)
        self.tracker.end_step()
        for summary in learned:
            mean = self.tracker.mean(summary.prompt_key)
            if np.isfinite(mean):
                self.prior.update(summary.num_prompt_tokens, mean)


class UniformAdmission:
    """
    `num_generations` for each prompt: what GRPO does.

    Args:
        num_generations (`int`):
            M.
        tracker ([`LengthTracker`], *optional*):
            Length statistics per prompt, where the longest are to be started first.
    """

    def __init__(self, num_generations: int, tracker: LengthTracker | None = None) -> None:
        self.num_generations = num_generations
        self.expectations = None if tracker is None else LengthExpectations(tracker)

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        """M for each."""
        counts = [self.num_generations] * len(prompts)
        return Admission(counts, expected_lengths=self.expected_lengths(prompts))

    def expected_lengths(self, prompts: Sequence[PromptInfo]) -> list[float] | None:
        """The prompts' smoothed mean lengths, with a tracker."""
        return None if self.expectations is None else self.expectations(prompts)

    def observe(self, summaries: Sequence[GroupSummary], seconds: float) -> None:
        """Updates the prompts' statistics, with a tracker."""
        if self.expectations is not None:
            self.expectations.learn(summaries)

    def state_dict(self) -> dict[str, Any]:
        """What is known of prompts by their lengths, with a tracker."""
        return {} if self.expectations is None else {"prior": self.expectations.prior.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it."""
        _check_state(self, state)
        if self.expectations is not None:
            self.expectations.load_prior(state)


class VarianceAdmission:
    """
    Variance-based adaptive redundancy ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.2.2): a budget for
    the batch by Eq. 8 and 9, spread over the prompts by Algorithm 1.

    Args:
        tracker ([`LengthTracker`]):
            Length statistics per prompt. Shared with the callback that saves it.
        budget ([`BudgetController`]):
            Turns ρ and the cost of a candidate into M_total.
        num_generations (`int`):
            M = M_low.
        max_num_generations (`int`):
            M_up.
    """

    def __init__(
        self, tracker: LengthTracker, budget: BudgetController, num_generations: int, max_num_generations: int
    ) -> None:
        self.tracker = tracker
        self.expectations = LengthExpectations(tracker)
        self.budget = budget
        self.num_generations = num_generations
        self.max_num_generations = max_num_generations

    def plan(self, prompts: Sequence[PromptInfo]) -> Admission:
        """M'_i by the prompts' smoothed length deviation; a prompt never seen gets the batch's mean weight."""
        rho = self.tracker.rho
        stds = [self.tracker.std(prompt.key) for prompt in prompts if prompt.extendable]
        total = self.budget.total(len(stds), rho) if stds else 0
        extended = iter(
            allocate_redundancy(stds, total, self.num_generations, self.max_num_generations) if stds else ()
        )
        counts = [next(extended) if prompt.extendable else self.num_generations for prompt in prompts]
        at_bound = 0
        if self.max_num_generations > self.num_generations:
            at_bound = sum(count == self.max_num_generations for count in counts)
        return Admission(
            counts,
            at_bound,
            None if np.isnan(rho) else rho,
            self.budget.cost_weight,
            self.expected_lengths(prompts),
        )

    def expected_lengths(self, prompts: Sequence[PromptInfo]) -> list[float]:
        """The prompts' smoothed mean lengths."""
        return self.expectations(prompts)

    def observe(self, summaries: Sequence[GroupSummary], seconds: float) -> None:
        """Updates the prompts' statistics, ρ, and the cost of a candidate."""
        self.expectations.learn(summaries)
        lengths = [length for summary in summaries for length in summary.lengths]
        if lengths and seconds > 0:  # a rollout can be over as it begins, where all that it resumes is complete
            self.budget.observe(len(lengths), seconds, lengths)

    def state_dict(self) -> dict[str, Any]:
        """The budget's state, and what is known of prompts by their lengths; the tracker is saved by its callback."""
        return {"budget": self.budget.state_dict(), "prior": self.expectations.prior.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores both."""
        _check_state(self, state)
        self.budget.load_state_dict(state["budget"])
        self.expectations.load_prior(state)


def _check_state(admission: AdmissionPolicy, state: Mapping[str, Any]) -> None:
    own = set(admission.state_dict())
    if set(state) - own or own - set(state) - {"prior"}:
        raise StateMismatchError(
            f"`{type(admission).__name__}` saves {sorted(own)}, but {sorted(state)} was saved, under another "
            "`schedule`. Resume with that one, or delete `darts_admission.json` from the checkpoint to learn anew."
        )
