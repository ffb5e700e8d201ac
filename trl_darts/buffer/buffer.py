"""
The rollout buffer: prompts between the data loader and the optimizer, with what has been sampled for them
(SortedRL, Section 3.3).

```
enter ──▶ WAITING ──begin──▶ IN_FLIGHT ──absorb──┬── taken ────────────────────▶ TRAINED (left)
             ▲                  ▲  │             ├── kept with its tokens ─────▶ PARTIAL ──begin──▶ IN_FLIGHT
             │                  │  │             ├── done, and not taken yet ──▶ COMPLETE ──taken──▶ TRAINED
             └── to begin again ┼──┴── a prompt that can't be completed ───────▶ DROPPED (left)
```

Invariants (`tests/buffer/test_buffer.py` checks each under its name, over random rollouts, saves and restores):

- trained_once: a prompt that enters leaves exactly once, trained or dropped.
- not_starved: a prompt leaves within the number of rounds that its schedule says.
- logprobs_of_their_time: every token keeps the log-prob that it was sampled with, and the version of the policy.
- restored_as_saved: a restored buffer goes on exactly as the saved one would have.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ..scheduling import (
    Admission,
    AdmissionPolicy,
    Candidate,
    FinishReason,
    FirstGroups,
    GroupPlan,
    GroupResult,
    PartialCandidate,
    PromptInfo,
    RolloutResult,
)


Version = tuple[int, int]  # (version of the policy, number of tokens in a row that it sampled)


class Lifecycle(StrEnum):
    """Where a prompt is between the data loader and the optimizer."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    PARTIAL = "partial"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class SampledCandidate:
    """A candidate between two rollouts, or a row on its way to the optimizer."""

    partial: PartialCandidate
    versions: tuple[Version, ...] = ()  # which one sampled how many of its tokens, in their order

    @property
    def length(self) -> int:
        return len(self.partial.tokens)

    @property
    def cut_off(self) -> bool:
        """Whether it reached the length limit."""
        return self.partial.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class GroupScore:
    """The rewards of a complete prompt's rows."""

    rewards: Any  # tensor of shape (M, F)
    logged: dict[str, list[Any]]  # what reward functions logged for the rows, by column
    totals: list[float]  # (M,), weighted sums; NaN without a reward
    is_uniform: bool  # whether TRL would give all rows the advantage 0


@dataclass(slots=True)
class BufferEntry:
    """
    One prompt between the data loader and the optimizer, with all that is known of it.

    All processes have its row and its scores, and the main process has what was sampled. Once it is complete, its
    candidates are its `num_generations` rows.
    """

    entry_id: int
    prompt: PromptInfo
    row: dict[str, Any] = field(default_factory=dict)  # of the data set
    tokens: list[int] = field(default_factory=list)  # as they were decoded
    state: Lifecycle = Lifecycle.WAITING
    num_candidates: int = 0  # decided when it first goes into a rollout
    num_deferrals: int = 0  # rollouts that ended without it
    was_cut: bool = False  # whether candidates were aborted once it was complete
    score: GroupScore | None = None
    audit_of: int | None = None  # ID of the audited prompt that this entry samples a second time, only to compare
    # Of an audited prompt's second entry: the candidates that the short round in which it entered would have sampled,
    # and the tokens at which that round ended. The rounds before a long one are not typical: budgets are small.
    num_usual: int = 0
    usual_length: float = 0.0
    candidates: list[SampledCandidate] = field(default_factory=list)

    @property
    def mean_length(self) -> float:
        return sum(c.length for c in self.candidates) / max(1, len(self.candidates))


@dataclass(frozen=True)
class Round:
    """What the next rollout is to do."""

    entries: list[BufferEntry]  # started or resumed
    num_groups: int  # prompts that the optimizer takes, those that are complete already included
    num_finishing: int  # how many of the entries the rollout brings to their end
    must_finish: frozenset[int] = frozenset()  # IDs of entries that must be among them
    long: bool = False  # no prompt gets more than `num_generations` candidates, and all are decoded to their end

    @property
    def batch_stop(self) -> FirstGroups:
        return FirstGroups(self.num_finishing, self.must_finish)


