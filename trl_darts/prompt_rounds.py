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

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

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
        mid_batch (`Callable`):
            Whether the last batch is still in use: several optimizer steps can share one.
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
        mid_batch: Callable[[], bool],
    ) -> None:
        self.policy = policy
        self.admission = admission
        self.num_generations = num_generations
        self.feed = feed
        self.accelerator = accelerator
        self.agree = agree
        self.tokenize = tokenize
        self.mid_batch = mid_batch
        self.buffer = policy.buffer()
        self.rows: dict[int, dict[str, Any]] = {}  # of the data set, by entry ID, on every process
        self.prompt_ids: dict[int, list[int]] = {}
        self.harvested: HarvestedRows | None = None  # of the last round, on every process
        self.trained: dict[int, tuple[dict[str, Any], list[int]]] = {}  # its rows of the data set and prompts, by ID
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
            return self._idle([entry.entry_id for entry, _ in harvest.dropped])
        repeated = dict(zip(range(len(groups), size), cycle(range(len(groups))), strict=False))
        rows = {place: [_row(row) for row in group.rows] for place, group in enumerate(groups)}
        kept = KeptRows.of_groups(rows, repeated, self.num_generations)
        own = [group.entry.entry_id for group in groups]
        places = {entry.entry_id: place for place, entry in enumerate(self.round.entries)}
        states = [entry.state.value for entry in self.buffer.entries.values()]
        return HarvestedRows(
            kept,
            entry_ids=own + [own[other] for other in repeated.values()],
            left=own + [entry.entry_id for entry, _ in harvest.dropped],
            ages=[
                [(self.step - version, count) for version, count in row.versions]
                for group in groups
                for row in group.rows
            ],
            states={state: states.count(state) for state in ("waiting", "partial", "complete")},
            first_rows={places[i]: row * self.num_generations for row, i in enumerate(own) if i in places},
        )

    def _idle(self, dropped: list[int]) -> HarvestedRows:
        """The last batch again, without weight: prompts were dropped, and the epoch has more steps than are needed."""
        last = self.harvested
        if last is None:
            raise GenerationError("There is nothing to train on: no prompt came to its end.")
        kept = last.kept
        logprobs = None if kept.logprobs is None else [[UNKNOWN] * len(tokens) for tokens in kept.completion_ids]
        repeats = {row: row for row in range(len(kept.completion_ids))}
        again = KeptRows(kept.completion_ids, logprobs, repeats)
        return HarvestedRows(again, last.entry_ids, dropped, [], last.states, {})

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
        if harvested.entry_ids[0] in self.rows:  # else the last batch is repeated
            self.trained = {i: (self.rows[i], self.prompt_ids[i]) for i in {*harvested.entry_ids}}
        for entry_id in harvested.left:
            del self.rows[entry_id], self.prompt_ids[entry_id]
            self.buffer.entries.pop(entry_id, None)  # of a process that only counts
        inputs = [dict(self.trained[i][0]) for i in harvested.entry_ids for _ in range(self.num_generations)][mine]
        return inputs, harvested.kept[mine]

    def forget(self) -> None:
        """Begins a training with an empty buffer."""
        self.buffer.entries.clear()
        self.rows, self.prompt_ids, self.trained, self.harvested = {}, {}, {}, None


def _row(row: SampledCandidate) -> tuple[list[int], list[float] | None]:
    partial = row.partial
    return list(partial.tokens), None if partial.logprobs is None else list(partial.logprobs)
