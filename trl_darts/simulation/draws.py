"""The lengths of a training's candidates: the same for all schedules that are compared."""

from __future__ import annotations

import math

import numpy as np

from .lengths import IntArray
from .workload import Workload


class CandidateLengths:
    """
    Draws lengths for the loader's batches, in their order.

    The i-th candidate of a prompt has the same length in an epoch under all schedules, whenever they start it and
    however many they start: it depends on the seed, the loader's batch, the place in it and i. With
    `Workload.redraws`, so has the i-th candidate of its second attempt, and so on.

    Args:
        workload ([`Workload`]):
            Has the length model.
        seed (`int`):
            Of the training.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self.seed = seed
        self.num_batches = 0

    def next_batch(self, prompts: IntArray) -> BatchLengths:
        """The loader's next batch."""
        batch = BatchLengths(self, self.num_batches, prompts)
        self.num_batches += 1
        return batch

    def draw(self, batch: int, prompts: IntArray, num_candidates: int, attempt: int) -> IntArray:
        """Lengths of shape `(len(prompts), num_candidates)`."""
        # A generator takes a seed's missing numbers for zeros, and a length model appends 0 or 1: hence the 1.
        key = (self.seed, batch, attempt + 1) if attempt else (self.seed, batch)
        return self.workload.lengths.draw(prompts, num_candidates, key)


class BatchLengths:
    """
    The lengths of one batch of the loader.

    Args:
        source ([`CandidateLengths`]):
            Draws them.
        number (`int`):
            Of the batch, counted through the training.
        prompts (`IntArray` of shape `(N,)`):
            Its prompts.
    """

    def __init__(self, source: CandidateLengths, number: int, prompts: IntArray) -> None:
        self.source = source
        self.number = number
        self.prompts = prompts
        self._attempts: dict[int, IntArray] = {}

    def all(self, num_candidates: int, log_shift: float) -> list[list[int]]:
        """Of each prompt's first candidates, moved by `log_shift`."""
        lengths = self.source.draw(self.number, self.prompts, num_candidates, 0)
        moved: list[list[int]] = _moved(lengths, log_shift).tolist()
        return moved

    def of(self, place: int, num_candidates: int, attempt: int, log_shift: float) -> list[int]:
        """Of one prompt, by its place in the batch. `num_candidates` must be the same each time."""
        lengths = self._attempts.get(attempt)
        if lengths is None:
            lengths = self.source.draw(self.number, self.prompts, num_candidates, attempt)
            self._attempts[attempt] = lengths
        moved: list[int] = _moved(lengths[place], log_shift).tolist()
        return moved


def _moved(lengths: IntArray, log_shift: float) -> IntArray:
    if not log_shift:
        return lengths
    return np.maximum(1, (lengths * math.exp(log_shift)).astype(np.int64))
