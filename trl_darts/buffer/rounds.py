"""
Which prompts go into the next rollout, and how many of them the trainer waits for: the schedules whose batches are not
the loader's, and any with `rollout_ahead`, `drop_uniform_groups` or `skip_uniform_prompts`.

| schedule | started | ends with | the others |
|---|---|---|---|
| the loader's batches, ahead | the next N | all N | – |
| continuous | as many as one batch left room for | the first N, and those that are too old | go on |
| dropping uniform groups | as many as N with a spread of rewards may take | all | – |
| tail batching, short round | N' > N new prompts | the first N | wait for a long round, and begin anew |
| tail batching, long round | the N that wait longest | all N | – |
| partial rollout | N', those in flight first | the first N, and those that are too old | go on with their tokens |
| sorted | n·N, no new ones until all are used | the first N | begin anew, or go on with their tokens |

A policy owns what it learns, and `state_dict` has it: a restored one goes on as the saved one would have. Groups that
wait for long rounds are in `deferral.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..scheduling import ScheduleSettings
from .buffer import BufferEntry, Lifecycle, RolloutBuffer, Round
from .deferral import Deferral
from .round_policy import Outcome, RoundPolicy


SHARE_EMA = 0.98  # of `informative_share`, per group: half of it is of the last 34


@dataclass
class Ahead(RoundPolicy):
    """The loader's prompts, one batch after the other, for `rollout_ahead` and `skip_uniform_prompts`."""

    def lacking(self, buffer: RolloutBuffer) -> int:
        return max(0, self.num_groups - len(buffer))

    def next(self, buffer: RolloutBuffer) -> Round:
        entries = buffer.select(Lifecycle.WAITING)[: self.num_groups]
        return Round(entries, self.num_groups, len(entries))


@dataclass
class ContinuousRounds(RoundPolicy):
    """As many prompts under way as may be, for `rollout_ahead="continuous"`."""

    # At any other time than a batch is taken, no prompt is in flight.
    shown_states: ClassVar[tuple[str, ...]] = ("waiting", "in_flight")

    num_under_way: int

    def lacking(self, buffer: RolloutBuffer) -> int:
        return max(0, self.num_under_way - len(buffer))

    def next(self, buffer: RolloutBuffer) -> Round:
        room = self.num_under_way - len(buffer.select(Lifecycle.IN_FLIGHT))
        entries = buffer.select(Lifecycle.WAITING)[: max(0, room)]
        return Round(entries, self.num_groups, len(entries))


@dataclass
class DynamicSampling(RoundPolicy):
    """
    Groups whose rewards are all equal leave, and further prompts come in their place (DAPO, Section 3.2). A batch
    takes several rounds where too many left; each starts as many prompts as are likely to be enough.
    """

    scores_first: ClassVar[bool] = True

    max_oversampling: float  # prompts sampled for a batch, over N, at most
    num_uniform: int = field(default=0, init=False)  # prompts of the batch to come that have left for their rewards
    informative_share: float = field(default=1.0, init=False)  # of the latest groups, those with a spread of rewards

    def lacking(self, buffer: RolloutBuffer) -> int:
        return max(0, self._num_started(buffer) - len(buffer.select(Lifecycle.WAITING)))

    def next(self, buffer: RolloutBuffer) -> Round:
        entries = buffer.select(Lifecycle.WAITING)[: self._num_started(buffer)]
        return Round(entries, self.num_groups, len(entries))

    def _num_started(self, buffer: RolloutBuffer) -> int:
        num_complete = len(buffer.select(Lifecycle.COMPLETE))
        missing = max(0, self.num_groups - num_complete)
        likely = num_likely_enough(missing, max(self.informative_share, 1 / self.max_oversampling))
        left = math.floor(self.max_oversampling * self.num_groups) - self.num_uniform - num_complete
        return max(0, min(likely, left))

    def judge(self, buffer: RolloutBuffer, current: Round, is_last: bool) -> Outcome:
        done = [entry for entry in current.entries if entry.score is not None]
        if not done:
            return Outcome()
        uniform = [entry.entry_id for entry in done if entry.score and entry.score.is_uniform]
        self.drop(buffer, uniform, len(done))
        counts = {
            "darts/uniform/rounds": 1,
            "darts/uniform/sampled": len(done),
            "darts/uniform/dropped": len(uniform),
        }
        return Outcome(uniform, counts)

    def drop(self, buffer: RolloutBuffer, entry_ids: Sequence[int], num_scored: int) -> None:
        """Removes what teaches nothing, of so many complete prompts whose rewards are known now."""
        buffer.remove(entry_ids)
        self.num_uniform += len(entry_ids)
        weight = SHARE_EMA**num_scored
        self.informative_share = weight * self.informative_share + (1 - weight) * (1 - len(entry_ids) / num_scored)

    def keep(self, buffer: RolloutBuffer, surplus: Sequence[BufferEntry]) -> None:
        super().keep(buffer, surplus)
        self.num_uniform = 0

    def none_left(self, num_dropped: int) -> str:
        return (
            f"`drop_uniform_groups` (True) leaves nothing to train on: of {num_dropped + self.num_uniform} prompts "
            "that were sampled for this batch, none has rewards with a spread. Look at the rewards: a function that "
            "gives every answer the same teaches nothing. Or raise `max_prompt_oversampling`."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"informative_share": self.informative_share}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.informative_share = state.get("informative_share", self.informative_share)


