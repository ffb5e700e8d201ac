"""
What plays the conversations of a process's rows. A stage says which candidates begin, and which ones nobody waits for,
and is told what became of them:

```
Stage ──begin, end──▶ Players ─▶ turn ─▶ tools ─▶ turn ─▶ …
      ◀──start (of a turn), ended, failed──
```

On the main process, the stage is the rollout (`candidates.py`); on the others, what passes all on to it
(`remote_players.py`). Conversations are led by TRL's loop (`tool_players.py`) or by a coroutine (`sessions.py`).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from .conversations import Over, Turn
from .rows import Tokens


Key = tuple[int, int]  # of a candidate: its ID and its segment


@dataclass
class Played:
    """What became of a candidate."""

    candidate_id: int
    tokens: Turn  # that `_generate_single_turn` returns: of the first turn with TRL's loop, otherwise of all
    outcome: Any  # of TRL's loop with this row alone, or of the coroutine
    num_turns: int
    acting_s: float  # seconds between its turns


class Stage(Protocol):
    """For whom conversations are played. Its methods are called in any thread."""

    def start(self, key: Key, turn: int, tokens: Tokens, most: int) -> Future[Turn]:
        """Starts to decode at most so many tokens of a turn, after those of a conversation so far."""

    def ended(self, key: Key, played: Played, is_cut: bool) -> None:
        """A conversation has ended, or was cut off."""

    def failed(self, key: Key, error: BaseException) -> None:
        """A conversation has ended without a result."""


@dataclass
class Player:
    """A candidate that is being played."""

    candidate_id: int
    segment: int
    row: int  # of this process
    is_first: bool  # in the environment that TRL has reset for the row
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> Key:
        return self.candidate_id, self.segment


P = TypeVar("P", bound=Player)


class Players(ABC, Generic[P]):
    """Plays the conversations of this process's rows. Its public methods are called in the main thread."""

    player_class: type[P]
    _stage: Stage

    def __init__(self) -> None:
        self._players: dict[int, P] = {}  # by candidate

    @contextmanager
    def on(self, stage: Stage) -> Iterator[None]:
        """Plays on a stage inside this context. At its end, nobody waits for what is left."""
        self._stage = stage
        try:
            yield
        finally:
            for player in self._players.values():
                self._end(player)
            self._close()

    def begin(self, candidate_id: int, segment: int, row: int, is_first: bool) -> None:
        """Starts to play a conversation, and returns at once. The arguments are those of [`Player`]."""
        player = self.player_class(candidate_id, segment, row, is_first)
        self._players[candidate_id] = player
        self._begin(player)

    def end(self, candidate_id: int) -> None:
        """Ends a conversation that nobody waits for. It may have ended before."""
        self._end(self._players[candidate_id])

    @abstractmethod
    def _begin(self, player: P) -> None:
        """Starts to play a conversation, and returns at once."""

    @abstractmethod
    def _end(self, player: P) -> None:
        """Ends a conversation. It may have ended before."""

    @abstractmethod
    def _close(self) -> None:
        """Called when all conversations were ended."""

    def _failed(self, player: P, error: BaseException) -> None:
        """Tells why a conversation has ended without a result, unless it was ended from here."""
        if isinstance(error, Over) or (isinstance(error, CancelledError) and player.over.is_set()):
            return
        self._stage.failed(player.key, error)
