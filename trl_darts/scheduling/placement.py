"""
Placement over processes that each decode a part of the batch, decided before the rollout, because candidates can't be
added to a running `generate`; in an order of expected lengths; and of the turns of conversations.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .policies import LeastLoaded
from .types import Candidate, EngineLoad


def balance(counts: Sequence[int], expected_lengths: Sequence[float], num_engines: int) -> list[list[int]]:
    """
    Distributes M'_i candidates of each prompt over engines so that all are expected to end at about the same time:
    longest expected first, each to the engine with the least work. Returns the engine of each candidate.

    A prompt's candidates stay together to share its cache, unless they exceed an engine's fair share. They are then
    split into smaller parts. The heaviest parts are split further until each engine has one, if there are enough
    candidates.
    """
    lengths = known_lengths(expected_lengths)
    fair = sum(count * length for count, length in zip(counts, lengths, strict=True)) / num_engines
    # 1e-9 keeps a part whole that exceeds the fair share only by rounding.
    parts = [
        min(count, max(1, math.ceil(count * length / fair - 1e-9)))
        for count, length in zip(counts, lengths, strict=True)
    ]
    while sum(parts) < min(num_engines, sum(counts)):
        heaviest = max(
            (group for group in range(len(counts)) if parts[group] < counts[group]),
            key=lambda group: counts[group] * lengths[group] / parts[group],
        )
        parts[heaviest] += 1
    pieces = [(group, size) for group, n in enumerate(parts) for size in _split(counts[group], n)]
    pieces.sort(key=lambda piece: -piece[1] * lengths[piece[0]])  # stable: ties in the order of the batch
    engines: list[list[int]] = [[] for _ in counts]
    loads = [(0.0, engine) for engine in range(num_engines)]
    for group, size in pieces:
        load, engine = heapq.heappop(loads)
        engines[group] += [engine] * size
        heapq.heappush(loads, (load + size * lengths[group], engine))
    return engines


class LengthOrder(LeastLoaded):
    """
    Submits the longest or the shortest expected candidates first, each prompt to the engine with the least work.
    Longest first suits a rollout that waits for all prompts, shortest first one that ends with the first prompts.
    `expected_lengths` has the expected tokens of one candidate by its group's ID.
    """

    def __init__(self, expected_lengths: Mapping[int, float], longest_first: bool = True) -> None:
        super().__init__()
        self.expected_lengths = expected_lengths
        self.longest_first = longest_first

    def order(self, candidates: list[Candidate]) -> list[Candidate]:
        lengths = self.expected_lengths
        return super().order(sorted(candidates, key=lambda c: lengths[c.group_id], reverse=self.longest_first))


class AssignedPlacement(LengthOrder):
    """
    Submits each candidate to a given engine, by its group's ID and its index. Without expected lengths, the order is
    that of the batch.
    """

    def __init__(
        self,
        engine_ids: Mapping[int, Sequence[str]],
        expected_lengths: Mapping[int, float] | None = None,
        longest_first: bool = True,
    ) -> None:
        super().__init__(expected_lengths or dict.fromkeys(engine_ids, 1.0), longest_first)
        self.engine_ids = engine_ids

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        return self.engine_ids[candidate.group_id][candidate.index]


class Homes(LeastLoaded):
    """
    Sends a conversation's turns to the server that has its beginning in the prefix cache, unless that one has over
    twice as many turns as another. The ID of a turn's group is that of its conversation modulo `num_conversations`.
    """

    def __init__(self, num_conversations: int) -> None:
        super().__init__()
        self._num_conversations = num_conversations

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        free = [engine for engine in engines if engine.has_room]
        if not free:
            return None
        own = candidate.group_id % self._num_conversations
        least = min(free, key=lambda engine: engine.num_running)
        home = next((engine for engine in free if engine.engine_id == self._homes.get(own)), least)
        chosen = home if home.num_running <= 2 * least.num_running + 1 else least
        self._homes[own] = chosen.engine_id
        return chosen.engine_id

    def forget(self, group_ids: Sequence[int]) -> None:
        """Nothing: the conversation goes on."""


def known_lengths(expected_lengths: Sequence[float]) -> list[float]:
    """Returns the expected lengths, with unknown ones replaced by the mean of the known ones, or by 1."""
    lengths = np.asarray(expected_lengths, dtype=float)
    known = np.isfinite(lengths) & (lengths > 0)
    mean = lengths[known].mean() if known.any() else 1.0
    return [float(length) for length in np.where(known, lengths, mean)]


def _split(count: int, parts: int) -> list[int]:
    small, larger = divmod(count, parts)
    return [small + 1] * larger + [small] * (parts - larger)