class RolloutBuffer:
    """
    Prompts that have entered and have not been trained on. With `keeps_tokens`, what has been sampled for a prompt is
    kept when a rollout ends without it. Otherwise it is sampled again under the new weights.
    """

    def __init__(self, keeps_tokens: bool) -> None:
        self.keeps_tokens = keeps_tokens
        self.entries: dict[int, BufferEntry] = {}  # by ID, in the order in which they entered
        self.num_entered = 0

    def __len__(self) -> int:
        return len(self.entries)

    def enter(self, prompt: PromptInfo, row: dict[str, Any], tokens: list[int]) -> BufferEntry:
        """Adds a prompt of the loader. IDs are counted through the whole training."""
        entry = BufferEntry(self.num_entered, prompt, row, tokens)
        self.entries[entry.entry_id] = entry
        self.num_entered += 1
        return entry

    def remove(self, entry_ids: Iterable[int]) -> None:
        """Removes prompts, if they are there."""
        for entry_id in entry_ids:
            self.entries.pop(entry_id, None)

    def select(self, *states: Lifecycle) -> list[BufferEntry]:
        """Entries in one of these states, in the order in which they entered."""
        return [entry for entry in self.entries.values() if entry.state in states]

    def by_age(self) -> tuple[list[BufferEntry], list[BufferEntry]]:
        """Returns the waiting prompts that were never deferred, and the others. Second entries are not among them."""
        waiting = [entry for entry in self.select(Lifecycle.WAITING) if entry.audit_of is None]
        return [e for e in waiting if not e.num_deferrals], [e for e in waiting if e.num_deferrals]

    def begin(
        self, current: Round, num_generations: int, policy: AdmissionPolicy
    ) -> tuple[Admission, list[GroupPlan]]:
        """
        Puts a round's entries in flight. `policy` decides how many candidates the prompts get that begin now; that
        stays with them while their tokens are kept. Returns the decision, and plans with the entries' IDs.
        """
        fresh = [entry for entry in current.entries if not entry.candidates]
        decided = policy.plan([entry.prompt for entry in fresh])
        if current.long:
            decided = replace(decided, num_candidates=[num_generations] * len(fresh), saturated=0)
        for entry, count in zip(fresh, decided.num_candidates, strict=True):
            entry.num_candidates = count
        for entry in current.entries:
            entry.state = Lifecycle.IN_FLIGHT
        prompts = [entry.prompt for entry in current.entries]
        counts = [entry.num_candidates for entry in current.entries]
        admission = replace(decided, num_candidates=counts, expected_lengths=policy.expected_lengths(prompts))
        plans = admission.plans(prompts, [entry.entry_id for entry in current.entries])
        resumed = [tuple(c.partial for c in entry.candidates) for entry in current.entries]
        return admission, [replace(p, resumed=r) for p, r in zip(plans, resumed, strict=True)]

    def absorb(self, result: RolloutResult | None, version: int) -> list[BufferEntry]:
        """
        Takes back what a rollout yielded that was sampled by a `version` of the policy; no result where nothing had to
        be started. Returns what was dropped.
        """
        if result is None:
            return []
        for group in [*result.groups, *result.deferred]:
            self._take_back(self.entries[group.plan.group_id], group, version)
        dropped = [self.entries[entry_id] for entry_id in result.dropped]
        self.remove(entry.entry_id for entry in dropped)
        return dropped

    def take(
        self, current: Round, order: Callable[[BufferEntry], float], num_dropped: int = 0
    ) -> tuple[list[BufferEntry], list[BufferEntry]]:
        """
        Returns what is trained on now, which has left the buffer, and what is complete and has no room in the batch.
        Prompts that are smallest in `order` are trained on first. `num_dropped` prompts have left in the same round.
        """
        done = self.select(Lifecycle.COMPLETE)
        done.sort(key=lambda entry: (entry.entry_id not in current.must_finish, order(entry), entry.entry_id))
        num_taken = max(1, current.num_groups - num_dropped)  # the loader counts on so many prompts leaving
        taken = sorted(done[:num_taken], key=lambda entry: entry.entry_id)
        self.remove(entry.entry_id for entry in taken)
        return taken, done[num_taken:]

    def _take_back(self, entry: BufferEntry, group: GroupResult, version: int) -> None:
        before = entry.candidates
        known = [*before, *[None] * (len(group.candidates) - len(before))]
        candidates = [_sampled(c, old, version) for c, old in zip(group.candidates, known, strict=True)]
        if group.complete:
            entry.state = Lifecycle.COMPLETE
            entry.candidates = [candidates[index] for index in group.selected]
            entry.was_cut = any(c.finish_reason is FinishReason.ABORT for c in group.candidates)
            return
        entry.num_deferrals += 1
        if self.keeps_tokens and any(c.length for c in candidates):
            entry.state = Lifecycle.PARTIAL
            entry.candidates = candidates
            entry.num_candidates = len(candidates)
        else:
            begin_again(entry)


def begin_again(entry: BufferEntry) -> None:
    """Drops what was sampled for a prompt."""
    entry.state = Lifecycle.WAITING
    entry.candidates, entry.score = [], None


def _sampled(candidate: Candidate, old: SampledCandidate | None, version: int) -> SampledCandidate:
    """A candidate after a rollout; one that was called off in the moment of its end has come to its end."""
    versions = () if old is None else old.versions
    num_new = candidate.length - (0 if old is None else old.length)
    if candidate.stamps:  # the weights may have changed while it was decoded
        versions = candidate.versions
    elif num_new and versions and versions[-1][0] == version:
        versions = (*versions[:-1], (version, versions[-1][1] + num_new))
    elif num_new:
        versions = (*versions, (version, num_new))
    reason = candidate.finish_reason
    ended = None if reason is None or reason is FinishReason.ABORT else reason
    partial = PartialCandidate(candidate.tokens, candidate.logprobs, ended, candidate.segment + 1)
    return SampledCandidate(partial, versions)
