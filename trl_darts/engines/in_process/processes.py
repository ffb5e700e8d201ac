"""Decodes on the trainer's own processes: each decodes a share of the candidates, and the main process decides."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...errors import ConfigurationError, GenerationError
from ...scheduling import Admission, AssignedPlacement, RolloutResult, balance
from ...scheduling.placement import known_lengths
from ...training.rows import KeptRows, Tokens
from ..batch import PromptBatch
from ..engine import Engine, OnProgress, RolloutPlan
from ..main_process import MainProcess
from .share import GroupLink, MainLink, RemoteLink, Share, Slot


# Decodes a share until none of it is running. The last argument has the candidates whose prompts this process passes.
Decode = Callable[[PromptBatch, Share, list[Slot]], None]


class InProcessEngine(Engine):
    """
    An [`Engine`] inside the trainer: transformers, or colocated vLLM.

    Candidates are distributed so that all processes are expected to end together. A candidate stays on the process of
    its row if there are no more candidates than rows, or if prompts have images or other fields.
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
        self._step = 0  # of the weights

    def check_prompts(self, prompts: Sequence[Tokens], where: str, first_index: int = 0) -> None:
        """See [`Engine`]."""
        limit = self._num_positions
        lengths = {first_index + i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) >= limit}
        if lengths:
            first = ", ".join(f"prompt {index} has {length}" for index, length in list(lengths.items())[:5])
            raise ConfigurationError(
                f"{len(lengths)} prompts of {where} leave no room for a completion ({first} tokens): the model has "
                f"{limit} positions (`max_position_embeddings`). Filter the data set, or use a longer model."
            )

    def launch(self, plan: RolloutPlan | None, batch: PromptBatch) -> None:
        raise GenerationError("An engine in the trainer's process can't decode while the trainer trains.")

    def drain(self, step: int) -> None:
        """See [`Engine`]."""
        self._step = step

    def later_turn(self, batch: PromptBatch) -> None:
        """TRL generates later turns itself."""

    def placement(self, admission: Admission, batch: PromptBatch) -> AssignedPlacement:
        """See [`Engine`]. All candidates start at once, so each gets its process before the rollout."""
        counts, lengths, order = admission.num_candidates, None, self._submit_order
        if batch.multimodal or sum(counts) == len(batch.rows):
            owners = batch.owners
            engines = [[owners[batch.row_of(g, i)] // self._size for i in range(n)] for g, n in enumerate(counts)]
        else:
            known = (None if order == "arrival" else admission.expected_lengths) or [1.0] * len(counts)
            lengths = dict(enumerate(known_lengths(known)))
            engines = balance(counts, list(lengths.values()), self._main.num_processes // self._size)
        engine_ids = {place: [str(engine) for engine in group] for place, group in enumerate(engines)}
        return AssignedPlacement(engine_ids, lengths, longest_first=order != "shortest")

    def run(
        self,
        plan: RolloutPlan | None,
        batch: PromptBatch,
        on_progress: OnProgress | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> RolloutResult | None:
        """See [`Engine`]. No process waits for servers, so `meanwhile` is not called."""
        self._num_rollouts += 1
        main_link: Any = self._main.run(lambda: self._main_link(plan))  # `None` on the other processes
        slots, needs_progress = self._main.broadcast(lambda: self._slots(main_link, batch))
        link = main_link or RemoteLink(self._main.mailbox, self._num_rollouts)
        try:
            if main_link is not None:
                main_link.listen()
            share = self._share(slots, needs_progress, link, on_progress)
            self._decode(batch, share, slots[self._main.index])
            if share.running:
                raise GenerationError(f"The engine left {len(share.running)} candidates without an end.")
            share.exchange()
        except Exception as error:  # otherwise, the other processes would wait for this one
            link.fail(error)
            if main_link is not None and self._main.num_processes > 1:
                self._main.fail(error)
            raise
        return self._with_tokens(self._main.run(lambda: main_link.result()), share)

    def _main_link(self, plan: Any) -> MainLink:
        leaders = range(0, self._main.num_processes, self._size)
        mailbox = self._main.mailbox if self._main.num_processes > 1 else None
        return MainLink(plan.scheduler, plan.groups, leaders, mailbox, self._num_rollouts)

    def _slots(self, link: Any, batch: PromptBatch) -> tuple[list[list[Slot]], bool]:
        """
        Returns the candidates whose prompts each process passes to its engine, and whether the scheduler needs
        progress. Images and other fields of a prompt are on the process of its row.
        """
        owners = batch.owners
        slots_of: list[list[Slot]] = [[] for _ in batch.sizes]
        for engine, slots in enumerate(link.slots):
            for slot in slots:
                owner = owners[batch.row_of(slot.group_id, slot.index)]
                slots_of[owner if batch.multimodal else engine * self._size].append(slot)
        return slots_of, link.scheduler.needs_progress

    def _share(
        self, slots_of: list[list[Slot]], needs_progress: bool, link: Any, on_progress: OnProgress | None
    ) -> Share:
        leader = self._main.index - self._main.index % self._size
        slots = [slot for own in slots_of[leader : leader + self._size] for slot in own]
        on_exchange = None
        if on_progress is not None and self._main.is_here:
            on_exchange = partial(on_progress, link.scheduler.ledger)
        if self._group is not None:
            link = GroupLink(link if self._main.index == leader else None, leader, self._group)
        return Share(slots, link, needs_progress, on_exchange, (self._step, self._num_rollouts))

    def _with_tokens(self, result: Any, share: Share) -> RolloutResult | None:
        """Adds the tokens and log-probs of the kept rows, from the processes that decoded them, to the result."""
        kept = self._main.broadcast(lambda: {row.candidate_id for group in result.groups for row in group.rows})
        leads = self._main.index % self._size == 0
        own = [number for number in share.rows if leads and number in kept]
        tokens, logprobs = [share.rows[number][0] for number in own], [share.rows[number][1] for number in own]
        has_logprobs = all(values is not None for values in logprobs)
        parts = self._main.gather((own, KeptRows(tokens, [v or [] for v in logprobs] if has_logprobs else None)))
        if result is None:
            return None
        rows = {number: (part, index) for numbers, part in parts for index, number in enumerate(numbers)}
        for group in result.groups:
            for row in group.rows:
                part, index = rows[row.candidate_id]
                row.tokens, row.logprobs = part.completion_ids[index], part.logprobs and part.logprobs[index]
        return result
