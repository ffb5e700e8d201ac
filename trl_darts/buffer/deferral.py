"""
Groups that wait for long answers (`defer_unsettled_groups`), and audited prompts (`audit_share`).

Short rounds bound the wait. A group without a spread of rewards of which candidates were aborted is unsettled: its
prompt waits for a long round, which decodes all of its answers to their end. An audited prompt waits from the start,
and enters twice: the second entry is only compared with the first, and never trained on.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..policy.audit import Audits, BoundedWait
from ..policy.deferral import LongRewards
from ..scheduling import Admission, AdmissionPolicy, GroupPlan, PromptInfo
from .buffer import BufferEntry, Lifecycle, RolloutBuffer, Round, begin_again
from .round_policy import Outcome, RoundPolicy


# Batches that a deferred prompt waits for at most, before its long round is filled up with other prompts.
MAX_DEFERRALS = 40


@dataclass
class Deferral(RoundPolicy):
    """
    Short rounds whose unsettled groups wait for a long round, see [`~trl_darts.policy.deferral.LongRewards`]. A batch
    takes the settled groups of one round, and of further rounds only if it has none; filler rows stand for the others.
    While too many answers never end, all rounds are long.
    """

    scores_first: ClassVar[bool] = True
    has_long_rounds: ClassVar[bool] = True

    wait: BoundedWait
    defers: bool = True
    audit_share: float = 0.0
    num_rounds: int = field(default=0, init=False)  # since the last batch was taken
    learned: LongRewards = field(default_factory=LongRewards, init=False)
    audits: Audits = field(default_factory=Audits, init=False)

    # Rounds

    def lacking(self, buffer: RolloutBuffer) -> int:
        new, deferred = buffer.by_age()
        if self._is_over(buffer):
            return 0
        if self._is_long(deferred):
            return max(0, self.num_groups - len(deferred) - len(new))
        return max(0, self._num_started(buffer) - len(new))

    def next(self, buffer: RolloutBuffer) -> Round:
        """At the end of the training, deferred prompts fill up the last batches."""
        new, deferred = buffer.by_age()
        size = self.num_groups
        if self._is_over(buffer):
            return Round([], size, 0)
        if self._is_long(deferred) or len(new) < size - len(buffer.select(Lifecycle.COMPLETE)):
            entries = (deferred + new)[:size]
            entries += _seconds(buffer, entries)
            return Round(entries, size, len(entries), long=True)
        entries = new[: self._num_started(buffer)]
        return Round(entries, size, len(entries), long=self._waits_for_all)

    @property
    def _waits_for_all(self) -> bool:
        return self.defers and self.learned.waits_for_all

    def _is_over(self, buffer: RolloutBuffer) -> bool:
        """Whether the batch can be taken without another round."""
        num_complete = len(buffer.select(Lifecycle.COMPLETE))
        return num_complete >= self.num_groups or (self.num_rounds > 0 and num_complete > 0)

    def _is_long(self, deferred: Sequence[BufferEntry]) -> bool:
        return len(deferred) >= self.num_groups or any(e.num_deferrals > MAX_DEFERRALS for e in deferred)

    def _num_started(self, buffer: RolloutBuffer) -> int:
        missing = self.num_groups - len(buffer.select(Lifecycle.COMPLETE))
        return self.learned.num_started(missing) if self.defers and not self._waits_for_all else missing

    # What happens to prompts

    def enter(self, buffer: RolloutBuffer, prompt: PromptInfo, row: dict[str, Any], tokens: list[int]) -> BufferEntry:
        entry = buffer.enter(prompt, row, tokens)
        if random.Random(f"audit {entry.entry_id}").random() < self.audit_share:  # the same on all processes
            second = buffer.enter(prompt, row, tokens)
            second.audit_of, entry.num_deferrals, second.num_deferrals = entry.entry_id, 1, 1
        return entry

    def begin(
        self, buffer: RolloutBuffer, current: Round, num_generations: int, admission: AdmissionPolicy
    ) -> tuple[Admission, list[GroupPlan]]:
        self.num_rounds += 1
        decided = super().begin(buffer, current, num_generations, admission)
        if not current.long:
            self._plan_audited(buffer, current, admission)
        return decided

    def judge(self, buffer: RolloutBuffer, current: Round, is_last: bool) -> Outcome:
        """Learns from the round, and defers its unsettled groups unless its batch `is_last`."""
        done = [entry for entry in current.entries if entry.score is not None]
        own = [entry for entry in done if entry.audit_of is None]
        if current.long:
            self._learn_from_long(done, own)
            second = _seconds(buffer, current.entries)
            self._audit(buffer, second)
            left, num_deferred = [entry.entry_id for entry in second], 0
        else:
            left, num_deferred = [], self._defer(buffer, own, is_last)
        counts = {"darts/deferral/deferred": num_deferred, "darts/deferral/sampled": len(own)}
        estimates = {f"darts/audit/{name}": value for name, value in self.audits.metrics().items()}
        warning = self.learned.pop_warning() if self.defers else self.audits.pop_warning()
        return Outcome(left, counts, estimates, [] if warning is None else [warning])

    def keep(self, buffer: RolloutBuffer, surplus: Sequence[BufferEntry]) -> None:
        """Surplus groups are trained on with the next batch. Deferred prompts count the batches that they wait for."""
        for entry in buffer.select(Lifecycle.WAITING):
            entry.num_deferrals += entry.num_deferrals > 0
        self.num_rounds = 0

    # Learning

    def _learn_from_long(self, done: Sequence[BufferEntry], own: Sequence[BufferEntry]) -> None:
        rows = [row for entry in done for row in entry.candidates]
        num_uniform = sum(entry.score is not None and entry.score.is_uniform for entry in own)
        self.learned.observe_ends(sum(row.cut_off for row in rows), len(rows), num_uniform, len(own))
        for entry in own if self.learned.usual_length else ():  # else there was no short round yet
            if entry.score is not None:
                lengths = [row.length for row in entry.candidates]
                self.learned.observe_long(entry.prompt.key, entry.score.totals, lengths)

    def _defer(self, buffer: RolloutBuffer, own: Sequence[BufferEntry], is_last: bool) -> int:
        longest = max((row.length for entry in own for row in entry.candidates), default=0)
        deferred = [entry for entry in own if self.defers and not is_last and self._is_unsettled(entry)]
        self.learned.observe_short(longest, len(deferred), len(own))
        for entry in buffer.select(Lifecycle.WAITING):
            if entry.num_usual and not entry.usual_length:
                entry.usual_length = longest  # of audited prompts that would have been in this round
        for entry in deferred:
            entry.num_deferrals += 1
            begin_again(entry)
        return len(deferred)

    def _is_unsettled(self, entry: BufferEntry) -> bool:
        is_uniform = entry.score is not None and entry.score.is_uniform
        return entry.was_cut and is_uniform and self.learned.defers(entry.prompt.key, entry.entry_id)

    # Audits

    def _plan_audited(self, buffer: RolloutBuffer, current: Round, admission: AdmissionPolicy) -> None:
        """Decides how many candidates new audited prompts would have got in this round."""
        fresh = [entry.prompt for entry in current.entries if not entry.candidates]
        waiting = buffer.select(Lifecycle.WAITING)
        audited = [entry for entry in waiting if entry.audit_of is not None and not entry.num_usual]
        if audited:
            counts = admission.plan([*fresh, *(entry.prompt for entry in audited)]).num_candidates
            for entry, count in zip(audited, counts[len(fresh) :], strict=True):
                entry.num_usual = count

    def _audit(self, buffer: RolloutBuffer, seconds: Sequence[BufferEntry]) -> None:
        """Compares both samples of audited prompts with what a short round would have kept."""
        for entry in seconds:
            first = buffer.entries.get(entry.audit_of or 0)
            if first is None or first.score is None or entry.score is None or not entry.usual_length:
                continue  # a server rejected one of them, or there was no short round since they entered
            rows = [*first.candidates, *entry.candidates]
            lengths, ended = [row.length for row in rows], [not row.cut_off for row in rows]
            known = [*first.score.totals, *entry.score.totals]
            self.audits.observe(self.wait.audit(lengths, ended, known, entry.usual_length, entry.num_usual))

    def state_dict(self) -> dict[str, Any]:
        return {"long_rewards": self.learned.state_dict(), "audits": self.audits.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "long_rewards" in state:
            self.learned.load_state_dict(state["long_rewards"])
            self.audits.load_state_dict(state["audits"])


def _seconds(buffer: RolloutBuffer, entries: Sequence[BufferEntry]) -> list[BufferEntry]:
    """Returns the second entries of audited prompts that are in the buffer."""
    own = {entry.entry_id for entry in entries}
    return [entry for entry in buffer.entries.values() if entry.audit_of in own]
