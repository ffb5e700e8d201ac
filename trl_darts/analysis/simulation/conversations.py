"""
A rollout of conversations in virtual time: between two turns, a candidate waits for its tool and is on no engine.

```
engine ──turn──▶ tool, for its seconds ──▶ the same engine's queue ──turn──▶ …
```

Invariants: a conversation decodes as many tokens as it would without tools; alone on an engine, it takes longer by the
seconds of its tools.
"""

import math
from bisect import insort
from collections.abc import Callable
from typing import Any

from ...scheduling import Submit
from .cluster import VirtualRollout
from .virtual_engine import SimulatedEngine, SimulatedSequence
from .workload import Calls


class VirtualConversations(VirtualRollout):
    """A rollout whose candidates call tools. `calls_of` takes a group, a candidate's place in it, and its length."""

    def __init__(self, *args: Any, calls_of: Callable[[int, int, int], Calls]) -> None:
        super().__init__(*args)
        self.calls_of = calls_of
        self.calls: dict[int, Calls] = {}  # that are still to come, by candidate
        self.totals: dict[int, int] = {}  # tokens, by candidate
        self.acting: list[tuple[float, int, SimulatedSequence]] = []  # sorted by the time at which a tool answers
        self.times.append(math.inf)  # of the tools' next answer

    def _step(self, now: float) -> None:
        if self.times.index(now) < len(self.engines):
            super()._step(now)
            return
        _, _, sequence = self.acting.pop(0)
        self.times[-1] = self.acting[0][0] if self.acting else math.inf
        if sequence.alive:
            index = int(sequence.command.engine_id)
            engine = self.engines[index]
            engine.advance(now)
            engine.waiting.append(sequence)
            engine.admit()
            self.times[index] = engine.next_time()

    def _decoded(self, engine: SimulatedEngine, sequence: SimulatedSequence, now: float) -> None:
        """Calls a tool after a turn."""
        calls = self.calls[sequence.command.candidate_id]
        if not calls:
            super()._decoded(engine, sequence, now)
            return
        length, seconds = calls.pop(0)
        engine.leave(sequence, length)
        sequence.alive = True  # it returns
        sequence.length = sequence.cached = length
        sequence.remaining = self._end_of_turn(sequence) - length
        insort(self.acting, (now + seconds, sequence.command.candidate_id, sequence))
        self.times[-1] = self.acting[0][0]
        self._report(sequence, length, now)

    def _is_complete(self, sequence: SimulatedSequence, length: int) -> bool:
        return not self.calls[sequence.command.candidate_id] and super()._is_complete(sequence, length)

    def _sequence(self, command: Submit) -> SimulatedSequence:
        sequence, key = super()._sequence(command), command.candidate_id
        self.totals[key] = sequence.length + sequence.remaining
        self.calls[key] = self.calls_of(command.group_id, command.index, self.totals[key])
        sequence.remaining = self._end_of_turn(sequence) - sequence.length
        return sequence

    def _end_of_turn(self, sequence: SimulatedSequence) -> int:
        """Returns the tokens of a conversation at the end of its next turn."""
        key = sequence.command.candidate_id
        return self.calls[key][0][0] if self.calls[key] else self.totals[key]