@dataclass
class TailBatching(RoundPolicy):
    """
    Short rounds that leave their slowest prompts to a long one (RollPacker;
    [DARTS](https://huggingface.co/papers/2605.30859), Appendix H). On-policy: what was sampled for a prompt that is
    deferred is thrown away.
    """

    has_long_rounds: ClassVar[bool] = True

    oversampling: float  # N' / N of short rounds, above 1

    def lacking(self, buffer: RolloutBuffer) -> int:
        """Up to N' that were never deferred; none before a long round."""
        new, deferred = buffer.by_age()
        size = self.num_groups
        return 0 if len(deferred) >= size else max(0, _num_started(self.oversampling, size) - len(new))

    def next(self, buffer: RolloutBuffer) -> Round:
        """A long round once N are deferred. At the end of an epoch, deferred ones fill up the last batches."""
        new, deferred = buffer.by_age()
        size = self.num_groups
        if len(deferred) >= size:
            return Round(deferred[:size], size, size, long=True)
        entries = new[: _num_started(self.oversampling, size)]
        entries += deferred[: max(0, size - len(entries))]
        return Round(entries, size, min(size, len(entries)))


@dataclass
class PartialRollout(RoundPolicy):
    """
    A constant number of prompts in flight; what is unfinished when the batch is ready goes on in the next rollout,
    under the new weights (Kimi k1.5, APRIL).
    """

    oversampling: float  # N' / N, prompts in flight over prompts per batch, above 1
    max_age: int  # rollouts that may end without a prompt: the next one waits for it

    def buffer(self) -> RolloutBuffer:
        return RolloutBuffer(keeps_tokens=True)

    def lacking(self, buffer: RolloutBuffer) -> int:
        return max(0, _num_started(self.oversampling, self.num_groups) - len(buffer))

    def next(self, buffer: RolloutBuffer) -> Round:
        num_complete = len(buffer.select(Lifecycle.COMPLETE))
        missing = self.num_groups - num_complete
        if missing <= 0:
            return Round([], self.num_groups, 0)
        in_flight = buffer.select(Lifecycle.PARTIAL)
        room = _num_started(self.oversampling, self.num_groups) - num_complete - len(in_flight)
        entries = in_flight + buffer.select(Lifecycle.WAITING)[: max(0, room)]
        old = frozenset(entry.entry_id for entry in entries if entry.num_deferrals >= self.max_age)
        return Round(entries, self.num_groups, min(missing, len(entries)), must_finish=old)


@dataclass
class Sorted(RoundPolicy):
    """
    SortedRL: n batches of prompts enter together, and each optimizer step takes those that finish first (SortedRL,
    Section 3.1). Responses of similar length so come together, and the engines' queues stay full. The rest is begun
    anew, or goes on with its tokens (Section 3.2).
    """

    num_batches: int  # n, batches that enter together
    keeps_tokens: bool

    def buffer(self) -> RolloutBuffer:
        return RolloutBuffer(self.keeps_tokens)

    def order(self, entry: BufferEntry) -> float:
        """The shortest are trained on first."""
        return entry.mean_length

    def lacking(self, buffer: RolloutBuffer) -> int:
        """n batches once all are used; before that, none."""
        return max(0, self._num_wanted(buffer) - len(buffer))

    def next(self, buffer: RolloutBuffer) -> Round:
        """What is left of the n batches, or the next n."""
        used = self._in_use(buffer)
        new = [entry for entry in buffer.select(Lifecycle.WAITING) if not entry.num_deferrals]
        entries = [entry for entry in used if entry.state is not Lifecycle.COMPLETE]
        entries += new[: max(0, self._num_wanted(buffer) - len(used))]
        missing = self.num_groups - len(buffer.select(Lifecycle.COMPLETE))
        if missing <= 0:
            return Round([], self.num_groups, 0)
        return Round(entries, self.num_groups, min(missing, len(entries)))

    def _num_wanted(self, buffer: RolloutBuffer) -> int:
        """Prompts in the buffer: n batches at the beginning, and one at the end of their use."""
        return self.num_groups if self._in_use(buffer) else self.num_groups * self.num_batches

    def _in_use(self, buffer: RolloutBuffer) -> list[BufferEntry]:
        """Those that were in a rollout."""
        return [e for e in buffer.entries.values() if e.num_deferrals or e.state is not Lifecycle.WAITING]


def _num_started(oversampling: float, num_groups: int) -> int:
    """N'; the small number, so that 1.1 × 10 is 11."""
    return math.ceil(oversampling * num_groups - 1e-9)


def num_likely_enough(num_groups: int, share: float) -> int:
    """
    Prompts to start where each has a spread with the probability `share`, for `num_groups` and a standard deviation
    more: a few prompts more cost less than the tail of another round, which half of the batches would have without.
    """
    if num_groups == 0:
        return 0
    deviation = math.sqrt(share * (1 - share))  # of one prompt
    return round(((deviation + math.sqrt(deviation**2 + 4 * share * num_groups)) / (2 * share)) ** 2)


def round_policy(settings: ScheduleSettings, num_groups: int) -> RoundPolicy | None:
    """Returns the policy of a schedule, for batches of `num_groups` prompts; `None` where batches are the loader's."""
    if settings.schedule == "tail_batching":
        return TailBatching(num_groups, settings.prompt_oversampling or 0.0)
    if settings.schedule == "partial_rollout":
        return PartialRollout(num_groups, settings.prompt_oversampling or 0.0, settings.max_partial_age or 0)
    if settings.schedule == "sorted":
        return Sorted(num_groups, settings.sorted_group_batches or 0, settings.keeps_tokens)
    if settings.scores_early:
        return Deferral(num_groups, settings.bounded_wait, settings.defers_groups, settings.audit_share)
    if settings.is_continuous:
        return ContinuousRounds(num_groups, settings.num_under_way(num_groups))
    if settings.drop_uniform_groups:
        return DynamicSampling(num_groups, settings.max_prompt_oversampling or 0.0)
    return Ahead(num_groups) if settings.rollout_ahead or settings.skip_uniform_prompts else None
