"""
Candidates that are whole conversations. Each is played in a thread: its first turn, and then TRL's loop of tools and
turns on a copy of the trainer that has this row alone. The scheduler of a rollout decides which ones are waited for:

```
Submit ──▶ a thread: turn ─▶ tools ─▶ turn ─▶ … ──▶ TokensArrived, CandidateEnded
Abort  ──▶ its turn is aborted, or its tool's answer not waited for
```

To the scheduler, a candidate's tokens are those that the model decoded, over all turns. What waits for tools runs, and
holds no slot of a server.
"""

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
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
from .conversations import POLL_S, Outcome, Over, OwnTurns, Turn, Turns, Views
from .environments import Environments, Instance
from .rows import Tokens


# Conversations at once, each of which has a thread. Others wait until one has ended.
MOST = 2048
# A candidate that loses more environments in a row is seen as the cause.
MAX_LOSSES = 3

Loop = Callable[..., Outcome]  # TRL's `_tool_call_loop`, which takes the trainer first
Parse = Callable[[Any, Any, Any, Any], Any]  # of prompts, completions, a tokenizer and the tokens of the prompts


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

    first: Turn
    outcome: Outcome  # of TRL's loop, with this row alone
    num_turns: int
    acting_s: float  # seconds between its turns
    environment: Any = None  # on which it acted


@dataclass
class _Player:
    """A candidate that is being played."""

    candidate_id: int
    segment: int
    row: int
    is_first: bool  # in the environment that TRL has reset for the row
    thread: threading.Thread = field(init=False)
    instance: Instance | None = None
    over: threading.Event = field(default_factory=threading.Event)
    turn: Future[Any] | None = None  # that decodes
    num_tokens: int = 0


