"""
A rollout whose candidates are whole conversations. The scheduler decides which ones are waited for, each process plays
those of its rows, and the main one decodes:

```
Submit ──▶ turn ─▶ tools ─▶ turn ─▶ … ──▶ TokensArrived, CandidateEnded
Abort  ──▶ its turn is aborted, or its tool's answer not waited for
```

To the scheduler, a candidate's tokens are those that the model decoded, over all turns. What waits for tools runs, and
holds no slot of a server.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any, Protocol

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
from .conversations import POLL_S, Turn, Turns
from .environments import MAX_LOSSES
from .players import Key, Played, Players
from .remote_players import RemotePlayers
from .rows import Tokens


# Conversations at once, each of which may have a thread. Others wait until one has ended.
MOST = 2048
REMOTE_POLL_S = 0.005


class RowPrompts(Protocol):
    """Prompts of all rows, in the order of the processes."""

    @property
    def sizes(self) -> list[int]:
        """Rows of each process."""

    @property
    def owners(self) -> list[int]:
        """Process of each row."""

    @property
    def num_generations(self) -> int:
        """Rows of a group."""

    def row_of(self, group_id: int, index: int) -> int:
        """Returns the row with the prompt of a group's candidate."""


class CandidateRun:
    """
    A rollout of conversations, on the main process.

    Args:
        turns (`Turns`):
            What decodes.
        prompts (`PromptBatch`):
            Prompts of all rows.
        players (`Players`):
            What plays the conversations of this process.
        others (`RemotePlayers`, *optional*):
            Those of the other processes.
        most (`int`, *optional*):
            Most conversations at once, see `max_concurrent_conversations`.
    """

    def __init__(
        self,
        turns: Turns,
        prompts: RowPrompts,
        players: Players[Any],
        others: RemotePlayers | None = None,
        most: int | None = None,
    ) -> None:
        self._turns = turns
        self._prompts = prompts
        self._players = players
        self._others = others
        self._most_open = MOST if most is None else min(most, MOST)
        self._owners = prompts.owners
        self._first_rows = [0, *accumulate(prompts.sizes)]  # of each process
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._num_tokens: Counter[Key] = Counter()
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
        with self._players.on(self):
            self._execute(scheduler, commands)
            checked = time.perf_counter()
            while not scheduler.done:
                self._handle_next(scheduler)
                if time.perf_counter() - checked > POLL_S:
                    checked = time.perf_counter()
                    self._turns.tend()
                    if on_progress is not None:
                        on_progress(scheduler.ledger)
        return scheduler.result()

    def _handle_next(self, scheduler: Scheduler) -> None:
        if self._others is not None:
            self._others.tend(self)
        try:
            event = self._events.get(timeout=POLL_S if self._others is None else REMOTE_POLL_S)
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
                self._submit(command)

    def _submit(self, command: Submit) -> None:
        row = self._prompts.row_of(command.group_id, command.index)
        owner = self._owners[row]
        is_first = command.index < self._prompts.num_generations and not self._losses[command.candidate_id]
        part = command.candidate_id, command.segment, row - self._first_rows[owner], is_first
        if owner == 0:
            self._players.begin(*part)
        else:
            assert self._others is not None
            self._others.begin(owner, *part)

    def _abort(self, scheduler: Scheduler, command: Abort) -> None:
        players: Any = self._others if self._others and command.candidate_id in self._others else self._players
        players.end(command.candidate_id)
        candidate, now = scheduler.ledger.find(command.candidate_id), time.perf_counter()
        assert candidate is not None
        key = command.candidate_id, command.segment, candidate.length
        event = CandidateEnded(*key, [], None, FinishReason.ABORT, now)
        self._execute(scheduler, scheduler.handle(event))

    # What players tell, see [`Stage`]

    def start(self, key: Key, turn: int, tokens: Tokens, most: int) -> Future[Turn]:
        decoding = self._turns.start(key[0], turn, tokens, most)
        told: Future[Turn] = Future()

        def tell(own: Future[Turn]) -> None:
            if not told.set_running_or_notify_cancel():
                return
            error = CancelledError() if own.cancelled() else own.exception()
            if error is not None:
                told.set_exception(error)
            else:
                self._decoded(key, own.result())  # before the conversation can end
                told.set_result(own.result())

        told.add_done_callback(lambda own: own.cancelled() and decoding.cancel())
        decoding.add_done_callback(tell)
        return told

    def _decoded(self, key: Key, turn: Turn) -> None:
        event = TokensArrived(*key, self._num_tokens[key], *turn, time.perf_counter())
        self._num_tokens[key] += len(turn[0])
        self._events.put(event)

    def ended(self, key: Key, played: Played, is_cut: bool) -> None:
        self.played[key[0]] = played
        reason, now = FinishReason.LENGTH if is_cut else FinishReason.STOP, time.perf_counter()
        self._events.put(CandidateEnded(*key, self._num_tokens[key], [], None, reason, now))

    def failed(self, key: Key, error: BaseException) -> None:
        now = time.perf_counter()
        if isinstance(error, EnvironmentLost):
            self._lost(key, error)
        elif isinstance(error, GenerationError) or (self._drops and isinstance(error, ConfigurationError)):
            self._events.put(CandidateFailed(*key, str(error), now))
        else:
            self._error = error
            self._events.put(None)

    def _lost(self, key: Key, error: EnvironmentLost) -> None:
        """Has a conversation begin again, unless it has lost too many environments."""
        self._losses[key[0]] += 1
        now = time.perf_counter()
        if (losses := self._losses[key[0]]) < MAX_LOSSES:
            self._events.put(CandidateErred(*key, str(error), now))
        else:
            self._events.put(CandidateFailed(*key, f"{error} ({losses} environments in a row)", now))
