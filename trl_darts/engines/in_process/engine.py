"""Decoding on the training's own processes: each decodes a share of the candidates, the main process decides."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import gather_object

from ...errors import ConfigurationError, GenerationError
from ...scheduling import Admission, AssignedPlacement, RolloutResult, balance
from ...training.rows import Tokens
from ..batch import PromptBatch
from ..engine import Engine, OnProgress, RolloutPlan
from ..main_process import MainProcess
from .director import Director
from .links import FollowingLink, RemoteLink
from .share import Share, Slot


# Decodes a share until nothing of it runs. Its last argument are the candidates whose prompts this process brings.
Decode = Callable[[PromptBatch, Share, list[Slot]], None]


class InProcessEngine(Engine):
    """
    An [`Engine`] inside the trainer: transformers, or colocated vLLM.

    Candidates are spread so that all processes are expected to end together. They stay with the rows that they are for
    where there are no more of them than rows, as TRL has it, or where something else than tokens goes with them.
    """

    def __init__(
        self,
        main: MainProcess,
        decode: Decode,
        submit_order: str,
        size: int = 1,
        group: Any = None,
        num_positions: float = math.inf,
    ) -> None:
        self._main = main
        self._decode = decode
        self._submit_order = submit_order
        self._size = size
        self._group = group
        self._num_positions = num_positions
        self._num_rollouts = 0

    def check_prompts(self, prompts: Sequence[Tokens], where: str, first_index: int = 0) -> None:
        """See [`Engine`]."""
        check_lengths(prompts, where, first_index, self._num_positions)

    def launch(self, plan: RolloutPlan | None, batch: PromptBatch) -> None:
        raise GenerationError("An engine in the trainer's process can't decode while the trainer trains.")

    def later_turn(self, batch: PromptBatch) -> None:
        """TRL generates later turns itself."""

    def placement(self, admission: Admission, batch: PromptBatch) -> AssignedPlacement:
        """All candidates start at once, so each has its process before the rollout."""
        counts, lengths, order = admission.num_candidates, None, self._submit_order
        if batch.multimodal or sum(counts) == len(batch.rows):
            owners = batch.owners  # of each row; a candidate's home is the process that has its prompt
            engines = [[owners[batch.row_of(g, i)] // self._size for i in range(n)] for g, n in enumerate(counts)]
        else:
            lengths = (None if order == "arrival" else admission.expected_lengths) or [1.0] * len(counts)
            engines = balance(counts, lengths, self._main.num_processes // self._size)
        engine_ids = [[str(engine) for engine in group] for group in engines]
        return AssignedPlacement(engine_ids, lengths, longest_first=order != "shortest")

    def run(
        self,
        plan: RolloutPlan | None,
        batch: PromptBatch,
        on_progress: OnProgress | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> RolloutResult | None:
        """See [`Engine`]. Nobody waits for servers here, so `meanwhile` is never called."""
        self._num_rollouts += 1
        director = self._main.run(lambda: self._direct(plan))  # `None` on the other processes
        feeds, needs_progress = self._main.broadcast(
            lambda: (self._feeds(director, batch), director.scheduler.needs_progress)
        )
        link = RemoteLink(self._main.mailbox, self._num_rollouts) if director is None else director
        try:
            if director is not None:
                director.listen()
            share = self._share(feeds, needs_progress, link, director, on_progress)
            self._decode(batch, share, feeds[self._main.index])
            if share.running:
                raise GenerationError(f"The engine left {len(share.running)} candidates without an end.")
            share.exchange()
        except Exception as error:  # no other process must wait for this one
            link.fail(error)
            if director is not None and self._main.num_processes > 1:
                self._main.fail(error)
            raise
        return self._with_tokens(self._main.run(lambda: director.result()), share)

    def _direct(self, plan: Any) -> Director:
        leaders = range(0, self._main.num_processes, self._size)
        mailbox = self._main.mailbox if self._main.num_processes > 1 else None
        return Director(plan.scheduler, plan.groups, leaders, mailbox, self._num_rollouts)

    def _feeds(self, director: Director, batch: PromptBatch) -> list[list[Slot]]:
        """By process, the candidates whose prompts it brings. What goes with a prompt is on the prompt's process."""
        owners = batch.owners
        feeds: list[list[Slot]] = [[] for _ in batch.sizes]
        for engine, slots in enumerate(director.slots):
            for slot in slots:
                home = owners[batch.row_of(slot.group_id, slot.index)]
                feeds[home if batch.multimodal else engine * self._size].append(slot)
        return feeds

    def _share(
        self,
        feeds: list[list[Slot]],
        needs_progress: bool,
        link: Director | RemoteLink,
        director: Director | None,
        on_progress: OnProgress | None,
    ) -> Share:
        me = self._main.index
        leader = me - me % self._size
        slots = [slot for feed in feeds[leader : leader + self._size] for slot in feed]
        way = link if self._group is None else FollowingLink(link if me == leader else None, leader, self._group)
        if director is None or on_progress is None:
            return Share(slots, way, needs_progress)
        return Share(slots, way, needs_progress, lambda: on_progress(director.scheduler.ledger))

    def _with_tokens(self, result: Any, share: Share) -> RolloutResult | None:
        """Puts the tokens of the rows, which are on the processes that decoded them, into the main one's result."""
        kept = self._main.broadcast(lambda: {row.candidate_id for group in result.groups for row in group.rows})
        leads = self._main.index % self._size == 0
        own = {number: row for number, row in share.rows.items() if leads and number in kept}
        rows = {number: row for part in gather_object([own]) for number, row in part.items()}
        if result is not None:
            for group in result.groups:
                for row in group.rows:
                    row.tokens, row.logprobs = rows[row.candidate_id]
        return result


def check_lengths(prompts: Sequence[Tokens], where: str, first_index: int, num_positions: float) -> None:
    """Raises [`ConfigurationError`] if prompts fill all positions of a model."""
    lengths = {first_index + i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) >= num_positions}
    if lengths:
        first = ", ".join(f"prompt {index} has {length}" for index, length in list(lengths.items())[:5])
        raise ConfigurationError(
            f"{len(lengths)} prompts of {where} leave no room for a completion ({first} tokens): the model has "
            f"{num_positions} positions (`max_position_embeddings`). Filter the data set, or take a model for longer "
            "texts."
        )
