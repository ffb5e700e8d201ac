"""
Where transformers' training loop is, in items of the data loader: one per micro-batch, `repeats` per batch of prompts.

Items are counted. They can't be derived from optimizer steps, because the last step of an epoch may take fewer.
"""

import math
from typing import Any

from transformers.trainer_utils import has_length


class LoopPosition:
    """
    The position of a training loop.

    `num_items` were trained on, and the first `num_done` of them by complete optimizer steps, of which each takes
    `accumulation` items.
    """

    def __init__(self, repeats: int, accumulation: int) -> None:
        self.repeats = repeats
        self.accumulation = accumulation
        self.num_items = self.num_done = 0
        self.loader: Any = None  # once the loop has it

    def begin(self, num_items: int = 0) -> None:
        """The loop begins after so many items."""
        self.num_items = self.num_done = num_items

    def advance(self, ends_step: bool) -> None:
        """An item was trained on, which `ends_step` if it is the last one of an optimizer step."""
        self.num_items += 1
        if ends_step:
            self.num_done = self.num_items

    @property
    def batch(self) -> int:
        """Index of the batch in use, over all epochs."""
        return self.num_items // self.repeats

    @property
    def is_within_batch(self) -> bool:
        """Whether the complete optimizer steps end within a batch."""
        return self.num_done % self.repeats != 0

    @property
    def has_length(self) -> bool:
        return has_length(self.loader)

    @property
    def batches_per_epoch(self) -> int:
        """0 without a length."""
        return len(self.loader) // self.repeats if self.has_length else 0

    @property
    def _steps_per_epoch(self) -> int:
        return max(1, math.ceil(len(self.loader) / self.accumulation))

    def epochs(self, num_steps: int) -> int:
        """Returns the epochs that so many optimizer steps complete. Without a length, transformers counts none."""
        return num_steps // self._steps_per_epoch if self.has_length else 0

    def items(self, num_steps: int) -> int:
        """Returns how many items the first optimizer steps take."""
        if not self.has_length:
            return num_steps * self.accumulation
        epochs, rest = divmod(num_steps, self._steps_per_epoch)
        return epochs * len(self.loader) + rest * self.accumulation

    def num_batches(self, num_steps: int) -> int:
        """Returns how many batches so many optimizer steps take, of which the last may be used in part."""
        return math.ceil(self.items(num_steps) / self.repeats)
