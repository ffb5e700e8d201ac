"""
Batches of a rollout without an end, whose weights change while it runs (`rollout_ahead="continuous"`).

```
add ──▶ groups decode ──▶ `FreshGroups.choose` ──▶ select ──▶ take ──▶ the trainer
              ▲  EngineUpdated: other weights sample the following tokens
```

Staleness is bounded by admission: prompts enter only when others were taken, and a group that would become too old is
waited for. Nothing that was sampled is thrown away.

Invariants (`tests/scheduling/test_continuous.py` checks each under its name, over random lengths, updates and losses):

- bounded: no token is more than `max_staleness` versions older than the batch that trains on it.
- in_order: of the groups that can be taken, those that entered first are.
- trained_once: each group is taken once, or dropped once.
- versions_exact: each token has the version of the weights that its engine had when it was decoded.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from .scheduler import Scheduler
from .types import Group, GroupPlan


# Prompts that have entered and are not trained on, in batches. With two, the prompts that a batch leaves behind always
# fit into a later one within the bound. With more, rows would be older.
NUM_BATCHES = 2


@dataclass(frozen=True)
class Continuous:
    """The batch stop of a rollout without an end."""

    ends = False

    def ready(self, done: Set[int], dropped: Set[int], num_groups: int) -> bool:
        return False


@dataclass(frozen=True)
class FreshGroups:
    """
    The next batch of a rollout without an end: the first `num_groups` that can be taken, and those among them whose
    oldest token is of version `due` or older, since they would be too old for the batch after this one.
    """

    num_groups: int
    due: int

    def choose(self, scheduler: Scheduler) -> list[int] | None:
        """Returns the IDs of the groups, or `None` while one must be waited for."""
        takeable = scheduler.takeable
        if len(takeable) < self.num_groups:
            return None
        due = [group.group_id for group in scheduler.ledger.groups.values() if oldest_version(group) <= self.due]
        chosen = sorted(due)[: self.num_groups]
        if not set(chosen) <= set(takeable):
            return None
        chosen += [group_id for group_id in takeable if group_id not in due][: self.num_groups - len(chosen)]
        return sorted(chosen)


@dataclass(frozen=True)
class FinishedGroups:
    """
    The next wave of a batch: the first `num_groups` that can be taken, or what is left if that is less. Dropped groups
    count. Under `long_end_patience="auto"`, groups of which no candidate decodes any more go first, so that others
    keep their long end for longer.
    """

    num_groups: int

    def choose(self, scheduler: Scheduler) -> list[int] | None:
        """Returns the IDs of the groups, or `None` while one must be waited for."""
        groups = scheduler.ledger.groups
        takeable = sorted(scheduler.takeable, key=lambda group_id: not groups[group_id].closed)
        enough = len(takeable) >= min(self.num_groups, len(groups))
        return sorted(takeable[: self.num_groups]) if enough else None


def entering(plans: Sequence[GroupPlan], submit_order: str) -> list[GroupPlan]:
    """Returns the plans of prompts that enter a rollout without an end, in the order in which they start."""
    if submit_order == "arrival":
        return list(plans)
    return sorted(plans, key=lambda plan: plan.expected_length or 0.0, reverse=submit_order == "longest")


def oldest_version(group: Group) -> float:
    """Returns the oldest version of the weights that sampled a group's tokens; infinity if it has not started."""
    return min((candidate.stamps[0][1] for candidate in group.candidates if candidate.stamps), default=float("inf"))
