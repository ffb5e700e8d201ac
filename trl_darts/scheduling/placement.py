"""
Placement over engines that each decode a part of the batch: which process runs which candidate, decided before the
rollout, because a batch of `generate` can't be joined later.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from .policies import LeastLoaded
from .types import Candidate, EngineLoad


def balance(counts: Sequence[int], expected_lengths: Sequence[float], num_engines: int) -> list[list[int]]:
    """
    Spreads M'_i candidates of each prompt over engines so that all are expected to end at about the same time: longest
    expected first, each to the engine with the least work. Returns the engine of each candidate.

    A prompt's candidates stay together, since they share its cache, unless they are more than an engine's fair part:
    then they are cut into parts that are not. No engine stays empty if there are at least as many candidates: the
    heaviest parts are cut until there is one for each.
    """
    lengths = known_lengths(expected_lengths)
    fair = sum(count * length for count, length in zip(counts, lengths, strict=True)) / num_engines
    # The small number: a part that is fair but for rounding is one part.
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
    Longest or shortest expected first, each prompt on the engine with the least work. The longest decide when a
    rollout ends that waits for all; the shortest are what a batch is made of that is ready with the first. Expected
    tokens of one candidate are given by group, NaN where nothing is known.
    """

    def __init__(self, expected_lengths: Sequence[float], longest_first: bool = True) -> None:
        super().__init__()
        self.expected_lengths = known_lengths(expected_lengths)
        self.longest_first = longest_first

    def order(self, candidates: list[Candidate]) -> list[Candidate]:
        lengths = self.expected_lengths
        return super().order(sorted(candidates, key=lambda c: lengths[c.group_id], reverse=self.longest_first))


class AssignedPlacement(LengthOrder):
    """
    Each candidate on the engine that was chosen for it, by group and index. In the order of the batch where no lengths
    are given.
    """

    def __init__(
        self,
        engine_ids: Sequence[Sequence[str]],
        expected_lengths: Sequence[float] | None = None,
        longest_first: bool = True,
    ) -> None:
        super().__init__(expected_lengths or [1.0] * len(engine_ids), longest_first)
        self.engine_ids = engine_ids

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        return self.engine_ids[candidate.group_id][candidate.index]


def known_lengths(expected_lengths: Sequence[float]) -> list[float]:
    """Expected lengths, with the mean of those that are known (1 if none is) in the place of the others."""
    lengths = np.asarray(expected_lengths, dtype=float)
    known = np.isfinite(lengths) & (lengths > 0)
    mean = lengths[known].mean() if known.any() else 1.0
    return [float(length) for length in np.where(known, lengths, mean)]


def _split(count: int, parts: int) -> list[int]:
    small, larger = divmod(count, parts)
    return [small + 1] * larger + [small] * (parts - larger)
