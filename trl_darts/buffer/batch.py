"""`Batch`: what TRL scores next, and what is known of it before TRL asks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..engines.batch import PromptBatch
from ..telemetry.metrics import ratio_metrics
from ..training.conversations import Outcome
from ..training.rows import Ages, KeptRows, Tokens, forget_stale_logprobs, mask_fillers, mask_stale
from .feed import Rows


logger = get_logger(__name__)

CHANGED_PROMPTS = (
    "Prompts have other tokens than when they were decoded, as with a date in the chat template, or a subclass that "
    "changes them in `_generate`. Rows are trained on with the tokens of then. Change prompts in the data set or in "
    "`_tokenize_prompts`."
)


@dataclass(frozen=True)
class Prompts:
    """Prompts of this process as TRL hands them to `_generate_single_turn`, one per row."""

    ids: list[Tokens]
    num_generations: int
    images: Any
    fields: Any

    def gather(self, process_index: int) -> PromptBatch:
        """Returns the prompts of all processes."""
        return PromptBatch.gather(self.ids, self.num_generations, process_index, self.images, self.fields)


@dataclass
class Batch:
    """
    A batch on this process. What is unset is computed when TRL asks for it: completions are sampled once it has
    tokenized the prompts, and rewards once it has decoded the completions.
    """

    inputs: Rows = field(default_factory=list)
    fillers: frozenset[int] = frozenset()  # filler rows, over all processes
    kept: KeptRows | None = None  # completions that were decoded before
    prompts: Sequence[Tokens] = ()  # of each row, with which they were decoded
    ages: Ages = ()  # of each row
    max_age: int | None = None  # tokens of older policies are not trained on
    rewards: Callable[[], torch.Tensor] | None = None  # of groups that are scored by themselves; shape (N·M, F)
    numbers: Sequence[int] | None = None  # of the rows in a buffer, see `RewardStream`
    outcome: Outcome | None = None  # of TRL's tool loop, where it was played during the rollout

    def __post_init__(self) -> None:
        if self.kept is not None and self.max_age is not None:
            forget_stale_logprobs(self.kept, self.ages, self.max_age)

    def completions(self, prompts: list[Tokens]) -> KeptRows | None:
        """
        Returns the rows that were decoded before, `None` if there are none. They are trained on with the prompts of
        then, which replace TRL's in place.
        """
        for row, own in zip(prompts, self.prompts, strict=False):
            if row != own:
                row[:] = own
                logger.warning_once(CHANGED_PROMPTS)
        return self.kept

    def mask(self, output: dict[str, Any], accelerator: Accelerator) -> dict[str, float]:
        """Takes the loss weight from rows and tokens that are not trained on, in place. Returns metrics."""
        mask_fillers(output, self.fillers, accelerator)
        if self.max_age is not None:
            mask_stale(output, self.ages, self.max_age, accelerator)
        return {} if self.kept is None else ratio_metrics(output, accelerator)
