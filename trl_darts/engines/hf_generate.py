"""
Decoding with transformers' `generate`: the scheduler sits in a stopping criterion.

`generate` decodes a fixed batch of rows, one token per step. After each step the criterion reports the rows that
ended, and marks as done the rows that the scheduler aborts. A row that is done still takes part in the forward passes,
but nobody waits for it: the loop ends with the last row that is wanted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..scheduling import (
    Abort,
    CandidateEnded,
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


ENGINE_ID = "transformers"
# Reports of progress cost a copy of every running row's new tokens.
PROGRESS_INTERVAL = 16


class SchedulerCriterion(StoppingCriteria):
    """
    Turns the steps of `generate` into events, and aborts into rows that are done.

    Args:
        scheduler ([`Scheduler`]):
            A new one.
        plans (`Sequence[GroupPlan]`):
            The groups. Row r of the batch is candidate r: group by group, in the order of the plans.
        eos_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        on_progress (`Callable`, *optional*):
            Called after each step with the scheduler's ledger.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        eos_token_ids: Sequence[int],
        on_progress: Callable[[Ledger], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.eos_token_ids = torch.tensor(list(eos_token_ids))
        self.on_progress = on_progress
        self.prompt_length: int | None = None
        self.steps = 0
        self.running: dict[int, Submit] = {}  # by row, which is the candidate's ID
        self.reported = 0  # step of the last report of progress
        self._execute(scheduler.start(plans, [EngineLoad(ENGINE_ID)], time.perf_counter()), None)
        self._alive = torch.ones(len(self.running), dtype=torch.bool)

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # input_ids: (B, P + steps)
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1] - 1
        self.steps = input_ids.shape[1] - self.prompt_length
        ended = torch.isin(input_ids[:, -1], self.eos_token_ids.to(input_ids.device)).cpu() & self._alive
        for row in ended.nonzero().flatten().tolist():
            if row in self.running:  # not aborted by what an earlier row of this step led to
                self._end(row, input_ids, FinishReason.STOP)
        if self.scheduler.needs_progress and self.steps - self.reported >= PROGRESS_INTERVAL:
            self._report_progress(input_ids)
        if self.on_progress is not None:
            self.on_progress(self.scheduler.ledger)
        return (~self._alive).to(input_ids.device)

    def finish(self, completions: Sequence[Sequence[int]]) -> RolloutResult:
        """
        Ends what `generate` returned without an end-of-sequence token: it was cut off at the limit.

        Args:
            completions (`Sequence[Sequence[int]]` of shape `(B, ≤ steps)`):
                The completion of each row, without padding.

        Returns:
            [`RolloutResult`]: The groups with their rows.
        """
        eos = set(self.eos_token_ids.tolist())
        for row in list(self.running):
            if row in self.running:
                stopped = bool(completions[row]) and completions[row][-1] in eos
                self._end(row, completions, FinishReason.STOP if stopped else FinishReason.LENGTH)
        return self.scheduler.result()

    def _completion(self, source: Any, row: int) -> list[int]:
        if isinstance(source, torch.Tensor):
            return source[row, self.prompt_length :].tolist()
        return list(source[row])

    def _report_progress(self, input_ids: torch.Tensor) -> None:
        self.reported = self.steps
        for row, command in list(self.running.items()):
            if row in self.running:
                offset = self.scheduler.ledger.candidates[row].length
                tokens = self._completion(input_ids, row)[offset:]
                now = time.perf_counter()
                event = TokensArrived(row, command.segment, offset, tokens, None, now)
                self._execute(self.scheduler.handle(event), input_ids)

    def _end(self, row: int, source: Any, reason: FinishReason) -> None:
        command = self.running.pop(row)
        self._alive[row] = False
        tokens = self._completion(source, row)
        event = CandidateEnded(row, command.segment, 0, tokens, None, reason, time.perf_counter())
        self._execute(self.scheduler.handle(event), source)

    def _execute(self, commands: Sequence[Command], source: Any) -> None:
        for command in commands:
            if isinstance(command, Abort):
                self._end(command.candidate_id, source, FinishReason.ABORT)
            else:
                self.running[command.candidate_id] = command


@contextmanager
def stopping_criterion(model: Any, criterion: StoppingCriteria) -> Iterator[None]:
    """
    Adds a criterion to every `generate` call of a model, for callers that can't pass one.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model whose `generate` is called inside the context.
        criterion (`StoppingCriteria`):
            Stops rows.
    """
    own = vars(model).get("generate")  # a user may have wrapped it as well
    model.generate = partial(model.generate, stopping_criteria=StoppingCriteriaList([criterion]))
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own
