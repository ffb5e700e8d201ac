"""
The four decisions of a rollout as protocols, the ones that GRPO and DARTS make, and the table of schedules.

A system of the literature is a choice of one object per protocol. Policies see groups and engines, never an engine's
API, a clock or a random generator of their own.
"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import ConfigurationError, did_you_mean
from ..policy import select_dual_end, select_shortest
from .tail import TailPolicy
from .types import Candidate, CandidateState, EngineLoad, Group


AUTO = "auto"
Patience = float | str | None

# The schedules, and what each keeps of a prompt's candidates unless `selection` says something else.
SCHEDULES = {
    "grpo": "all",
    "darts": "dual_end",
    "tail_batching": "all",
    "partial_rollout": "all",
    "sorted": "all",
}
SELECTIONS = ("dual_end", "uniform", "all")


class GroupStop(Protocol):
    """When has a prompt enough, and which of its candidates are kept?"""

    @property
    def needs_progress(self) -> bool:
        """Whether it must see tokens while they are decoded, not only ends."""

    @property
    def follows_batch(self) -> bool:
        """Whether a group with enough complete candidates goes on only as long as the batch waits for other groups."""

    def surplus(self, group: Group) -> Sequence[Candidate]:
        """Unfinished candidates that are not worth waiting for any more. Called after each event of the group."""

    def awaited(self, group: Group) -> tuple[int, float]:
        """
        How many of its unfinished candidates must end before the group has enough, and the length beyond which none is
        waited for. Only asked where tail servers take over.
        """

    def select(self, group: Group) -> list[int]:
        """Indices of the `num_generations` rows. Called once, when no candidate of the group is unfinished."""


class BatchStop(Protocol):
    """When does the trainer get its batch? Groups that are not settled then are deferred with what they have."""

    def ready(self, done: Set[int], dropped: Set[int], num_groups: int) -> bool:
        """Whether these groups, of all, are enough. Called after each that is done, or can't be completed."""


class Placement(Protocol):
    """In which order do candidates start, and on which engine?"""

    def order(self, candidates: list[Candidate]) -> list[Candidate]:
        """The order of submission."""

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        """An engine for the candidate; `None` to let it wait for room."""


@dataclass(frozen=True)
class WaitForAll:
    """GRPO: every candidate is waited for and kept. `num_candidates` must equal `num_generations`."""

    needs_progress = False
    follows_batch = False

    def surplus(self, group: Group) -> Sequence[Candidate]:
        return ()

    def awaited(self, group: Group) -> tuple[int, float]:
        return group.num_unfinished, math.inf

    def select(self, group: Group) -> list[int]:
        return list(range(len(group.candidates)))


@dataclass(frozen=True)
class DualEnd:
    """
    DARTS: dual-end sampling with variance-guided tail pruning and proactive early stopping
    ([DARTS](https://huggingface.co/papers/2605.30859), Algorithm 2, Sections 4.1.2 and 4.3.1).

    A group with fewer than M_up candidates waits for all of them and keeps the shortest and the longest complete ones.
    A group at M_up is one whose history is known to be heavy-tailed: it stops at its M-th complete candidate and keeps
    those.

    `long_end_patience` bounds the wait for the long end. Once a group has M complete candidates, those that reach this
    many times the M-th shortest complete length are aborted. With `"auto"` they go on as long as the batch waits for
    another group to have M, and no longer: no step waits for them, but where engines are full or each candidate costs,
    they still slow the others. `None`, the paper's rule, waits for the whole pool of a group that is not saturated.
    """

    num_generations: int  # M, the rows that a group yields
    max_num_generations: int  # M_up, the candidates at which a group is saturated
    num_longest: int  # L, the rows that are the longest complete candidates; the other M - L are the shortest
    tail_pruning: bool = True  # whether saturated groups stop early
    long_end_patience: Patience = None

    @property
    def _keeps_longer(self) -> bool:
        """Whether candidates can be kept that are longer than the M-th shortest."""
        return self.num_longest > 0

    @property
    def length_bound(self) -> float | None:
        """In multiples of the M-th shortest complete length: from there on, a candidate is not waited for."""
        if not self._keeps_longer:
            return 1.0
        return None if isinstance(self.long_end_patience, str) else self.long_end_patience

    @property
    def needs_progress(self) -> bool:
        """Only a wait that is bounded by a length must see lengths grow."""
        return self.length_bound is not None

    @property
    def follows_batch(self) -> bool:
        return self.long_end_patience == AUTO

    def saturated(self, group: Group) -> bool:
        """Whether the group is pruned at its M-th complete candidate."""
        return self.tail_pruning and group.plan.num_candidates >= self.max_num_generations

    def surplus(self, group: Group) -> Sequence[Candidate]:
        """All unfinished ones of a saturated group with M complete, or those beyond the bounded wait."""
        if group.num_complete < self.num_generations or not group.num_unfinished:
            return ()
        if self.saturated(group):
            return group.unfinished
        if self.length_bound is None:
            return ()
        bound = self.length_bound * group.complete_lengths[self.num_generations - 1]
        return [c for c in group.unfinished if c.length >= bound]

    def awaited(self, group: Group) -> tuple[int, float]:
        missing = max(0, self.num_generations - group.num_complete)
        if self.saturated(group) or self.follows_batch or self.length_bound == 1.0:
            return min(missing, group.num_unfinished), math.inf
        if self.length_bound is None or missing:
            return group.num_unfinished, math.inf
        return group.num_unfinished, self.length_bound * group.complete_lengths[self.num_generations - 1]

    def select(self, group: Group) -> list[int]:
        lengths = [len(c.tokens) for c in group.candidates]
        complete = [c.complete for c in group.candidates]
        if self.saturated(group):
            return select_shortest(lengths, complete, self.num_generations)
        return select_dual_end(lengths, complete, self.num_generations - self.num_longest, self.num_longest)


