"""
Protocols for the four decisions of a rollout, their implementations for GRPO and DARTS, and the table of schedules.

A published system is a choice of one object per protocol. Policies see groups and engines, but no engine API, clock or
random generator.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from ..policy import select_dual_end, select_shortest
from .tail import TailPolicy
from .types import Candidate, CandidateState, EngineLoad, Group


AUTO = "auto"
Patience = float | str | None

# The schedules with their default `selection`.
SCHEDULES = {
    "grpo": "all",
    "darts": "dual_end",
    "tail_batching": "all",
    "partial_rollout": "all",
    "sorted": "all",
}
SELECTIONS = ("dual_end", "uniform", "all")


class GroupStop(Protocol):
    """Decides when a prompt has enough candidates, and selects the rows."""

    @property
    def needs_progress(self) -> bool:
        """Whether the policy needs tokens while they are decoded, not only finished candidates."""

    @property
    def follows_batch(self) -> bool:
        """Whether a group with enough complete candidates only continues while the batch waits for other groups."""

    def surplus(self, group: Group) -> Sequence[Candidate]:
        """Returns unfinished candidates to abort. Called after each event of the group."""

    def awaited(self, group: Group) -> tuple[int, float]:
        """
        Returns how many unfinished candidates must still end, and the length at which a candidate is aborted. Only
        used with tail servers.
        """

    def select(self, group: Group) -> list[int]:
        """Returns the indices of the `num_generations` rows. Called once, when all candidates have ended."""


class BatchStop(Protocol):
    """Decides when the batch is ready. Groups without rows by then are deferred with their tokens."""

    @property
    def ends(self) -> bool:
        """Whether the rollout ends with its batch, so that it has failed once every group is dropped."""

    def ready(self, done: Set[int], dropped: Set[int], num_groups: int) -> bool:
        """Whether the `done` groups suffice. Called after each group that is done or dropped."""


class Placement(Protocol):
    """Decides in which order and on which engine candidates start."""

    def order(self, candidates: list[Candidate]) -> list[Candidate]:
        """Returns the candidates in the order of submission."""

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        """Returns an engine for the candidate, or `None` to wait for room."""

    def forget(self, group_ids: Sequence[int]) -> None:
        """Drops what is known of groups that have left a rollout without end."""


@dataclass(frozen=True)
class WaitForAll:
    """GRPO: waits for every candidate and keeps them all. `num_candidates` must equal `num_generations`."""

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
    A group with M_up candidates has a heavy-tailed history. It stops at its M-th complete candidate and keeps the
    first M.

    `long_end_patience` limits the wait for the long end. Once a group has M complete candidates, others that reach
    this multiple of the M-th shortest complete length are aborted. With `"auto"`, they continue only while the batch
    waits for another group to have M complete candidates. They then delay no step, but can slow down other candidates
    on busy engines. `None`, the paper's rule, waits for all candidates of a group that is not saturated.
    """

    num_generations: int  # M, rows of a group
    max_num_generations: int  # M_up, number of candidates of a saturated group
    num_longest: int  # L, rows taken from the longest complete candidates; the other M - L are the shortest
    tail_pruning: bool = True  # whether saturated groups stop early
    long_end_patience: Patience = None

    @property
    def _keeps_longer(self) -> bool:
        """Whether candidates longer than the M-th shortest can be kept."""
        return self.num_longest > 0

    @property
    def length_bound(self) -> float | None:
        """Length at which a candidate is aborted, in multiples of the M-th shortest complete length."""
        if not self._keeps_longer:
            return 1.0
        return None if isinstance(self.long_end_patience, str) else self.long_end_patience

    @property
    def needs_progress(self) -> bool:
        """Whether the wait is bounded by a length, so that growing lengths must be observed."""
        return self.length_bound is not None

    @property
    def follows_batch(self) -> bool:
        return self.long_end_patience == AUTO

    def saturated(self, group: Group) -> bool:
        """Whether the group is pruned at its M-th complete candidate."""
        return self.tail_pruning and group.plan.num_candidates >= self.max_num_generations

    def surplus(self, group: Group) -> Sequence[Candidate]:
        """Returns all unfinished candidates of a saturated group with M complete, or those beyond the length bound."""
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
    As [`DualEnd`], but keeps the first finished candidates by index, whatever their lengths. Without aborts, this is
    an unbiased sample of the policy. Aborts leave the shorter candidates, and that bias remains.
    """

    _keeps_longer = True  # every finished candidate can be kept

    def select(self, group: Group) -> list[int]:
        finished = [c.index for c in group.candidates if c.state is CandidateState.FINISHED]
        return finished[: self.num_generations]


@dataclass(frozen=True)
class AllGroups:
    """The batch is ready when every group has its rows; nothing is deferred."""

    ends = True

    def ready(self, done: Set[int], dropped: Set[int], num_groups: int) -> bool:
        return len(done) + len(dropped) == num_groups


@dataclass(frozen=True)
class FirstGroups:
    """The batch is ready with the first groups that have their rows; the others are deferred."""

    ends = True
    num_groups: int
    must_finish: frozenset[int] = frozenset()  # IDs of groups that must be among them

    def ready(self, done: Set[int], dropped: Set[int], num_groups: int) -> bool:
        """Whether enough groups are done or dropped, including those that must finish."""
        closed = done | dropped if self.must_finish else done
        return len(done) >= max(1, self.num_groups - len(dropped)) and self.must_finish <= closed


class LeastLoaded:
    """
    Submits prompts in the given order, each to the engine with the least work: expected tokens, or candidates if
    lengths are unknown. Ties go to the first engine.

    The candidates of a prompt go to one engine, to share its prefix cache, as long as that engine has room and no more
    than its fair share of all candidates. Further candidates of the prompt go to the engine with the least work.
    """

    def __init__(self) -> None:
        self._homes: dict[int, str] = {}  # engine of each group's last candidate
        self._num_candidates = 0

    def order(self, candidates: list[Candidate]) -> list[Candidate]:
        self._num_candidates = max(self._num_candidates, len(candidates))  # further prompts may be added
        return candidates

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        chosen, least = None, 0.0
        home = self._homes.get(candidate.group_id)
        # Called once per candidate: a plain loop is twice as fast as `min` with a key.
        for engine in engines:
            if engine.engine_id == home and engine.has_room and self._is_fair(engine, len(engines)):
                return home
            if (chosen is None or engine.expected_tokens < least) and engine.has_room:
                chosen, least = engine, engine.expected_tokens
        if chosen is None:
            return None
        self._homes[candidate.group_id] = chosen.engine_id
        return chosen.engine_id

    def forget(self, group_ids: Sequence[int]) -> None:
        for group_id in group_ids:
            self._homes.pop(group_id, None)

    def _is_fair(self, engine: EngineLoad, num_engines: int) -> bool:
        return (engine.num_running + 1) * num_engines <= self._num_candidates


@dataclass(frozen=True)
class SchedulePolicies:
    """The policies of one rollout. The defaults are those of GRPO."""

    group_stop: GroupStop = field(default_factory=WaitForAll)
    batch_stop: BatchStop = field(default_factory=AllGroups)
    placement: Placement = field(default_factory=LeastLoaded)
    tail: TailPolicy | None = None
