"""Candidates that wait for an engine, in the order in which they will be submitted."""

from collections import deque
from collections.abc import Sequence

from .events import Command
from .ledger import WAITING, Ledger
from .policies import Placement
from .types import Candidate


class SubmissionQueue:
    """
    The candidates of a rollout that wait.

    Args:
        ledger ([`Ledger`]):
            The books of the rollout.
        placement ([`Placement`]):
            Chooses their order and engines.
    """

    def __init__(self, ledger: Ledger, placement: Placement) -> None:
        self.ledger = ledger
        self.placement = placement
        self.waiting: deque[Candidate] = deque()

    def extend(self, candidates: Sequence[Candidate]) -> None:
        """Adds new candidates behind all others."""
        self.waiting.extend(self.placement.order(list(candidates)))

    def put_back(self, candidates: Sequence[Candidate], now: float) -> None:
        """They go on elsewhere from the tokens that they have, before all that has not begun."""
        for candidate in reversed(candidates):
            self.ledger.requeue(candidate, now)
            self.waiting.appendleft(candidate)

    def submit(self, now: float) -> list[Command]:
        """Submits as many as there is room for."""
        waiting = self.waiting
        if not waiting:
            return []
        commands: list[Command] = []
        engines = list(self.ledger.engines.values())
        passed: list[Candidate] = []  # that wait for an engine of their own, while others have room
        while waiting:
            candidate = waiting[0]
            if candidate.state is WAITING:
                engine_id = self.placement.choose(candidate, engines)
                if engine_id is not None:
                    commands.append(self.ledger.submit(candidate, engine_id, now))
                elif any(engine.has_room for engine in engines):
                    passed.append(candidate)
                else:
                    break
            waiting.popleft()  # submitted just now, passed over, or called off before it could be submitted
        waiting.extendleft(reversed(passed))
        return commands