@dataclass(frozen=True)
class UniformPool(DualEnd):
    """
    As [`DualEnd`], but which candidates are kept does not depend on their lengths: of those that were not aborted,
    the first ones by index. Where nothing is aborted, that is an unbiased sample of the policy. Otherwise those that
    are left are the shorter ones, and that bias remains.
    """

    _keeps_longer = True  # whatever came to an end can be kept

    def select(self, group: Group) -> list[int]:
        finished = [c.index for c in group.candidates if c.state is CandidateState.FINISHED]
        return finished[: self.num_generations]


@dataclass(frozen=True)
class AllGroups:
    """The batch is ready when every group is settled; nothing is deferred."""

    def ready(self, done: Set[int], dropped: Set[int], num_groups: int) -> bool:
        return len(done) + len(dropped) == num_groups


@dataclass(frozen=True)
class FirstGroups:
    """The batch is ready with the first groups that are settled; the others are deferred."""

    num_groups: int
    must_finish: frozenset[int] = frozenset()  # IDs of groups that must be among them, however long they take

    def ready(self, done: Set[int], dropped: Set[int], num_groups: int) -> bool:
        """Dropped groups count, and need not finish."""
        closed = done | dropped if self.must_finish else done
        return len(done) >= max(1, self.num_groups - len(dropped)) and self.must_finish <= closed


class LeastLoaded:
    """
    In the order given, each prompt on the engine with the least work: expected tokens, or candidates where nothing is
    known of their lengths. Ties go to the first engine.

    The candidates of a prompt go to one engine, whose prefix cache then has it, as long as that one has room and no
    more than its fair part of the candidates. The others of the prompt go where there is least to do.
    """

    def __init__(self) -> None:
        self._homes: dict[int, str] = {}  # the engine of each group's last candidate
        self._num_candidates = 0

    def order(self, candidates: list[Candidate]) -> list[Candidate]:
        self._num_candidates = len(candidates)
        return candidates

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        chosen, least = None, 0.0
        home = self._homes.get(candidate.group_id)
        # Called once per candidate: a plain loop is twice as fast as `min` with a key, and few are asked for room.
        for engine in engines:
            if engine.engine_id == home and engine.has_room and self._is_fair(engine, len(engines)):
                return home
            if (chosen is None or engine.expected_tokens < least) and engine.has_room:
                chosen, least = engine, engine.expected_tokens
        if chosen is None:
            return None
        self._homes[candidate.group_id] = chosen.engine_id
        return chosen.engine_id

    def _is_fair(self, engine: EngineLoad, num_engines: int) -> bool:
        return (engine.num_running + 1) * num_engines <= self._num_candidates


@dataclass(frozen=True)
class SchedulePolicies:
    """The decisions of one rollout, one object each; the defaults are those of GRPO."""

    group_stop: GroupStop = field(default_factory=WaitForAll)
    batch_stop: BatchStop = field(default_factory=AllGroups)
    placement: Placement = field(default_factory=LeastLoaded)
    tail: TailPolicy | None = None


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """[`ConfigurationError`] unless a setting is one of its choices."""
    if value not in (choices := list(choices)):
        raise ConfigurationError(
            f"`{name}` ({value!r}) must be one of {', '.join(map(repr, choices))}.{did_you_mean(value, choices)}"
        )


def make_policies(
    schedule: str,
    num_generations: int,
    max_num_generations: int,
    num_longest: int,
    tail_pruning: bool = True,
    long_end_patience: Patience = None,
    selection: str | None = None,
    batch_stop: BatchStop | None = None,
    placement: Placement | None = None,
    tail: TailPolicy | None = None,
) -> SchedulePolicies:
    """
    The policies of a schedule within one rollout. The arguments are those of [`ScheduleSettings`] of the same names,
    but that `long_end_patience` is the paper's by default. Which prompts go into the rollout, and how many of them it
    waits for, is the business of the schedule's [`RoundPolicy`].
    """
    check_choice("schedule", schedule, SCHEDULES)
    selection = selection or SCHEDULES[schedule]
    check_choice("selection", selection, SELECTIONS)
    stop: GroupStop = WaitForAll()
    if selection != "all":
        kind = DualEnd if selection == "dual_end" else UniformPool
        stop = kind(num_generations, max_num_generations, num_longest, tail_pruning, long_end_patience)
    return SchedulePolicies(stop, batch_stop or AllGroups(), placement or LeastLoaded(), tail)
