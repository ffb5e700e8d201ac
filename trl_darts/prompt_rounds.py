"""
Batches that are not the loader's: prompts enter a buffer, rounds decide which of them are sampled, and those that are
done become the rows of TRL's next batch.

```
loader ──▶ PromptFeed ──▶ rows, on every process                          ┌──▶ `inputs` of this process
                └───────▶ RolloutBuffer, on the main process ──▶ rollout ──┴──▶ its completions, once TRL asks
```

Only the main process knows what has been sampled; all know the rows of the data set, since any may have to train on
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset

from .distributed import PromptBatch
from .errors import GenerationError
from .prompt_feed import PromptFeed, Rows
from .rows import UNKNOWN, KeptRows
from .scheduling import (
    Admission,
    AdmissionPolicy,
    GroupPlan,
    PromptInfo,
    RolloutResult,
    Round,
    RoundPolicy,
    SampledCandidate,
    prompt_key,
)
from .scheduling.buffer_state import dump, load


BUFFER_FILE = "darts_buffer.npz"
PROMPTS_FILE = "darts_prompts.parquet"

Tokenize = Callable[[list[Any]], list[list[int]]]


@dataclass
class HarvestedRows:
    """
    What a round yielded for the optimizer, on every process.

    Args:
        kept ([`KeptRows`]):
            Completions and log-probs of the whole batch.
        entry_ids (`list[int]` of shape `(N,)`):
            The prompt of each group.
        left (`list[int]`):
            Prompts that have left the buffer, also those that were dropped.
        ages (`list[list[tuple[int, int]]]` of shape `(≤ N·M,)`):
            For each row that is not a repeated one, how many optimizer steps old the policy was that sampled how many
            tokens in a row.
        states (`dict[str, int]`):
            How many prompts the buffer has now, by what has become of them.
        first_rows (`dict[int, int]`):
            First row of each group that came to its end in this round, by its `group_id` there.
    """

    kept: KeptRows
    entry_ids: list[int]
    left: list[int]
    ages: list[list[tuple[int, int]]]
    states: dict[str, int]
    first_rows: dict[int, int]

    @property
    def repeats(self) -> dict[int, int]:
        """See [`KeptRows`]."""
        return self.kept.repeats


class PromptRounds:
    """
    Decides what is sampled and what is trained on, for schedules with a [`RoundPolicy`].

    Args:
        policy ([`RoundPolicy`]):
            The schedule's.
        admission ([`AdmissionPolicy`]):
            Candidates per prompt.
        num_generations (`int`):
            M.
        feed ([`PromptFeed`]):
            The loader.
        accelerator (`Accelerator`):
            The trainer's.
        agree (`Callable`):
            Computes on the main process, for all; see [`Agreement`].
        tokenize (`Callable`):
            The token IDs of prompts.
    """

    def __init__(
        self,
        policy: RoundPolicy,
        admission: AdmissionPolicy,
        num_generations: int,
        feed: PromptFeed,
        accelerator: Accelerator,
        agree: Callable[[Callable[[], Any]], Any],
        tokenize: Tokenize,
    ) -> None:
        self.policy = policy
        self.admission = admission
        self.num_generations = num_generations
        self.feed = feed
        self.accelerator = accelerator
        self.agree = agree
        self.tokenize = tokenize
        self.buffer = policy.buffer()
        self.rows: dict[int, dict[str, Any]] = {}  # of the data set, by entry ID, on every process
        self.prompt_ids: dict[int, list[int]] = {}
        self.harvested: HarvestedRows | None = None  # of the last round, on every process
        self.round: Round | None = None  # the one in progress, on the main process
        self.step = 0  # of the optimizer: the version of the policy that samples now

    # Prompts come in

    def prepare(self, step: int) -> bool:
        """
        Takes in the prompts that the next round needs, and decides it. Called on every process at once.

        Args:
            step (`int`):
                Optimizer steps so far.

        Returns:
            `bool`: Whether anything has to be sampled; otherwise call `finish`.
        """
        self.step = step
        self.take_arrived()
        while self.agree(lambda: self.policy.lacking(self.buffer)):
            batch = self.feed.pull()
            if batch is None:
                break
            self._enter(batch)
        return self.agree(self._decide)

    def take_arrived(self) -> None:
        """Takes in batches whose turn in the training loop has come. Called on every process at once."""
        for batch in self.feed.arrived():
            self._enter(batch)

    def _enter(self, batch: Rows) -> None:
        """The groups of a batch straddle processes; the first row of each stands for it."""
        first = self.accelerator.process_index * len(batch)
        own = [row for place, row in enumerate(batch) if (first + place) % self.num_generations == 0]
        rows = gather_object(own)
        tokens = self.agree(lambda: self.tokenize([row["prompt"] for row in rows]))
        ids = self.buffer.enter([PromptInfo(prompt_key(ids), len(ids)) for ids in tokens])
        self.rows.update(zip(ids, rows, strict=True))
        self.prompt_ids.update(zip(ids, tokens, strict=True))

    # A round, on the main process

    def _decide(self) -> bool:
        self.round = self.policy.next(self.buffer)
        return bool(self.round.entries)

    def batch(self) -> PromptBatch:
        """The round's prompts, each in as many rows as it yields."""
        rows = [self.prompt_ids[entry.entry_id] for entry in self.round.entries for _ in range(self.num_generations)]
        return PromptBatch.alone(rows, None, self.num_generations)

    def begin(self) -> tuple[Admission, list[GroupPlan]]:
        """How many candidates each prompt gets, and which go on."""
        return self.buffer.begin(self.round, self.num_generations, self.admission)

    def end(self, result: RolloutResult | None) -> HarvestedRows:
        """
        What is trained on now.

        Args:
            result ([`RolloutResult`], *optional*):
                Of the rollout. `None` where nothing had to be sampled.

        Raises:
            [`GenerationError`]: If there is nothing to train on.
        """
        harvest = self.buffer.absorb(self.round, result, self.step)
        groups, size = harvest.groups, self.round.num_groups
        if not groups:
            words = harvest.dropped[0][1] if harvest.dropped else "no prompt came to its end"
            raise GenerationError(f"There is nothing to train on: {words}")
        stand_ins = [group for _, group in zip(range(size - len(groups)), cycle(groups), strict=False)]
        rows = [row for group in groups for row in group.rows]
        kept = KeptRows.of([(list(row.partial.tokens), _logprobs(row)) for row in rows])
        _repeat(kept, stand_ins, groups, self.num_generations)
        left = [group.entry.entry_id for group in groups] + [entry.entry_id for entry, _ in harvest.dropped]
        places = {entry.entry_id: place for place, entry in enumerate(self.round.entries)}
        states = [entry.state.value for entry in self.buffer.entries.values()]
        return HarvestedRows(
            kept,
            [group.entry.entry_id for group in [*groups, *stand_ins]],
            left,
            [[(self.step - version, count) for version, count in row.versions] for row in rows],
            {state: states.count(state) for state in ("waiting", "partial", "complete")},
            {
                places[g.entry.entry_id]: row * self.num_generations
                for row, g in enumerate(groups)
                if g.entry.entry_id in places
            },
        )

    # Rows go out

    def finish(self, harvested: HarvestedRows, num_rows: int) -> tuple[Rows, KeptRows]:
        """
        The part of a round's yield that this process trains on. Called on every process at once.

        Args:
            harvested ([`HarvestedRows`]):
                The yield.
            num_rows (`int`):
                Rows of each process.

        Returns:
            `tuple[list[dict], KeptRows]`: TRL's `inputs`, and their completions.
        """
        self.harvested = harvested
        mine = slice(self.accelerator.process_index * num_rows, (self.accelerator.process_index + 1) * num_rows)
        inputs = [dict(self.rows[i]) for i in harvested.entry_ids for _ in range(self.num_generations)][mine]
        for entry_id in harvested.left:
            del self.rows[entry_id], self.prompt_ids[entry_id]
            self.buffer.entries.pop(entry_id, None)  # of a process that only counts
        return inputs, harvested.kept[mine]

    # Checkpoints

    def save(self, directory: Path, mid_epoch: bool) -> None:
        """
        Writes the buffer and its prompts. Called on every process at once; the main process writes.

        Args:
            directory (`Path`):
                The checkpoint.
            mid_epoch (`bool`):
                Whether a resumed training skips what the loop has got.
        """
        self.take_arrived()
        if not self.accelerator.is_main_process:
            return
        directory.mkdir(parents=True, exist_ok=True)
        feed = [self.feed.position, self.feed.num_taken] if mid_epoch else [0, 0]
        np.savez_compressed(directory / BUFFER_FILE, **dump(self.buffer), feed=np.array(feed, np.int64))
        table = Dataset.from_list([self.rows[entry_id] for entry_id in self.buffer.entries]).data.table
        pq.write_table(table, directory / PROMPTS_FILE)

    def load(self, directory: Path, skips: bool) -> None:
        """
        Restores what `save` wrote. Called on every process.

        Args:
            directory (`Path`):
                The checkpoint.
            skips (`bool`):
                Whether the training skips what it had got of the epoch.

        Raises:
            [`StateMismatchError`]: If it is of another schedule.
        """
        with np.load(directory / BUFFER_FILE) as arrays:
            load(self.buffer, arrays)
            position, num_taken = arrays["feed"].tolist() if skips else (0, 0)
        self.feed.restore(position, num_taken)
        rows = Dataset(pq.read_table(directory / PROMPTS_FILE)).to_list()
        self.rows = dict(zip(self.buffer.entries, rows, strict=True))
        if rows:
            tokens = self.tokenize([row["prompt"] for row in rows])
            self.prompt_ids = dict(zip(self.buffer.entries, tokens, strict=True))


def _logprobs(row: SampledCandidate) -> list[float] | None:
    return None if row.partial.logprobs is None else list(row.partial.logprobs)


def _repeat(kept: KeptRows, stand_ins: Sequence[Any], groups: Sequence[Any], size: int) -> None:
    """Rows of other groups in the place of those that are missing, with log-probs that are not known."""
    for number, group in enumerate(stand_ins):
        source = next(place for place, other in enumerate(groups) if other is group)
        for index in range(size):
            row, other = (len(groups) + number) * size + index, source * size + index
            kept.completion_ids.append(kept.completion_ids[other])
            if kept.logprobs is not None:
                kept.logprobs.append([UNKNOWN] * len(kept.completion_ids[other]))
            kept.repeats[row] = other
