"""
Conversations that TRL's loop leads: each in a thread, with its first turn, and then TRL's loop of tools and turns on a
copy of the trainer that has this row alone.
"""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import EnvironmentLost
from .conversations import POLL_S, Outcome, OwnTurns, Turn, Views
from .environments import Environments, Instance
from .players import Played, Player, Players
from .rows import Tokens


Loop = Callable[..., Outcome]  # TRL's `_tool_call_loop`, which takes the trainer first
Parse = Callable[[Any, Any, Any, Any], Any]  # of prompts, completions, a tokenizer and the tokens of the prompts


@dataclass
class ToolPlayer(Player):
    """A candidate in its thread."""

    thread: threading.Thread = field(init=False)
    instance: Instance | None = None
    turn: Future[Any] | None = None  # that decodes


class ToolPlayers(Players[ToolPlayer]):
    """
    Conversations with tools.

    Args:
        trainer (`DARTSGRPOTrainer`):
            The trainer, see [`Views`]. Without environments, all rows have the same tools.
        loop (`Callable`):
            TRL's `_tool_call_loop`.
        parse (`Callable`):
            Reads a completion, as TRL does after the first turn.
        prompts (`list[list[int]]`):
            Prompt of each of this process's rows.
        messages (`list`):
            The conversation that is each row's prompt.
        environments (`Environments`, *optional*):
            Those of the candidates.

    Attributes:
        acted_on (`dict[int, Any]`):
            Environments of the conversations that have ended, by candidate.
    """

    player_class = ToolPlayer

    def __init__(
        self,
        trainer: Any,
        loop: Loop,
        parse: Parse,
        prompts: Sequence[Tokens],
        messages: Sequence[Any],
        environments: Environments | None = None,
    ) -> None:
        super().__init__()
        self._loop = loop
        self._parse = parse
        self._prompts = prompts
        self._messages = messages
        self.acted_on: dict[int, Any] = {}
        self._most: int = trainer.max_completion_length
        self._ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        self._views = Views(trainer)
        self._environments = environments

    def _begin(self, player: ToolPlayer) -> None:
        name = "trl_darts-conversation"
        player.thread = threading.Thread(target=self._run, args=[player], name=name, daemon=True)
        player.thread.start()

    def _end(self, player: ToolPlayer) -> None:
        """Ends a conversation at once if it decodes, otherwise when its tool has answered."""
        player.over.set()
        if (turn := player.turn) is not None:
            turn.cancel()

    def _close(self) -> None:
        with self._views.lock:  # none of them uses the tokenizer any longer
            pass
        if self._environments is None:
            return
        # Later batches do not use what conversations still act on: a tool that runs can't be stopped.
        deadline = time.perf_counter() + POLL_S
        for player in self._players.values():
            player.thread.join(max(0.0, deadline - time.perf_counter()))
            instance = player.instance
            if instance is not None and (player.thread.is_alive() or instance.is_spent):
                self._environments.retire(player.row, instance.environment)

    # In the conversation's thread

    def _run(self, player: ToolPlayer) -> None:
        try:
            played = self._play(player)
        except BaseException as error:
            self._failed(player, error)
        else:
            if player.instance is not None:
                self.acted_on[player.candidate_id] = player.instance.environment
            is_cut = played.outcome[2][0][-1] not in self._ends  # as TRL tells truncated completions
            self._stage.ended(player.key, played, is_cut)

    def _failed(self, player: ToolPlayer, error: BaseException) -> None:
        instance = player.instance  # `None` if it was lost while it was made
        if isinstance(error, EnvironmentLost) and self._environments is not None and instance is not None:
            self._environments.retire(player.row, instance.environment)
        super()._failed(player, error)

    def _play(self, player: ToolPlayer) -> Played:
        prompt, messages = self._prompts[player.row], copy.deepcopy(self._messages[player.row])
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
        return Played(player.candidate_id, first, outcome, turns.count, turns.acting_s)

    def _enter(self, player: ToolPlayer, environments: Environments) -> None:
        take = environments.of_row if player.is_first else environments.take
        player.instance = Instance(take(player.row))
        if not player.is_first and not player.over.is_set():
            environments.reset(player.row, player.instance.environment)

    def _check(self, player: ToolPlayer) -> None:
        """Raises if a tool of the last turn has lost the environment."""
        if player.instance is not None and player.instance.lost is not None:
            raise player.instance.lost

    def _decode(self, player: ToolPlayer, turn_number: int, tokens: Tokens, most: int) -> Turn:
        self._check(player)
        player.turn = self._stage.start(player.key, turn_number, tokens, most)
        if player.over.is_set():  # since before there was a turn to cancel
            player.turn.cancel()
        turn: Turn = player.turn.result()
        return turn
