"""
Tail servers are engines of another layout. This policy decides which candidates they decode from the start, and when
they take over the remaining ones. The scheduler moves the candidates.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from ..policy import TailTimes, remaining_lengths
from ..policy.forecast import Array
from .ledger import RUNNING, Ledger
from .types import Candidate, EngineLoad, Group, TailSwitch


LOOKS = 16  # a switch is considered when 1 / LOOKS of the unfinished candidates, at least one, has ended


@dataclass(frozen=True)
class TailServers:
    """Properties of the tail servers. Without `times`, no switch can be predicted."""

    times: TailTimes | None = None
    max_completion_length: int = 1 << 31  # tokens
    takes_turns: bool = False  # whether they share the main servers' GPUs, so that only one kind is awake


class TailPolicy:
    """
    Policy for the tail servers in one rollout.

    Args:
        servers ([`TailServers`]):
            Properties of the tail servers.
        switch_at (`int`, *optional*):
            Number of unfinished candidates at which the switch happens; 0 for never. By default, it happens when it is
            predicted to pay.
        long_groups (`Set[int]`, *optional*):
            IDs of groups that the tail servers decode from the start.
    """

    def __init__(
        self, servers: TailServers, switch_at: int | None = None, long_groups: AbstractSet[int] = frozenset()
    ) -> None:
        self.servers = servers
        self.switch_at = switch_at
        self.long_groups = long_groups
        self._next_look = math.inf  # number of unfinished candidates

    def is_due(self, num_unfinished: int, engines: Iterable[EngineLoad]) -> bool:
        """Whether to call `decide` with this number of unfinished candidates."""
        threshold: float = self._next_look if self.servers.times is not None else 0
        if self.switch_at is not None:
            threshold = self.switch_at
        if not 0 < num_unfinished <= threshold:
            return False
        return any(engine.tail and (engine.has_room or self.servers.takes_turns) for engine in engines)

    def decide(
        self,
        ledger: Ledger,
        awaited: Callable[[Group], tuple[int, float]],
        is_batch: Callable[[AbstractSet[int]], bool],
        ready: AbstractSet[int],
    ) -> TailSwitch | None:
        """
        Returns the switch, or `None` if it is not time. `awaited` is the group stop's method. `is_batch` tells whether
        a set of groups completes the batch. The `ready` groups have enough candidates.
        """
        num, times = ledger.num_unfinished, self.servers.times
        self._next_look = num - max(1, num // LOOKS)
        if times is None:
            return TailSwitch(num)
        main, tail = (_candidates_of(ledger, kind) for kind in (False, True))
        if not any(main):  # the unfinished candidates wait for an engine
            return None
        if self.switch_at is None:
            contexts = ([_contexts(ledger, running) for running in engines] for engines in (main, tail))
            if not times.faster_now(*contexts):
                return None
        rest = self._remaining(ledger, awaited, is_batch, ready)
        work = ([(_contexts(ledger, running), _rests(running, rest)) for running in kind] for kind in (main, tail))
        forecast = times.forecast(*work)
        return TailSwitch(num, forecast) if self.switch_at is not None or forecast.pays else None

    def _remaining(
        self,
        ledger: Ledger,
        awaited: Callable[[Group], tuple[int, float]],
        is_batch: Callable[[AbstractSet[int]], bool],
        ready: AbstractSet[int],
    ) -> dict[int, float]:
        """Returns the tokens that each running candidate will decode until the batch is ready, by its ID."""
        candidates, groups = ledger.candidates, ledger.groups
        running = [c for c in candidates if c.state is RUNNING]
        lengths = remaining_lengths(
            [c.length for c in candidates],
            [c.state is RUNNING for c in candidates],
            [c.complete for c in candidates],
            [groups[c.group_id].plan.expected_length or 1.0 for c in candidates],
            self.servers.max_completion_length,
        )
        rest = {c.candidate_id: float(tokens) for c, tokens in zip(running, lengths, strict=True)}
        steps = {
            group_id: _steps_left(group, awaited, rest)
            for group_id, group in groups.items()
            if group_id not in ready and not group.closed
        }
        done, end = set(ready), math.inf
        for group_id in sorted(steps, key=steps.__getitem__):
            done.add(group_id)
            if is_batch(done):
                end = steps[group_id]
                break
        return {candidate_id: min(tokens, end) for candidate_id, tokens in rest.items()}


def _steps_left(group: Group, awaited: Callable[[Group], tuple[int, float]], rest: Mapping[int, float]) -> float:
    """Returns the decoding steps until the group has enough complete candidates, by its running ones."""
    num, bound = awaited(group)
    running = [c for c in group.unfinished if c.state is RUNNING]
    tokens = sorted(min(rest[c.candidate_id], max(1.0, bound - c.length)) for c in running)
    return tokens[min(num, len(tokens)) - 1] if num and tokens else 0.0


def _candidates_of(ledger: Ledger, tail: bool) -> list[list[Candidate]]:
    """Returns the running candidates of each main or tail engine."""
    found: dict[str | None, list[Candidate]] = {name: [] for name, load in ledger.engines.items() if load.tail == tail}
    for candidate in ledger.candidates:
        if candidate.state is RUNNING and candidate.engine_id in found:
            found[candidate.engine_id].append(candidate)
    return list(found.values())


def _contexts(ledger: Ledger, candidates: Sequence[Candidate]) -> Array:
    """Returns the tokens of prompt and completion of each candidate."""
    return np.array([ledger.groups[c.group_id].plan.num_prompt_tokens + c.length for c in candidates], float)


def _rests(candidates: Sequence[Candidate], rest: Mapping[int, float]) -> Array:
    return np.array([rest[c.candidate_id] for c in candidates], float)
