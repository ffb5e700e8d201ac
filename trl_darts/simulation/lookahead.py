"""
Steps of the schedules whose batches are not the loader's: rounds over a buffer of prompts, within an epoch.

```
loader ──batches──▶ RolloutBuffer ──Round──▶ rollout ──▶ absorb ──▶ rows of this step
                        ▲                                  │
                        └────── deferred, with or without their tokens
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import TypeAlias

from ..scheduling import (
    Admission,
    AdmissionPolicy,
    BatchStop,
    BufferEntry,
    GroupPlan,
    GroupSummary,
    Harvest,
    Occupancy,
    PromptInfo,
    RolloutResult,
    Round,
    RoundPolicy,
    ScheduleSettings,
)
from .draws import BatchLengths
from .steps import StepOutcome


Rollout: TypeAlias = Callable[[Admission, list[GroupPlan], list[list[int]], BatchStop], RolloutResult]


class EpochOfRounds:
    """
    One epoch. It begins and ends with an empty buffer, so that a prompt is in it once, and the policies' versions
    count from its first step.

    Args:
        rounds ([`RoundPolicy`]):
            Decides which prompts go into a rollout.
        settings ([`ScheduleSettings`]):
            Of the schedule.
        admission ([`AdmissionPolicy`]):
            Decides how many candidates a prompt gets.
        rollout (`Callable`):
            Runs a rollout.
        prompt_tokens (`int`):
            Length of each prompt.
        redraws (`bool`):
            Whether a candidate that begins anew gets a new length.
    """

    def __init__(
        self,
        rounds: RoundPolicy,
        settings: ScheduleSettings,
        admission: AdmissionPolicy,
        rollout: Rollout,
        prompt_tokens: int,
        redraws: bool,
    ) -> None:
        self.rounds = rounds
        self.settings = settings
        self.admission = admission
        self.rollout = rollout
        self.prompt_tokens = prompt_tokens
        self.buffer = rounds.buffer()
        self.redraws = redraws and not self.buffer.keeps_tokens
        self.version = 0
        self._places: dict[int, tuple[BatchLengths, int]] = {}  # of an entry: its batch, and its place in it
        self._lengths: dict[int, list[int]] = {}  # of an entry's candidates
        self._begun: dict[int, int] = {}  # the version that first sampled for an entry

    def steps(self, batches: Iterator[BatchLengths], log_shift: Callable[[], float]) -> Iterator[StepOutcome]:
        """
        One step per batch of the loader.

        Args:
            batches (`Iterator[BatchLengths]`):
                The loader's.
            log_shift (`Callable`):
                What training has done to all log-lengths by now.
        """
        for self.version in count():
            while self.rounds.lacking(self.buffer):
                batch = next(batches, None)
                if batch is None:
                    break
                ids = self.buffer.enter(PromptInfo(int(prompt), self.prompt_tokens) for prompt in batch.prompts)
                self._places.update((entry_id, (batch, place)) for place, entry_id in enumerate(ids))
            if not len(self.buffer):
                return
            yield self._round(self.rounds.next(self.buffer), log_shift())

    def _round(self, plan: Round, log_shift: float) -> StepOutcome:
        buffer, result, saturated = self.buffer, None, 0
        if plan.entries:
            admission, plans = buffer.begin(plan, self.settings.num_generations, self.admission)
            lengths = [self._lengths_of(entry, log_shift) for entry in plan.entries]
            result, saturated = self.rollout(admission, plans, lengths, plan.batch_stop), admission.saturated
        return self._outcome(result, buffer.absorb(plan, result, self.version), saturated)

    def _lengths_of(self, entry: BufferEntry, log_shift: float) -> list[int]:
        """Those that it began with, where it goes on."""
        if not entry.candidates:
            batch, place = self._places[entry.entry_id]
            attempt = entry.num_deferrals if self.redraws else 0
            num_candidates = self.settings.max_num_generations
            self._lengths[entry.entry_id] = batch.of(place, num_candidates, attempt, log_shift)
            self._begun.setdefault(entry.entry_id, self.version)
        return self._lengths[entry.entry_id]

    def _outcome(self, result: RolloutResult | None, harvest: Harvest, saturated: int) -> StepOutcome:
        rows = [row for group in harvest.groups for row in group.rows]
        settled = [GroupSummary.of(group) for group in (result.groups if result else [])]
        deferred = [GroupSummary.of(group) for group in (result.deferred if result else [])]
        ids = [group.entry.entry_id for group in harvest.groups]
        longest_wait = self.version - min(self._begun[entry_id] for entry_id in ids)
        for entry_id in ids:
            del self._places[entry_id], self._lengths[entry_id], self._begun[entry_id]
        return StepOutcome(
            settled,
            deferred,
            settled if self.buffer.keeps_tokens else [*settled, *deferred],
            [(row.length, row.partial.finish_reason) for row in rows],
            Occupancy.of(result) if result else Occupancy(0, 0.0, 0.0),
            saturated,
            sum(num for row in rows for version, num in row.versions if version != self.version),
            sum(c.length for entry in self.buffer.entries.values() for c in entry.candidates),
            longest_wait,
        )
