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

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..policy.audit import Audits
from ..policy.deferral import LongRewards
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


SHARE_EMA = 0.98  # of `informative_share`, per group: half of it is of the last 34
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


@dataclass(slots=True)
class BufferEntry:
    """
    One prompt in the buffer. `num_candidates` is decided when it first goes into a rollout; `num_deferrals` counts the
    rollouts that ended without it. Once it is complete, its candidates are its `num_generations` rows.
    """

    entry_id: int
    prompt: PromptInfo
    state: Lifecycle = Lifecycle.WAITING
    num_candidates: int = 0
    num_deferrals: int = 0
    was_cut: bool = False  # whether candidates were aborted once it was complete
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

    entries: list[BufferEntry]  # started or resumed; their place in the list is their `group_id` in the rollout
    num_groups: int  # prompts that the optimizer takes, those that are complete already included
    num_finishing: int  # how many of the entries the rollout brings to their end
    must_finish: frozenset[int] = frozenset()  # places of entries that must be among them
    long: bool = False  # no prompt gets more than `num_generations` candidates, and all are decoded to their end

    @property
    def batch_stop(self) -> FirstGroups:
        return FirstGroups(self.num_finishing, self.must_finish)


class RolloutBuffer:
    """
    Prompts that have entered and have not been trained on.

    With `keeps_tokens`, what has been sampled for a prompt is kept when a rollout ends without it. Otherwise it begins
    anew under the new weights. Of the complete prompts, those that are smallest in `order` are trained on first, by
    default those that entered first. With `keeps_surplus`, complete prompts that a batch had no room for are trained
    on with the next one, and deferred prompts count the batches that they wait for. A random `audit_share` of the
    prompts is deferred from the start, and enters twice: the second entry is never trained on.
    """

    def __init__(
        self,
        keeps_tokens: bool,
        order: Callable[[BufferEntry], float] | None = None,
        keeps_surplus: bool = False,
        audit_share: float = 0.0,
    ) -> None:
        self.keeps_tokens = keeps_tokens
        self.keeps_surplus = keeps_surplus
        self.order = order or (lambda entry: entry.entry_id)
        self.entries: dict[int, BufferEntry] = {}  # by ID, in the order in which they entered
        self.num_entered = 0
        self.num_uniform = 0  # prompts of the batch to come that have left for their rewards
        self.informative_share = 1.0  # of the groups of late, those whose rewards have a spread
        self.num_rounds = 0  # since the last batch was taken
        self.was_long = False  # whether the last of them was a long one
        self.long_rewards = LongRewards()  # for `defer_unsettled_groups`
        self.audit_share, self.audits = audit_share, Audits()

    def __len__(self) -> int:
        return len(self.entries)

    def enter(self, prompts: Iterable[PromptInfo]) -> list[int]:
        """Adds prompts of the loader; returns their IDs, which are counted through the whole training."""
        return [self._enter(prompt) for prompt in prompts]

    def _enter(self, prompt: PromptInfo) -> int:
        entry_id = self.num_entered
        audited = random.Random(f"audit {entry_id}").random() < self.audit_share  # the same on all processes
        self.entries[entry_id] = BufferEntry(entry_id, prompt, num_deferrals=int(audited))
        if audited:
            self.entries[entry_id + 1] = BufferEntry(entry_id + 1, prompt, num_deferrals=1, audit_of=entry_id)
        self.num_entered += 1 + audited
        return entry_id

    def second_samples(self, entry_ids: Iterable[int]) -> list[BufferEntry]:
        """Returns the second entries of these prompts that are in the buffer, which audited prompts have."""
        own = set(entry_ids)
        return [entry for entry in self.entries.values() if entry.audit_of in own]

    def select(self, *states: Lifecycle) -> list[BufferEntry]:
        """Entries in one of these states, in the order in which they entered."""
        return [entry for entry in self.entries.values() if entry.state in states]

    def begin(self, plan: Round, num_generations: int, policy: AdmissionPolicy) -> tuple[Admission, list[GroupPlan]]:
        """
        Puts a round's entries in flight. `policy` decides how many candidates the prompts get that begin now; that
        stays with them while their tokens are kept. Returns the decision, and plans by place.
        """
        fresh = [entry for entry in plan.entries if not entry.candidates]
        decided = policy.plan([entry.prompt for entry in fresh])
        if plan.long:
            decided = replace(decided, num_candidates=[num_generations] * len(fresh), saturated=0)
        else:
            self._plan_audited(fresh, policy)
        for entry, count in zip(fresh, decided.num_candidates, strict=True):
            entry.num_candidates = count
        for entry in plan.entries:
            entry.state = Lifecycle.IN_FLIGHT
        prompts = [entry.prompt for entry in plan.entries]
        counts = [entry.num_candidates for entry in plan.entries]
        admission = replace(decided, num_candidates=counts, expected_lengths=policy.expected_lengths(prompts))
        resumed = [tuple(c.partial for c in entry.candidates) for entry in plan.entries]
        return admission, [replace(p, resumed=r) for p, r in zip(admission.plans(prompts), resumed, strict=True)]

    def _plan_audited(self, fresh: Sequence[BufferEntry], policy: AdmissionPolicy) -> None:
        """Decides how many candidates new audited prompts would have got in this round."""
        waiting = self.select(Lifecycle.WAITING)
        audited = [entry for entry in waiting if entry.audit_of is not None and not entry.num_usual]
        if audited:
            counts = policy.plan([entry.prompt for entry in [*fresh, *audited]]).num_candidates
            for entry, count in zip(audited, counts[len(fresh) :], strict=True):
                entry.num_usual = count

    def end_short(self, length: float) -> None:
        """Notes the tokens at which a short round ended, for the audited prompts that would have been in it."""
        for entry in self.select(Lifecycle.WAITING):
            if entry.num_usual and not entry.usual_length:
                entry.usual_length = length

    def absorb(self, plan: Round, result: RolloutResult | None, version: int) -> list[BufferEntry]:
        """
        Takes back what a rollout yielded that was sampled by a `version` of the policy; no result where nothing had to
        be started. Returns what was dropped.
        """
        if result is None:
            return []
        self.num_rounds, self.was_long = self.num_rounds + 1, plan.long
        for group in [*result.groups, *result.deferred]:
            self._take_back(plan.entries[group.plan.group_id], group, version)
        dropped = [plan.entries[place] for place in result.dropped]
        for entry in dropped:
            del self.entries[entry.entry_id]
        return dropped

    def drop_uniform(self, entry_ids: Sequence[int], num_scored: int) -> None:
        """Takes out what teaches nothing, of so many complete prompts whose rewards are known now."""
        for entry_id in entry_ids:
            del self.entries[entry_id]
        self.num_uniform += len(entry_ids)
        weight = SHARE_EMA**num_scored
        self.informative_share = weight * self.informative_share + (1 - weight) * (1 - len(entry_ids) / num_scored)

    def defer(self, entry_ids: Sequence[int]) -> None:
        """Returns complete groups to the waiting prompts: they are sampled again in a long round."""
        for entry_id in entry_ids:
            self.entries[entry_id].num_deferrals += 1
            begin_again(self.entries[entry_id])

    def take(self, plan: Round, num_dropped: int = 0) -> list[BufferEntry]:
        """What is trained on now. It has left the buffer; `num_dropped` have left it in the same round."""
        done = self.select(Lifecycle.COMPLETE)
        must = {plan.entries[place].entry_id for place in plan.must_finish}
        done.sort(key=lambda entry: (entry.entry_id not in must, self.order(entry), entry.entry_id))
        num_taken = max(1, plan.num_groups - num_dropped)  # the loader counts on so many prompts leaving
        taken = sorted(done[:num_taken], key=lambda entry: entry.entry_id)
        for entry in taken:
            del self.entries[entry.entry_id]
        if self.keeps_surplus:
            for entry in self.select(Lifecycle.WAITING):
                entry.num_deferrals += entry.num_deferrals > 0
        elif not self.keeps_tokens:  # what is complete and not taken was sampled by a policy that is the old one then
            for entry in done[num_taken:]:
                entry.num_deferrals += 1
                begin_again(entry)
        self.num_uniform = self.num_rounds = 0
        return taken

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
    entry.candidates = []


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
