"""
Candidates that are whole conversations. Each is played by what leads it, and the scheduler of a rollout decides which
ones are waited for:

```
Submit ──▶ turn ─▶ tools ─▶ turn ─▶ … ──▶ TokensArrived, CandidateEnded
Abort  ──▶ its turn is aborted, or its tool's answer not waited for
```

To the scheduler, a candidate's tokens are those that the model decoded, over all turns. What waits for tools runs, and
holds no slot of a server. Conversations are led by TRL's loop (`tool_candidates.py`) or by a coroutine
(`sessions.py`).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from ..errors import ConfigurationError, EnvironmentLost, GenerationError
from ..scheduling import (
    Abort,
    CandidateEnded,
    CandidateErred,
    CandidateFailed,
    Command,
    EngineLoad,
    FinishReason,
    GroupPlan,
    RolloutResult,
    Scheduler,
    Submit,
    TokensArrived,
)
from ..scheduling.ledger import Ledger
from .conversations import POLL_S, Over, Turn, Turns
from .environments import MAX_LOSSES
from .rows import Tokens


# Conversations at once, each of which may have a thread. Others wait until one has ended.
MOST = 2048


class RowPrompts(Protocol):
    """Prompts of all rows."""

    @property
    def rows(self) -> list[Tokens]:
        """Tokens of each row's prompt."""

    @property
    def num_generations(self) -> int:
        """Rows of a group."""

    def row_of(self, group_id: int, index: int) -> int:
        """Returns the row with the prompt of a group's candidate."""


@dataclass
class Played:
    """What became of a candidate."""

    tokens: Turn  # that `_generate_single_turn` returns: of the first turn with TRL's loop, otherwise of all
    outcome: Any  # of TRL's loop with this row alone, or of the coroutine
    num_turns: int
    acting_s: float  # seconds between its turns
    environment: Any = None  # on which it acted


@dataclass
class Player:
    """A candidate that is being played."""

    candidate_id: int
    segment: int
    row: int
    is_first: bool  # in the environment that TRL has reset for the row
    over: threading.Event = field(default_factory=threading.Event)
    num_tokens: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.candidate_id, self.segment


P = TypeVar("P", bound=Player)


class CandidateRun(ABC, Generic[P]):
    """
    A rollout whose candidates are conversations. Its public methods are called in the main thread.

    Args:
        turns (`Turns`):
            What decodes.
        prompts (`PromptBatch`):
            Prompts of all rows.
        most (`int`, *optional*):
            Most conversations at once, see `max_concurrent_conversations`.
    """

    player_class: type[P]

    def __init__(self, turns: Turns, prompts: RowPrompts, most: int | None) -> None:
        self._most_open = MOST if most is None else min(most, MOST)
        self._turns = turns
        self._prompts = prompts
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._players: dict[int, P] = {}  # by candidate
        self._error: BaseException | None = None  # of our own, or of what leads a conversation
        self._drops = False  # whether a prompt that can't be answered costs its group alone
        self._losses: Counter[int] = Counter()  # of environments, by candidate
        self.played: dict[int, Played] = {}  # by candidate

    @property
    def num_lost(self) -> int:
        """Number of environments that were lost."""
        return self._losses.total()

    def run(
        self, scheduler: Scheduler, plans: Sequence[GroupPlan], on_progress: Callable[[Ledger], None] | None = None
    ) -> RolloutResult:
        """Runs the rollout. Raises [`GenerationError`] if the servers fail."""
        self._drops = scheduler.drop_failed_groups
        scheduler.carries_tokens = False  # a conversation whose environment is lost begins again
        commands = scheduler.start(plans, [EngineLoad("conversations", self._most_open)], time.perf_counter())
        try:
            self._execute(scheduler, commands)
            checked = time.perf_counter()
            while not scheduler.done:
                self._handle_next(scheduler)
                if time.perf_counter() - checked > POLL_S:
                    checked = time.perf_counter()
                    self._turns.tend()
                    if on_progress is not None:
                        on_progress(scheduler.ledger)
        finally:
            for player in self._players.values():
                self._end(player)
            self._close()
        return scheduler.result()

    def _handle_next(self, scheduler: Scheduler) -> None:
        try:
            event = self._events.get(timeout=POLL_S)
        except Empty:
            return
        if self._error is not None:
            raise self._error
        self._execute(scheduler, scheduler.handle(event))

    def _execute(self, scheduler: Scheduler, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Abort):
                self._abort(scheduler, command)
            elif isinstance(command, Submit):
                row = self._prompts.row_of(command.group_id, command.index)
                is_first = command.index < self._prompts.num_generations and not self._losses[command.candidate_id]
                player = self.player_class(command.candidate_id, command.segment, row, is_first)
                self._players[player.candidate_id] = player
                self._begin(player)

    def _abort(self, scheduler: Scheduler, command: Abort) -> None:
        self._end(self._players[command.candidate_id])
        candidate, now = scheduler.ledger.find(command.candidate_id), time.perf_counter()
        assert candidate is not None
        key = command.candidate_id, command.segment, candidate.length
        event = CandidateEnded(*key, [], None, FinishReason.ABORT, now)
        self._execute(scheduler, scheduler.handle(event))

    @abstractmethod
    def _begin(self, player: P) -> None:
        """Starts to play a conversation, and returns at once."""

    @abstractmethod
    def _end(self, player: P) -> None:
        """Ends a conversation that nobody waits for. It may have ended before."""

    @abstractmethod
    def _close(self) -> None:
        """Called when the rollout is over, and its conversations were ended."""

    # Called by what leads a conversation, in any thread

    def _decoded(self, player: P, turn: Turn) -> None:
        key = *player.key, player.num_tokens
        player.num_tokens += len(turn[0])
        self._events.put(TokensArrived(*key, *turn, time.perf_counter()))

    def _ended(self, player: P, played: Played, is_cut: bool) -> None:
        self.played[player.candidate_id] = played
        reason, now = FinishReason.LENGTH if is_cut else FinishReason.STOP, time.perf_counter()
        self._events.put(CandidateEnded(*player.key, player.num_tokens, [], None, reason, now))

    def _failed(self, player: P, error: BaseException) -> None:
        """Says why a conversation has ended without a result. Nobody hears of one that was ended from here."""
        if isinstance(error, Over) or (isinstance(error, CancelledError) and player.over.is_set()):
            return
        now = time.perf_counter()
        if isinstance(error, EnvironmentLost):
            self._lost(player, error)
        elif isinstance(error, GenerationError) or (self._drops and isinstance(error, ConfigurationError)):
            self._events.put(CandidateFailed(*player.key, str(error), now))
        else:
            self._error = error
            self._events.put(None)

    def _lost(self, player: P, error: EnvironmentLost) -> None:
        """Has a conversation begin again, unless it has lost too many environments."""
        self._losses[player.candidate_id] += 1
        now = time.perf_counter()
        if (losses := self._losses[player.candidate_id]) < MAX_LOSSES:
            self._events.put(CandidateErred(*player.key, str(error), now))
        else:
            self._events.put(CandidateFailed(*player.key, f"{error} ({losses} environments in a row)", now))
