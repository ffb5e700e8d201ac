"""
Tail servers: engines of another layout beside the main ones. Which candidates they decode from the start, and when
they take over what is left, is decided here; the scheduler moves the candidates.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from ..policy import TailTimes, remaining_lengths
from ..policy.tail import Array
from .ledger import RUNNING, Ledger
from .types import Candidate, EngineLoad, Group, TailSwitch


# A switch is considered at each end of the last so many candidates; before, whenever a sixteenth of them have ended.
LOOKS = 16


@dataclass(frozen=True)
class TailServers:
    """What a training knows of its tail servers. Without `times`, no switch can be predicted."""

    times: TailTimes | None = None
    max_completion_length: int = 1 << 31  # tokens
    takes_turns: bool = False  # whether they are on the main servers' GPUs, and asleep until these sleep


class TailPolicy:
    """
    The tail servers' part in one rollout.

    Args:
        servers ([`TailServers`]):
            What is known of them.
        switch_at (`int`, *optional*):
            Unfinished candidates at which what is left moves; 0 for never. By default when it is predicted to pay.
        long_groups (`Set[int]`, *optional*):
            IDs of groups that they decode from the start.
    """

    def __init__(
        self, servers: TailServers, switch_at: int | None = None, long_groups: AbstractSet[int] = frozenset()
    ) -> None:
        self.servers = servers
        self.switch_at = switch_at
        self.long_groups = long_groups
        self._next_look = math.inf  # number of unfinished candidates

    def is_due(self, num_unfinished: int, engines: Iterable[EngineLoad]) -> bool:
        """Whether `decide` should be asked with so many candidates left."""
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
        The switch, if it is time. `awaited` is the group stop's, `is_batch` says whether groups are enough for the
        trainer, and those that are `ready` have enough themselves.
        """
        num, times = ledger.num_unfinished, self.servers.times
        self._next_look = num - max(1, num // LOOKS)
        if times is None:
            return TailSwitch(num)
        main, tail = (_candidates_of(ledger, kind) for kind in (False, True))
        if not any(main):  # what is left waits for an engine
            return None
        if self.switch_at is None:
            contexts = ([_contexts(ledger, own) for own in engines] for engines in (main, tail))
            if not times.faster_now(*contexts):
                return None
        rest = self._remaining(ledger, awaited, is_batch, ready)
        work = ([(_contexts(ledger, own), _rests(own, rest)) for own in engines] for engines in (main, tail))
        forecast = times.forecast(*work)
        return TailSwitch(num, forecast) if self.switch_at is not None or forecast.pays else None

    def _remaining(
        self,
        ledger: Ledger,
        awaited: Callable[[Group], tuple[int, float]],
        is_batch: Callable[[AbstractSet[int]], bool],
        ready: AbstractSet[int],
    ) -> dict[int, float]:
        """Tokens that each running candidate will still decode, by its ID: none does once the batch is ready."""
        candidates, groups = ledger.candidates, ledger.groups
        running = [c for c in candidates if c.state is RUNNING]
        lacking = remaining_lengths(
            [c.length for c in candidates],
            [c.state is RUNNING for c in candidates],
            [c.complete for c in candidates],
            [groups[c.group_id].plan.expected_length or 1.0 for c in candidates],
            self.servers.max_completion_length,
        )
        rest = {c.candidate_id: float(tokens) for c, tokens in zip(running, lacking, strict=True)}
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
    """Tokens until the group has enough, as far as its candidates run."""
    num, bound = awaited(group)
    running = [c for c in group.unfinished if c.state is RUNNING]
    tokens = sorted(min(rest[c.candidate_id], max(1.0, bound - c.length)) for c in running)
    return tokens[min(num, len(tokens)) - 1] if num and tokens else 0.0


def _candidates_of(ledger: Ledger, tail: bool) -> list[list[Candidate]]:
    """What each engine of a kind runs."""
    own: dict[str | None, list[Candidate]] = {name: [] for name, load in ledger.engines.items() if load.tail == tail}
    for candidate in ledger.candidates:
        if candidate.state is RUNNING and candidate.engine_id in own:
            own[candidate.engine_id].append(candidate)
    return list(own.values())


def _contexts(ledger: Ledger, candidates: Sequence[Candidate]) -> Array:
    """Tokens of prompt and completion."""
    return np.array([ledger.groups[c.group_id].plan.num_prompt_tokens + c.length for c in candidates], float)


def _rests(candidates: Sequence[Candidate], rest: Mapping[int, float]) -> Array:
    return np.array([rest[c.candidate_id] for c in candidates], float)
