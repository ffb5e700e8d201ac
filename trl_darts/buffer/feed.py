"""
The order of the data: batches of prompts, one pass over the data after another, for every schedule.

The training loop does not iterate the data loader itself. It gets ticks, or the batches in their turn, so that an
iterator that looks ahead, a resume and data without a length have one count, that of batches.

Invariants (`tests/buffer/test_feed.py` checks each under its name, over random passes, looks ahead and resumes):

- pulled_once: each pass yields each of its batches once, whatever the training loop has got.
- resumed_as_saved: a restored feed continues exactly as the saved one would have.
- epochs_end: the loop's epochs end with the passes, also if the data has no length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from accelerate import skip_first_batches

from .loop import LoopPosition


Rows = list[dict[str, Any]]


class PromptFeed:
    """
    Batches of prompts, and what the training loop iterates instead of the data loader.

    The loader's items come in `repeats` equal ones, as TRL's sampler has them. With a `tick`, the loop gets that
    instead of batches, which are pulled. A pass begins when all batches of the last one were trained on, or at once if
    the feed is `endless`. `limit` is the number of batches of the whole training that can be pulled.
    """

    def __init__(
        self,
        loop: LoopPosition,
        tick: Rows | None = None,
        endless: bool = False,
        limit: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._loop = loop
        self._tick = tick
        self._endless = endless or tick is None
        self._limit = limit
        self.restore()

    def state(self, num_finished: int) -> dict[str, Any]:
        """
        Returns what `restore` needs. If the loop gets the batches, those after the first `num_finished` come again:
        they were pulled for an optimizer step that is given up.
        """
        passes, start, pulled = self.num_passes, self.num_pulled - self.num_taken, self.num_pulled
        if self._tick is None:
            over = [end for end in self._ends if end <= num_finished]
            passes, start, pulled = self._first_pass + len(over), (over or [self._first_start])[-1], num_finished
        ends = [end for end in self._ends if end > num_finished]
        return {"num_passes": passes, "num_taken": pulled - start, "num_pulled": pulled, "ends": ends}

    def restore(self, num_passes: int = 0, num_taken: int = 0, num_pulled: int = 0, ends: Sequence[int] = ()) -> None:
        """Continues after so many passes and so many batches of the next one. `num_pulled` counts over all passes."""
        self.num_passes, self.num_taken, self.num_pulled = num_passes, num_taken, num_pulled
        self._first_pass, self._first_start = num_passes, num_pulled - num_taken
        self._ends = list(ends)  # values of `num_pulled` at which passes ended
        self._rest: Iterator[Rows] | None = None  # of this pass
        self._next: Rows | None = None  # a batch of it that was looked at
        self._has_begun = False  # a pass has, since the restore
        self._source: Any = None
        self._epoch: Iterator[Rows] = iter(())
        self._num_items = 0  # that the training loop has got
        self._item: Rows | None = None

    def restore_after(self, num_batches: int) -> None:
        """Continues after so many batches, of which no state was saved."""
        if self._loop.has_length:
            passes, taken = divmod(num_batches, max(1, self._loop.batches_per_epoch))
            self.restore(passes, taken, num_batches)
            return
        self.restore()
        for _ in range(num_batches):  # the length of a pass is unknown
            if not self._look_ahead():
                self._begin_pass()
                self._look_ahead()
            self._take()
        self._has_begun = False

    def random_state_is_restored(self) -> None:
        """
        Draws what a pass has drawn that began before the random state was restored. Without a length, transformers
        restores it after it has got the first items, also at the end of a pass.
        """
        if self._has_begun:
            torch.empty((), dtype=torch.int64).random_()

    def begin(self, has_batch: bool = False) -> None:
        """
        The training loop begins. Within a batch, the rest of its items is the batch again, unless the trainer has it
        already.
        """
        self._source, self._num_items = None, self._loop.num_items
        self._item = [{}] if has_batch and self._tick is None else self._tick

    def end_pass(self) -> None:
        """Leaves out the rest of the pass, since the training loop has ended its epoch early."""
        if self.num_taken:
            self._next = None
            self._begin_pass()

    # For the training loop

    def follow(self, source: Any) -> Iterator[Rows]:
        """Returns what the training loop iterates instead of `source`, the loader's iterator of an epoch."""
        if source is not self._source:
            self._source, self._epoch = source, self._items()
        return self._epoch

    def _items(self) -> Iterator[Rows]:
        begin = self._num_items
        while True:
            batch, place = divmod(self._num_items, self._loop.repeats)
            if place == 0 and self._num_items > begin and self._ends_before(batch):
                return
            if self._tick is None and (place == 0 or self._item is None):
                self._item = self.pull()
            if self._item is None:
                return
            self._num_items += 1
            yield self._item

    def _ends_before(self, batch: int) -> bool:
        """Whether an epoch ends before a batch, counted over all epochs. The loop counts itself if it has a length."""
        if self._loop.has_length:
            return False
        if batch >= self.num_pulled:
            self._look_ahead()
        return batch in self._ends

    # For rollouts

    def pull(self) -> Rows | None:
        """
        Returns this process's rows of the next batch. `None` after the limit, or if the data has no rows, or at the
        end of a pass whose batches were not all trained on. Must be called on every process.
        """
        if self.num_pulled >= self._limit():
            return None
        if not self._look_ahead():
            if not self.num_taken or not (self._endless or self._loop.batch >= self.num_pulled):
                return None
            self._begin_pass()
            if not self._look_ahead():
                return None
        return self._take()

    def _take(self) -> Rows | None:
        self.num_taken, self.num_pulled = self.num_taken + 1, self.num_pulled + 1
        batch, self._next = self._next, None
        return batch

    def _look_ahead(self) -> bool:
        """Whether this pass has another batch."""
        if self._rest is None:
            self._rest = self._open()
        if self._next is None:
            self._next = next(self._rest, None)
            if self._next is None and self.num_pulled not in self._ends:
                self._ends.append(self.num_pulled)
        return self._next is not None

    def _begin_pass(self) -> None:
        self.num_passes, self.num_taken, self._rest = self.num_passes + 1, 0, None

    def _open(self) -> Iterator[Rows]:
        """Iterates the rest of the pass."""
        loader = self._loop.loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.num_passes)
        if not self.num_taken:
            self._has_begun = True
            return islice(loader, 0, None, self._loop.repeats)
        loader = skip_first_batches(loader, self.num_taken * self._loop.repeats)
        # PyTorch draws a seed for workers when an iterator begins. In the uninterrupted run that was before the
        # checkpoint, whose random state is restored by now.
        with torch.random.fork_rng(devices=[]):
            iterator = iter(loader)
            first = list(islice(iterator, 1))
        return islice(chain(first, iterator), 0, None, self._loop.repeats)


def skip_passes(sampler: Any, num_passes: int) -> None:
    """
    Draws the orders of the passes over the data before a resume. TRL 1.16 does not: its sampler begins with the first
    epoch's order again, and the part of an epoch that is skipped is then not the part that was trained on. Remove this
    when TRL's `RepeatSampler` knows the epoch.
    """
    if getattr(sampler, "shuffle", False):
        for _ in range(num_passes):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
