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
from .candidates import CandidateRun, Played, Player, RowPrompts
from .conversations import POLL_S, Outcome, OwnTurns, Turn, Turns, Views
from .environments import Environments, Instance
from .rows import Tokens


Loop = Callable[..., Outcome]  # TRL's `_tool_call_loop`, which takes the trainer first
Parse = Callable[[Any, Any, Any, Any], Any]  # of prompts, completions, a tokenizer and the tokens of the prompts


@dataclass
class ToolPlayer(Player):
    """A candidate in its thread."""

    thread: threading.Thread = field(init=False)
    instance: Instance | None = None
    turn: Future[Any] | None = None  # that decodes


class ToolCandidates(CandidateRun[ToolPlayer]):
    """
    A rollout of conversations with tools.

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

    player_class = ToolPlayer

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
        super().__init__(turns, prompts, trainer.args.max_concurrent_conversations)
        self._loop = loop
        self._parse = parse
        self._messages = messages
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
            is_cut = played.outcome[2][0][-1] not in self._ends  # as TRL tells truncated completions
            self._ended(player, played, is_cut)

    def _lost(self, player: ToolPlayer, error: EnvironmentLost) -> None:
        if self._environments is not None and player.instance is not None:  # otherwise it was lost while it was made
            self._environments.retire(player.row, player.instance.environment)
        super()._lost(player, error)

    def _play(self, player: ToolPlayer) -> Played:
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
        player.turn = self._turns.start(player.candidate_id, turn_number, tokens, most)
        if player.over.is_set():  # since before there was a turn to cancel
            player.turn.cancel()
        turn: Turn = player.turn.result()
        self._decoded(player, turn)
        return turn
