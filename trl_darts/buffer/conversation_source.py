"""Batches whose candidates are whole conversations."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import mean
from typing import Any, Self

from ..engines.batch import PromptBatch
from ..engines.engine import OnProgress
from ..scheduling import RolloutResult
from ..streaming import decode_completions
from ..telemetry.metrics import RolloutRecord
from ..training.candidates import CandidateRun
from ..training.conversations import Outcome, joined
from ..training.players import Played, Players
from ..training.remote_players import Link, RemotePlayers, RemoteStage
from ..training.rows import KeptRows, repeated_groups
from ..training.tool_players import ToolPlayers
from .batch import Prompts
from .sources import LoaderSource


@dataclass
class KeptConversations(KeptRows):
    """What TRL is given as completions, and what became of each row's conversation."""

    played: list[Played] = field(default_factory=list)  # (N·M,)

    def shares(self, sizes: Sequence[int]) -> list[Self]:
        ends = [0, *accumulate(sizes)]
        return [
            replace(own, played=self.played[start:end])
            for own, (start, end) in zip(super().shares(sizes), pairwise(ends), strict=True)
        ]


class ConversationSource(LoaderSource):
    """
    The loader's batches, with conversations on servers. Each process plays those of its rows, and the main one decides
    and decodes.
    """

    rows_class = KeptConversations

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._played: dict[int, Played] = {}  # by candidate, of the last rollout, on the main process
        self._num_lost = 0  # environments of the last rollout
        self._metrics: dict[str, float] = {}

    @abstractmethod
    def players(self, batch: PromptBatch) -> Players[Any]:
        """Returns what plays the conversations of this process's rows."""

    def run(
        self, plan: Any, batch: PromptBatch, on_progress: OnProgress | None, meanwhile: Callable[[], None] | None
    ) -> RolloutResult | None:
        # There is no `meanwhile`: what is computed during a rollout (`Streams`) is refused with conversations.
        main, converse = self.trainer._main, self.trainer._engine.converse
        players = self.players(batch)
        link = Link(main.mailbox, main.mailbox.next_exchange()) if main.num_processes > 1 else None
        if link is not None and not main.is_here:
            stage = RemoteStage(link, players)
            with players.on(stage):
                converse(0, None, stage.tend)
            return None

        def play(turns: Any) -> RolloutResult:
            others = None if link is None else RemotePlayers(link)
            run = CandidateRun(turns, batch, players, others, self.trainer.args.max_concurrent_conversations)
            result = run.run(plan.scheduler, plan.groups, on_progress)
            self._played, self._num_lost = run.played, run.num_lost
            return result

        result: RolloutResult | None = converse(sum(group.num_candidates for group in plan.groups), play)
        return result

    def collect(self, result: RolloutResult, batch: PromptBatch) -> KeptConversations:
        played, self._played = self._played, {}
        groups = {group.plan.group_id: [played[row.candidate_id] for row in group.rows] for group in result.groups}
        self._metrics = self._of_turns([own for group in groups.values() for own in group], list(played.values()))
        repeated = repeated_groups(result)
        tokens = {place: [own.tokens for own in group] for place, group in groups.items()}
        rows = self.rows_class(**vars(KeptRows.of_groups(tokens, repeated, batch.num_generations)))
        groups |= {place: [_copied(own) for own in groups[other]] for place, other in repeated.items()}
        rows.played = [own for place in sorted(groups) for own in groups[place]]
        return rows

    def _of_turns(self, kept: Sequence[Played], ended: Sequence[Played]) -> dict[str, float]:
        """Returns metrics of rows, and of all conversations that ended."""
        return {
            "darts/tools/turns": mean(own.num_turns - 1 for own in kept),
            "darts/tools/seconds": mean(own.acting_s for own in kept),
            "darts/tools/kept_vs_pool_turns_ratio": mean(o.num_turns for o in kept) / mean(o.num_turns for o in ended),
            "darts/tools/lost_environments": float(self._num_lost),
        }

    def log(self, record: RolloutRecord) -> None:
        super().log(record)
        self.trainer._log_all(self._metrics)


@dataclass
class KeptToolConversations(KeptConversations):
    """The first turn of each row's conversation, and what TRL's loop made of it."""

    @property
    def outcome(self) -> Outcome:
        """What TRL's `_tool_call_loop` returns for these rows."""
        return joined([own.outcome for own in self.played], self.logprobs is not None)


class ToolSource(ConversationSource):
    """Conversations with tools or environments, which TRL's loop leads."""

    rows_class = KeptToolConversations

    def players(self, batch: PromptBatch) -> Players[Any]:
        self._tool_players: ToolPlayers = self.trainer._tool_players(partial(decode_completions, self.trainer), batch)
        return self._tool_players

    def sample(self, prompts: Prompts) -> KeptConversations:
        rows: Any = super().sample(prompts)
        environments = self.trainer.environments
        if environments:  # those of the candidates that are kept, for rewards
            acted_on = self._tool_players.acted_on
            others = list(acted_on.values()) or environments  # for filler rows, whose conversations may be elsewhere
            environments[:] = [acted_on.get(own.candidate_id, others[0]) for own in rows.played]
        return rows


def _copied(played: Played) -> Played:
    """Copies what rewards may change."""
    return replace(played, outcome=copy.deepcopy(played.outcome))
