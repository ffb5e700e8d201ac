"""
Batches that are not the loader's: prompts enter the rollout buffer, rounds decide which of them are sampled, and those
that are done become the rows of TRL's next batch.

```
loader ──▶ PromptFeed ──▶ rows, on every process ─────────────────────────┐
                └───────▶ RolloutBuffer, on the main process ──▶ rollout ──┴──▶ `Batch` of each process
```

Each prompt is one [`BufferEntry`] on every process. Only the main process knows what has been sampled for it, and the
others get their rows of a batch.
"""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ..engines.batch import PromptBatch
from ..engines.main_process import MainProcess
from ..errors import GenerationError
from ..policy.skipping import UniformPrompts
from ..scheduling import (
    Admission,
    AdmissionPolicy,
    BatchStop,
    GroupPlan,
    PromptInfo,
    RolloutResult,
    prompt_key,
)
from ..training.rows import UNKNOWN, BufferedRows, KeptRows
from .batch import Batch
from .buffer import BufferEntry, Lifecycle, Round, SampledCandidate
from .feed import PromptFeed, Rows
from .loop import LoopPosition
from .round_policy import Outcome, RoundPolicy


logger = get_logger(__name__)


class BufferedBatches:
    """
    Decides what is sampled and what is trained on, for schedules with a [`RoundPolicy`], which `make_policy` makes.
    `tokenize` is TRL's `_tokenize_prompts`. `loop` is the position of the training loop: a batch can be used by
    several optimizer steps, and a step can use several batches.
    """

    def __init__(
        self,
        make_policy: Callable[[], RoundPolicy],
        admission: AdmissionPolicy,
        num_generations: int,
        feed: PromptFeed,
        main: MainProcess,
        tokenize: Callable[[list[Any]], tuple[Any, ...]],
        loop: LoopPosition,
        make_skips: Callable[[], UniformPrompts | None] = lambda: None,
    ) -> None:
        self._make_policy = make_policy
        self.admission = admission
        self.num_generations = num_generations
        self.feed = feed
        self.main = main
        self._tokenize = tokenize
        self.loop = loop
        self._make_skips = make_skips
        self.clear()

    def clear(self) -> None:
        """Begins a training with an empty buffer."""
        self.policy = self._make_policy()
        self.buffer = self.policy.buffer()
        self.skips = self._make_skips()
        self._num_skipped = self._num_pulled = 0  # prompts, since the last batch
        self.last: Any = None  # `BufferedRows` of the last batch
        self.trained: dict[int, BufferEntry] = {}  # its prompts
        # Prompts of batches that an optimizer step in progress trains on, with the item of the loop that ends each.
        self._unfinished: list[tuple[int, list[BufferEntry]]] = []
        self._whole: Any = None  # the `BufferedRows` of all processes, on the main process
        self._taken: dict[int, BufferEntry] = {}  # the prompts of `_whole`
        self._round: Any = None  # the `Round` in progress, on the main process
        self._dropped: list[int] = []  # prompts that could not be completed, since the last batch
        self._version = 0  # of the policy that samples the round in progress: optimizer steps before it

    # Prompts come in

    def next_round(self, most: float = math.inf) -> PromptBatch | None:
        """
        Adds the prompts that the next round needs, and decides it. Called on every process at once. Returns what has
        to be sampled, each prompt in as many rows as it yields; `None` for nothing.
        No more than `most` prompts are in the buffer.
        """
        while self.main.broadcast(lambda: len(self.buffer) < most and self.policy.lacking(self.buffer)):
            batch = self.feed.pull()
            if batch is None:
                break
            self._add(batch)
        entry_ids = self.main.broadcast(self._decide)
        return self.prompts(entry_ids) if entry_ids else None

    def prompts(self, entry_ids: Sequence[int]) -> PromptBatch:
        """Returns these prompts, each in as many rows as it yields."""
        entries = self.buffer.entries
        rows = [entries[entry_id].tokens for entry_id in entry_ids for _ in range(self.num_generations)]
        return PromptBatch.alone(rows, self.num_generations, ids=entry_ids)

    def _add(self, batch: Rows) -> None:
        """The groups of a batch straddle processes; the first row of each stands for it."""
        first = self.main.index * len(batch)
        own = [row for place, row in enumerate(batch) if (first + place) % self.num_generations == 0]
        rows = gather_object(own)
        tokens = self.main.broadcast(lambda: self._tokenize([row["prompt"] for row in rows])[0])
        prompts = [PromptInfo(prompt_key(ids), len(ids)) for ids in tokens]
        skipped = self._skipped(prompts)
        for place in range(len(rows)):
            if place not in skipped:
                self.policy.enter(self.buffer, prompts[place], rows[place], tokens[place])

    def _skipped(self, prompts: Sequence[PromptInfo]) -> set[int]:
        """Returns the places of prompts that are not sampled this time."""
        if (skips := self.skips) is None:
            return set()
        skipped: set[int] = self.main.broadcast(lambda: {i for i, own in enumerate(prompts) if skips.skips(own.key)})
        self._num_pulled += len(prompts)
        self._num_skipped += len(skipped)
        return skipped

    def _decide(self) -> list[int]:
        self._round = self.policy.next(self.buffer)
        return [entry.entry_id for entry in self._round.entries]

    # A round, on the main process

    def plan(self, step: int) -> tuple[Admission, list[GroupPlan]]:
        """How many candidates each prompt gets, and which go on, after `step` optimizer steps."""
        self._version = step
        return self.policy.begin(self.buffer, self._round, self.num_generations, self.admission)

    def taken(self, result: RolloutResult) -> PromptBatch:
        """Makes a round of the groups taken from a rollout without an end, and returns their prompts."""
        ids = sorted([*(group.plan.group_id for group in result.groups), *result.dropped])
        self._round = Round([self.buffer.entries[entry_id] for entry_id in ids], self.policy.num_groups, len(ids))
        return self.prompts(ids)

    @property
    def batch_stop(self) -> BatchStop:
        return self._round.batch_stop

    def collect(self, step: int, result: RolloutResult | None = None) -> BufferedRows:
        """
        What is trained on now, after `step` optimizer steps and a rollout, or where nothing had to be sampled; or
        [`GenerationError`]. Where uniform groups leave first, a rollout alone yields no rows.
        """
        self._dropped += [entry.entry_id for entry in self.buffer.absorb(result, self._version)]
        if result is not None and self.policy.scores_first:
            return BufferedRows([], None)
        dropped, self._dropped = self._dropped, []
        error = self.policy.none_left(len(dropped))
        # Where groups leave for their rewards, further prompts came for those that were dropped.
        trained = self.policy.take(self.buffer, self._round, 0 if self.policy.scores_first else len(dropped))
        if not trained and error is not None:
            raise GenerationError(error)
        self._taken = {entry.entry_id: entry for entry in trained}
        return self._rows_of(trained, dropped, step) if trained else self._repeat_last(dropped)

    def _rows_of(self, trained: Sequence[BufferEntry], dropped: list[int], step: int) -> BufferedRows:
        repeated = dict(zip(range(len(trained), self._round.num_groups), cycle(range(len(trained))), strict=False))
        rows = {place: [_row(row) for row in entry.candidates] for place, entry in enumerate(trained)}
        own = [entry.entry_id for entry in trained]
        states = [entry.state.value for entry in self.buffer.entries.values()]
        kept = KeptRows.of_groups(rows, repeated, self.num_generations)
        return BufferedRows(
            kept.completion_ids,
            kept.logprobs,
            kept.fillers,
            entry_ids=own + [own[other] for other in repeated.values()],
            left=own + dropped,
            ages=[
                [(step - version, count) for version, count in row.versions]
                for entry in trained
                for row in entry.candidates
            ],
            states={state: states.count(state) for state in self.policy.shown_states},
            is_long=self.policy.was_long if self.policy.has_long_rounds else None,
        )

    def _repeat_last(self, dropped: list[int]) -> BufferedRows:
        """The last batch again as filler rows: prompts were dropped, and the epoch has more steps than are needed."""
        last = self.last
        if last is None or not last.entry_ids:
            raise GenerationError("There is nothing to train on: no prompt came to its end.")
        logprobs = None if last.logprobs is None else [[UNKNOWN] * len(tokens) for tokens in last.completion_ids]
        fillers = frozenset(range(len(last.completion_ids)))
        return BufferedRows(last.completion_ids, logprobs, fillers, last.entry_ids, dropped, [], last.states)

    # Groups are scored

    def entry(self, entry_id: int) -> BufferEntry:
        """Returns a prompt that waits, is in the batch that was taken, or was in the last one."""
        return next(own[entry_id] for own in (self.buffer.entries, self._taken, self.trained) if entry_id in own)

    def input_of(self, row: int) -> dict[str, Any]:
        """The data of a row, by its prompt's ID times `num_generations`, and its index in the group."""
        return self.entry(row // self.num_generations).row

    def unscored(self) -> list[BufferEntry]:
        """Complete prompts without rewards that wait for their batch, or are in the last one. On the main process."""
        complete = [*self.buffer.select(Lifecycle.COMPLETE), *self.trained.values()]
        return [entry for entry in complete if entry.score is None]

    def judge(self, is_last: bool) -> Outcome:
        """Decides about the scored groups of the round that is over. Called on the main process."""
        outcome = self.policy.judge(self.buffer, self._round, is_last)
        if self.skips is not None:
            for entry in self._round.entries:  # that leave; `observe` hears of the others
                if entry.entry_id in outcome.left and entry.audit_of is None and entry.score is not None:
                    self.skips.observe(entry.prompt.key, entry.score.is_uniform)
        for warning in outcome.warnings:
            logger.warning(warning)
        return outcome

    def observe(self, is_uniform: Callable[[slice], bool]) -> None:
        """Learns from the last batch that was taken: `is_uniform` tells whether the rewards of some rows are equal."""
        if self.skips is None or self.last is None:
            return
        size = self.num_generations
        for place, entry_id in enumerate(self.last.entry_ids):
            if place * size not in self.last.fillers:
                rows = slice(place * size, (place + 1) * size)
                self.skips.observe(self.trained[entry_id].prompt.key, is_uniform(rows))

    def pop_skip_metrics(self) -> dict[str, float]:
        """Returns what was skipped since the last batch, see docs/metrics.md."""
        num_skipped, num_pulled = self._num_skipped, self._num_pulled
        self._num_skipped = self._num_pulled = 0
        return {"darts/skip/skipped_ratio": num_skipped / num_pulled} if num_pulled else {}

    # Rows go out

    def shares(self, rows: BufferedRows) -> list[BufferedRows]:
        """Returns the rows of each process, for `finish`. On the main process."""
        self._whole = rows
        return rows.shares([len(rows.completion_ids) // self.main.num_processes] * self.main.num_processes)

    def finish(self, rows: BufferedRows, max_age: int | None, serve: Callable[[], torch.Tensor] | None) -> Batch:
        """
        Returns this process's rows of a batch, which leaves the buffer. `serve` returns its rewards, where groups are
        scored by themselves. Called on every process at once.
        """
        self.last = self._whole if self.main.is_here else rows
        entries = self._taken if self.main.is_here else self.buffer.entries
        if rows.entry_ids[0] in entries:  # else the last batch is repeated
            self.trained = {entry_id: entries[entry_id] for entry_id in rows.entry_ids}
            self._note([entry for entry_id, entry in self.trained.items() if entry_id in rows.left])
        self.buffer.remove(rows.left)
        own = [self.trained[entry_id] for entry_id in rows.entry_ids for _ in range(self.num_generations)][self.mine]
        inputs = [copy.deepcopy(entry.row) for entry in own]  # functions may change them
        size, prompts, ages = self.num_generations, [entry.tokens for entry in own], rows.ages[self.mine]
        numbers = [entry_id * size + index for entry_id in rows.entry_ids for index in range(size)][self.mine]
        return Batch(inputs, rows.fillers, rows, prompts, ages, max_age, serve, numbers)

    def _note(self, entries: list[BufferEntry]) -> None:
        """Notes the prompts of a new batch."""
        self._unfinished = [(end, own) for end, own in self._unfinished if end > self.loop.num_done]
        self._unfinished.append(((self.loop.batch + 1) * self.loop.repeats, entries))

    def unfinished(self, num_items: int) -> list[BufferEntry]:
        """Returns the prompts of batches that don't end within the first `num_items` of the loop."""
        return [entry for end, entries in self._unfinished if end > num_items for entry in entries]

    @property
    def mine(self) -> slice:
        """This process's rows in the last batch, whose groups straddle processes."""
        size = len(self.last.entry_ids) * self.num_generations // self.main.num_processes
        return slice(self.main.index * size, (self.main.index + 1) * size)


def _row(row: SampledCandidate) -> tuple[list[int], list[float] | None]:
    partial = row.partial
    return list(partial.tokens), None if partial.logprobs is None else list(partial.logprobs)