class CandidateRun:
    """
    A rollout whose candidates are conversations. Its methods are called in the main thread.

    Args:
        trainer (`DARTSGRPOTrainer`):
            The trainer, see [`Views`]. Without environments, all rows have the same tools.
        loop (`Callable`):
            TRL's `_tool_call_loop`.
        parse (`Callable`):
            Reads a completion, as TRL does after the first turn.
        turns (`Turns`):
            What decodes.
        prompts (`PromptBatch`):
            Prompts of all rows.
        messages (`list`):
            The conversation that is each row's prompt.
        environments (`Environments`, *optional*):
            Those of the candidates.
    """

    def __init__(
        self,
        trainer: Any,
        loop: Loop,
        parse: Parse,
        turns: Turns,
        prompts: RowPrompts,
        messages: Sequence[Any],
        environments: Environments | None = None,
    ) -> None:
        self._loop = loop
        self._parse = parse
        self._turns = turns
        self._prompts = prompts
        self._messages = messages
        self._most: int = trainer.max_completion_length
        self._ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        self._views = Views(trainer)
        self._environments = environments
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._players: dict[int, _Player] = {}  # by candidate
        self._error: Exception | None = None  # of our own, or of the chat template
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
        commands = scheduler.start(plans, [EngineLoad("conversations", MOST)], time.perf_counter())
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
            with self._views.lock:  # none of them uses the tokenizer any longer
                pass
            self._retire()
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
                player = _Player(command.candidate_id, command.segment, row, is_first)
                self._players[player.candidate_id] = player
                name = "trl_darts-conversation"
                player.thread = threading.Thread(target=self._run, args=[player], name=name, daemon=True)
                player.thread.start()

    def _abort(self, scheduler: Scheduler, command: Abort) -> None:
        player = self._players[command.candidate_id]
        self._end(player)
        candidate, now = scheduler.ledger.find(command.candidate_id), time.perf_counter()
        assert candidate is not None
        key = command.candidate_id, command.segment, candidate.length
        event = CandidateEnded(*key, [], None, FinishReason.ABORT, now)
        self._execute(scheduler, scheduler.handle(event))

    def _end(self, player: _Player) -> None:
        """Ends a conversation at once if it decodes, otherwise when its tool has answered."""
        player.over.set()
        if (turn := player.turn) is not None:
            turn.cancel()

    def _retire(self) -> None:
        """Has later batches not use what conversations still act on: a tool that runs can't be stopped."""
        if self._environments is None:
            return
        deadline = time.perf_counter() + POLL_S
        for player in self._players.values():
            player.thread.join(max(0.0, deadline - time.perf_counter()))
            instance = player.instance
            if instance is not None and (player.thread.is_alive() or instance.is_busy or instance.lost):
                self._environments.retire(player.row, instance.environment)

    # In the conversation's thread

    def _run(self, player: _Player) -> None:
        try:
            played = self._play(player)
        except Over:
            return
        except EnvironmentLost as error:
            self._lose(player, error)
            return
        except Exception as error:
            if isinstance(error, CancelledError) and player.over.is_set():
                return
            if isinstance(error, GenerationError) or (self._drops and isinstance(error, ConfigurationError)):
                now = time.perf_counter()
                self._events.put(CandidateFailed(player.candidate_id, player.segment, str(error), now))
            else:
                self._error = error
                self._events.put(None)
            return
        self.played[player.candidate_id] = played
        ends = played.outcome[2][0][-1] in self._ends  # as TRL tells truncated completions
        reason, now = FinishReason.STOP if ends else FinishReason.LENGTH, time.perf_counter()
        key = player.candidate_id, player.segment, player.num_tokens
        self._events.put(CandidateEnded(*key, [], None, reason, now))

    def _lose(self, player: _Player, error: EnvironmentLost) -> None:
        """Has a conversation begin again, unless it has lost too many environments."""
        assert self._environments is not None
        assert player.instance is not None
        self._environments.retire(player.row, player.instance.environment)
        self._losses[player.candidate_id] += 1
        key, now = (player.candidate_id, player.segment), time.perf_counter()
        if (losses := self._losses[player.candidate_id]) < MAX_LOSSES:
            self._events.put(CandidateErred(*key, str(error), now))
        else:
            self._events.put(CandidateFailed(*key, f"{error} ({losses} environments in a row)", now))

    def _play(self, player: _Player) -> Played:
        prompt, messages = self._prompts.rows[player.row], copy.deepcopy(self._messages[player.row])
        row = 0  # whose tools it has: without environments, those of all
        if self._environments is not None:
            row = player.row
            self._enter(player, self._environments)
        turns = OwnTurns(partial(self._decode, player), len(prompt), self._most)
        view = self._views.of(row, turns, player.over, player.instance)
        first = turns(prompt)
        (completion,) = self._parse([messages], [first[0]], view._tokenizer, [prompt])
        logprobs = None if first[1] is None else [list(first[1])]
        own: Any = [messages], [prompt], [list(first[0])], [completion], logprobs, None, {}
        outcome = self._loop(view, *own)
        self._check(player)
        environment = None if player.instance is None else player.instance.environment
        return Played(first, outcome, turns.count, turns.acting_s, environment)

    def _enter(self, player: _Player, environments: Environments) -> None:
        take = environments.of_row if player.is_first else environments.take
        player.instance = Instance(take(player.row))
        if not player.is_first and not player.over.is_set():
            environments.reset(player.row, player.instance.environment)

    def _check(self, player: _Player) -> None:
        """Raises if a tool of the last turn has lost the environment."""
        if player.instance is not None and player.instance.lost is not None:
            raise player.instance.lost

    def _decode(self, player: _Player, turn_number: int, tokens: Tokens, most: int) -> Turn:
        self._check(player)
        player.turn = self._turns.start(player.candidate_id, turn_number, tokens, most)
        if player.over.is_set():  # since before there was a turn to cancel
            player.turn.cancel()
        turn = player.turn.result()
        key = player.candidate_id, player.segment, player.num_tokens
        player.num_tokens += len(turn[0])
        self._events.put(TokensArrived(*key, *turn, time.perf_counter()))
        return turn
