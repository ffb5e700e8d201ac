"""
Decodes with transformers' `generate`, controlled by a stopping criterion.

`generate` decodes a fixed batch of rows, one token per step. After each step, the criterion reports the rows that
ended, and marks aborted rows as done. A done row still takes part in the forward passes, but the loop ends once all
rows are done. With beam search, a candidate has several rows. It can be aborted, but its end is only known at the end
of `generate`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ...scheduling import FinishReason
from ...trl_compat import replaced
from .share import Share


PROGRESS_INTERVAL = 16  # steps between two reports of progress, if the schedule needs them


class SchedulerCriterion(StoppingCriteria):
    """Reports the progress of `generate` to the scheduler, and marks aborted rows as done."""

    def __init__(self, share: Share, eos_token_ids: Sequence[int]) -> None:
        self.share = share
        self.eos_token_ids = torch.tensor(list(eos_token_ids))
        self.prompt_length: int | None = None
        self.steps = 0
        self.reported = 0  # step of the last report of progress
        self._row_of = {slot.candidate_id: row for row, slot in enumerate(share.slots)}
        self._alive = torch.ones(len(share.slots), dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # input_ids: (B * num_beams, P + steps)
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1] - 1
        self.steps = input_ids.shape[1] - self.prompt_length
        num_beams = len(input_ids) // len(self._alive)
        first_beams = input_ids[::num_beams]
        if num_beams == 1:  # otherwise it ends one beam, which may not be the selected one
            ended = torch.isin(input_ids[:, -1], self.eos_token_ids.to(input_ids.device)).cpu() & self._alive
            for row in ended.nonzero().flatten().tolist():
                self._end(row, input_ids, FinishReason.STOP)
        if self.share.needs_progress and self.steps - self.reported >= PROGRESS_INTERVAL:
            self.reported = self.steps
            for candidate_id in self.share.running:
                self.share.progress(candidate_id, self.steps)
        for candidate_id in self.share.exchange():
            self._end(self._row_of[candidate_id], first_beams, FinishReason.ABORT)
        return (~self._alive).repeat_interleave(num_beams).to(input_ids.device)

    def finish(self, completions: Sequence[list[int]]) -> None:
        """Reports the candidates still running when `generate` has returned: at the length limit, or with beams."""
        eos = set(self.eos_token_ids.tolist())
        for candidate_id in sorted(self.share.running):
            tokens = completions[self._row_of[candidate_id]]
            stopped = bool(tokens) and tokens[-1] in eos
            self.share.end(candidate_id, tokens, None, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _end(self, row: int, input_ids: torch.Tensor, reason: FinishReason) -> None:
        self._alive[row] = False
        tokens = input_ids[row, self.prompt_length :].tolist()
        self.share.end(self.share.slots[row].candidate_id, tokens, None, reason)


def stopping_criterion(model: Any, criterion: StoppingCriteria) -> AbstractContextManager[None]:
    """Inside this context, every `generate` call of the model uses the criterion, for callers that can't pass one."""
    criteria = StoppingCriteriaList([criterion])
    return replaced(model, "generate", partial(model.generate, stopping_criteria=criteria))
