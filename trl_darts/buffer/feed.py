"""
A look ahead in the data loader: schedules that start more prompts than a batch has take them from the batches to come.

The training loop still gets every item, in its turn. It needs no more of them than the tick of a step, since the
prompts of a batch come from the rollout buffer. Each batch of prompts comes as `repeats` items in a row, as TRL's
sampler has it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME


Rows = list[dict[str, Any]]


class PromptFeed:
    """
    The batches of prompts of an epoch, as many ahead of the training loop as are asked for; the loader has `repeats`
    items of each.
    """

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.num_taken = 0  # batches of this epoch that have been handed out by `pull`
        self._source: Any = None
        self._wrapped: Any = None
        self._position = 0  # items of this epoch that the loader has yielded
        self._ahead: deque[Rows] = deque()  # items that the training loop has not got yet
        self._new: deque[Rows] = deque()  # batches that `pull` has not handed out yet
        self._restored = False
        self._step_begin = 0  # `position` before the optimizer step in progress

    @property
    def position(self) -> int:
        """Items of this epoch that the training loop has got."""
        return self._position - len(self._ahead)

    def state(self, mid_epoch: bool) -> dict[str, int]:
        """What `restore` needs to go on in the middle of this epoch, or with the next one."""
        within = mid_epoch or self.position == 0  # prompts may have been pulled for the first step
        return {"position": self.position, "num_taken": self.num_taken} if within else {}

    def rewind(self) -> None:
        """Takes back what the training loop has got for the optimizer step in progress, which is given up."""
        self._position = self._step_begin
        self._ahead.clear()

    def restore(self, position: int = 0, num_taken: int = 0) -> None:
        """
        Goes on in the middle of an epoch, with the next iterator: the training loop had got `position` items, which
        are skipped, and `num_taken` batches had been pulled.
        """
        self._source = self._wrapped = None
        self._ahead.clear()
        self._new.clear()
        self._position, self.num_taken, self._restored = position, num_taken, True

    def follow(self, source: Iterator[Rows]) -> Iterator[Rows]:
        """
        What the training loop iterates in the place of the loader's iterator: the same items. A new one begins an
        epoch. Called once for each optimizer step.
        """
        if source is not self._source:
            if not self._restored:
                self._position = self.num_taken = 0
            self._source, self._restored = source, False
            self._ahead.clear()
            self._new.clear()
            self._wrapped = self._items(source)
        self._step_begin = self.position
        return self._wrapped

    def arrived(self) -> list[Rows]:
        """Batches whose turn has come, and that have not been pulled."""
        batches = list(self._new)
        self.num_taken += len(batches)
        self._new.clear()
        return batches

    def pull(self) -> Rows | None:
        """The next batch of prompts, of the future if need be; `None` at the end of the epoch."""
        while not self._new:
            item = self._fetch()
            if item is None:
                return None
            self._ahead.append(item)
        self.num_taken += 1
        return self._new.popleft()

    def resume(self, checkpoint: Path, state: dict[str, int]) -> None:
        """Continues from a checkpoint with the feed's saved state. Without one, the loop has skipped what it had."""
        if state.keys() == {"position", "num_taken"}:
            self.restore(**state)

    def passes_behind(self, checkpoint: Path) -> int:
        """Whole passes over the data that a training has behind it which goes on from a checkpoint."""
        return int(_epoch(checkpoint))

    def _items(self, source: Iterator[Rows]) -> Iterator[Rows]:
        while source is self._source:
            item = self._ahead.popleft() if self._ahead else self._fetch()
            if item is None:
                return
            yield item

    def _fetch(self) -> Rows | None:
        item = next(self._source, None)
        if item is None:
            return None
        batch, place = divmod(self._position, self.repeats)
        if place == 0 and batch >= self.num_taken + len(self._new):
            self._new.append(item)
        self._position += 1
        return item


class EndlessFeed:
    """
    The batches of prompts of one pass over the data after another, whatever the training loop's epochs: a batch may
    take other prompts, or more, than the loop's next ones. The loop gets ticks alone, as many as it wants. `loader`
    returns the training's loader, whose items have `num_rows` rows, and `limit` the batches of the whole training, if
    each prompt is trained on once per pass.
    """

    def __init__(
        self, repeats: int, num_rows: int, loader: Callable[[], Any], limit: Callable[[], float] = lambda: math.inf
    ) -> None:
        self.repeats = repeats
        self.num_rows = num_rows
        self.num_passes = 0  # that are over
        self.num_taken = 0  # batches of this pass that have been pulled
        self.num_pulled = 0  # batches of all passes
        self._loader = loader
        self._limit = limit
        self._batches: Any = None

    def state(self, mid_epoch: bool) -> dict[str, int]:
        return {"num_passes": self.num_passes, "num_taken": self.num_taken, "num_pulled": self.num_pulled}

    def restore(self, num_passes: int = 0, num_taken: int = 0, num_pulled: int = 0) -> None:
        """Goes on after so many passes and so many batches of the next one."""
        self.num_passes, self.num_taken, self.num_pulled = num_passes, num_taken, num_pulled
        self._batches = None

    def resume(self, checkpoint: Path, state: dict[str, int]) -> None:
        """Continues from a checkpoint with the feed's saved state. Without one, after as many batches as were due."""
        if state.keys() == self.state(True).keys():
            self.restore(**state)
        else:
            loader, epoch = self._loader(), _epoch(checkpoint)
            size = len(loader) // self.repeats if hasattr(loader, "__len__") else 0
            self.restore(int(epoch), round(epoch % 1 * size), round(epoch * size))

    def follow(self, source: Iterator[Rows]) -> Iterator[Rows]:
        """What the training loop iterates in the place of the loader's iterator, which is left alone."""
        return repeat([{}] * self.num_rows)

    def rewind(self) -> None:
        """Nothing to take back: the loop got ticks alone."""

    def arrived(self) -> list[Rows]:
        """None: ticks bring no prompts."""
        return []

    def pull(self) -> Rows | None:
        """The next batch of prompts; `None` after the limit, or where the loader has none at all."""
        if self.num_pulled >= self._limit():
            return None
        if self._batches is None:
            self._batches = islice(self._loader(), self.num_taken * self.repeats, None, self.repeats)
        batch = next(self._batches, None)
        if batch is None and self.num_taken:
            self.restore(self.num_passes + 1, 0, self.num_pulled)
            return self.pull()
        self.num_taken, self.num_pulled = self.num_taken + 1, self.num_pulled + 1
        return batch

    def passes_behind(self, checkpoint: Path) -> int:
        return self.num_passes


def _epoch(checkpoint: Path) -> float:
    """Returns the passes over the data that a checkpoint's training loop has behind it."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).epoch or 0.0


def skip_passes(sampler: Any, num_passes: int) -> None:
    """
    Draws the orders of the passes over the data that a resumed training has behind it. TRL 1.16 does not: its sampler
    begins with the first epoch's order again, and the part of an epoch that is skipped is then not the part that was
    trained on. It can go when TRL's `RepeatSampler` knows the epoch.
    """
    if getattr(sampler, "shuffle", False):
        for _ in range(num_passes):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
