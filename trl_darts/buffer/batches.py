"""
Batches that are not the loader's: prompts enter the rollout buffer, rounds decide which of them are sampled, and those
that are done become the rows of TRL's next batch.

```
loader ──▶ PromptFeed ──▶ rows, on every process                          ┌──▶ `inputs` of this process
                └───────▶ RolloutBuffer, on the main process ──▶ rollout ──┴──▶ its completions, once TRL asks
```

Only the main process knows what has been sampled, and the others get their rows of a batch. All know the rows of the
data set, since any may have to train on them.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ..engines.batch import PromptBatch
from ..engines.main_process import MainProcess
from ..errors import GenerationError
from ..scheduling import (
    Admission,
    AdmissionPolicy,
    BatchStop,
    GroupPlan,
    PromptInfo,
    RolloutResult,
    prompt_key,
)
from ..training.rows import UNKNOWN, KeptRows
from .buffer import BufferEntry, Lifecycle, Round, SampledCandidate
from .feed import PromptFeed, Rows
from .loop import LoopPosition
from .rounds import Informative, RoundPolicy, Settled, Steady, TailBatching


logger = get_logger(__name__)

Prompt = tuple[dict[str, Any], list[int]]  # its row of the data set, and its tokens


@dataclass
class BufferedRows(KeptRows):
    """
    The rows of a batch that the buffer has given to the optimizer: all of them on the main process, and on the others
    their own. The other fields are those of the whole batch.
    """

    entry_ids: list[int] = field(default_factory=list)  # (N,), the prompt of each group
    left: list[int] = field(default_factory=list)  # prompts that have left the buffer, dropped ones included
    # Of each row but the filler rows: how many steps old the policy was that sampled how many tokens in a row.
    ages: list[list[tuple[int, int]]] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)  # number of prompts in the buffer, by lifecycle state
    # First row of each group that ended in this round, by its `group_id` in it.
    first_rows: dict[int, int] = field(default_factory=dict)
    is_long: bool | None = None  # whether the round was a long one, with tail batching

    @property
    def groups(self) -> dict[int, list[list[int]]]:
        """Completions of each prompt, on the main process."""
        size = len(self.completion_ids) // max(1, len(self.entry_ids))
        return {
            entry_id: self.completion_ids[place * size : (place + 1) * size]
            for place, entry_id in enumerate(self.entry_ids)
        }


@dataclass(frozen=True)
class Settlement:
    """What became of a round's groups once they were scored."""

    deferred: list[int]
    num_scored: int
    second: list[int]  # second entries of audited prompts, which are not trained on
    audits: dict[str, float]  # estimates so far, see [`Audits`]


class BufferedBatches:
    """
    Decides what is sampled and what is trained on, for schedules with a [`RoundPolicy`]. `tokenize` is TRL's
    `_tokenize_prompts`. `loop` is the position of the training loop: a batch can be used by several optimizer steps,
    and a step can use several batches.
    """

    def __init__(
        self,
        policy: RoundPolicy,
        admission: AdmissionPolicy,
        num_generations: int,
        feed: PromptFeed,
        main: MainProcess,
        tokenize: Callable[[list[Any]], tuple[Any, ...]],
        loop: LoopPosition,
    ) -> None:
        self.policy = policy
        self.admission = admission
        self.num_generations = num_generations
        self.feed = feed
        self.main = main
        self._tokenize = tokenize
        self.loop = loop
        self.buffer = policy.buffer()
        self.rows: dict[int, dict[str, Any]] = {}  # of the data set, by entry ID, on every process
        self.prompt_ids: dict[int, list[int]] = {}
        self.last: Any = None  # `BufferedRows` of the last batch
        self.trained: dict[int, Prompt] = {}  # its prompts, by ID
        # Prompts of batches that an optimizer step in progress trains on, with the item of the loop that ends each.
        self._unfinished: list[tuple[int, dict[int, Prompt]]] = []
        self._whole: Any = None  # the `BufferedRows` of all processes, on the main process
        self._round: Any = None  # the `Round` in progress, on the main process
        self._dropped: list[int] = []  # prompts that could not be completed, since the last batch
        self._version = 0  # of the policy that samples the round in progress: optimizer steps before it

    @property
    def scores_first(self) -> bool:
        """Whether groups are scored before the batch is taken, since those without a spread of rewards leave it."""
        return isinstance(self.policy, Informative | Settled)

    # Prompts come in

    def next_round(self, ahead: bool = False, most: float = math.inf) -> PromptBatch | None:
        """
        Adds the prompts that the next round needs, and decides it. Called on every process at once. Returns what has
        to be sampled, each prompt in as many rows as it yields; `None` for nothing.

        A round that is decided `ahead` of its turn has all prompts of its batch, or waits for its turn: the prompts
        that the buffer lacks at the end of a pass come with the next one. No more than `most` prompts are in the
        buffer.
        """
        while self.main.broadcast(lambda: len(self.buffer) < most and self.policy.lacking(self.buffer)):
            batch = self.feed.pull()
            if batch is None:
                break
            self._add(batch)
        if ahead and len(self.buffer) < self.policy.num_groups:
            return None
        entry_ids = self.main.broadcast(self._decide)
        return self.prompts(entry_ids) if entry_ids else None

    def prompts(self, entry_ids: Sequence[int]) -> PromptBatch:
        """Returns these prompts, each in as many rows as it yields."""
        rows = [self.prompt_ids[entry_id] for entry_id in entry_ids for _ in range(self.num_generations)]
        return PromptBatch.alone(rows, self.num_generations)

    def _add(self, batch: Rows) -> None:
        """The groups of a batch straddle processes; the first row of each stands for it."""
        first = self.main.index * len(batch)
        own = [row for place, row in enumerate(batch) if (first + place) % self.num_generations == 0]
        rows = gather_object(own)
        tokens = self.main.broadcast(lambda: self._tokenize([row["prompt"] for row in rows])[0])
        ids = self.buffer.enter([PromptInfo(prompt_key(ids), len(ids)) for ids in tokens])
        self.rows.update(zip(ids, rows, strict=True))
        self.prompt_ids.update(zip(ids, tokens, strict=True))
        for second in self.buffer.second_samples(ids):
            audited: Any = second.audit_of
            self.rows[second.entry_id] = self.rows[audited]
            self.prompt_ids[second.entry_id] = self.prompt_ids[audited]

    def _decide(self) -> list[int]:
        self._round = self.policy.next(self.buffer)
        return [entry.entry_id for entry in self._round.entries]

    # A round, on the main process

    def plan(self, step: int) -> tuple[Admission, list[GroupPlan]]:
        """How many candidates each prompt gets, and which go on, after `step` optimizer steps."""
        self._version = step
        return self.buffer.begin(self._round, self.num_generations, self.admission)

    def taken(self, result: RolloutResult) -> RolloutResult:
        """Makes a round of the groups taken from a rollout without an end, whose IDs are those of prompts."""
        ids = sorted([*(group.plan.group_id for group in result.groups), *result.dropped])
        places = {entry_id: place for place, entry_id in enumerate(ids)}
        self._round = Round([self.buffer.entries[entry_id] for entry_id in ids], self.policy.num_groups, len(ids))
        groups = [replace(g, plan=replace(g.plan, group_id=places[g.plan.group_id])) for g in result.groups]
        dropped = {places[entry_id]: reason for entry_id, reason in result.dropped.items()}
        return replace(result, groups=groups, dropped=dropped)

    @property
    def batch_stop(self) -> BatchStop:
        return self._round.batch_stop

    def collect(self, step: int, result: RolloutResult | None = None) -> BufferedRows:
        """
        What is trained on now, after `step` optimizer steps and a rollout, or where nothing had to be sampled; or
        [`GenerationError`]. Where uniform groups leave first, a rollout alone yields no rows.
        """
        self._dropped += [entry.entry_id for entry in self.buffer.absorb(self._round, result, self._version)]
        if result is not None and self.scores_first:
            return BufferedRows([], None)
        dropped, self._dropped = self._dropped, []
        num_sampled = len(dropped) + self.buffer.num_uniform
        # Where uniform groups leave, further prompts came for those that were dropped.
        trained = self.buffer.take(self._round, 0 if self.scores_first else len(dropped))
        size = self._round.num_groups
        if not trained and isinstance(self.policy, Informative):
            raise GenerationError(
                f"`drop_uniform_groups` (True) leaves nothing to train on: of {num_sampled} prompts that were sampled "
                "for this batch, none has rewards with a spread. Look at the rewards: a function that gives every "
                "answer the same teaches nothing. Or raise `max_prompt_oversampling`."
            )
        if not trained:
            return self._repeat_last(dropped)
        repeated = dict(zip(range(len(trained), size), cycle(range(len(trained))), strict=False))
        rows = {place: [_row(row) for row in entry.candidates] for place, entry in enumerate(trained)}
        own = [entry.entry_id for entry in trained]
        places = {entry.entry_id: place for place, entry in enumerate(self._round.entries)}
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
            states={state: states.count(state) for state in self._shown_states},
            first_rows={places[i]: row * self.num_generations for row, i in enumerate(own) if i in places},
            is_long=self.buffer.was_long if isinstance(self.policy, TailBatching | Settled) else None,
        )

    @property
    def _shown_states(self) -> tuple[str, ...]:
        # At any other time than a batch of a rollout without an end is taken, no prompt is in flight.
        return ("waiting", "in_flight") if isinstance(self.policy, Steady) else ("waiting", "partial", "complete")

    def _repeat_last(self, dropped: list[int]) -> BufferedRows:
        """The last batch again as filler rows: prompts were dropped, and the epoch has more steps than are needed."""
        last = self.last
        if last is None or not last.entry_ids:
            raise GenerationError("There is nothing to train on: no prompt came to its end.")
        logprobs = None if last.logprobs is None else [[UNKNOWN] * len(tokens) for tokens in last.completion_ids]
        fillers = frozenset(range(len(last.completion_ids)))
        return BufferedRows(last.completion_ids, logprobs, fillers, last.entry_ids, dropped, [], last.states)

    # Groups are scored

    @property
    def round_ids(self) -> list[int]:
        """The prompts of the round in progress, by `group_id`. On the main process."""
        return [entry.entry_id for entry in self._round.entries]

    def input_of(self, row: int) -> dict[str, Any]:
        """The data of a row, by its prompt's ID times `num_generations`, and its index in the group."""
        entry_id = row // self.num_generations
        return self.rows[entry_id] if entry_id in self.rows else self.trained[entry_id][0]

    def complete(self) -> dict[int, list[list[int]]]:
        """Completions of the prompts that wait for their batch, or are in the last one. On the main process."""
        waiting = self.buffer.select(Lifecycle.COMPLETE)
        complete = {entry.entry_id: [list(row.partial.tokens) for row in entry.candidates] for entry in waiting}
        return complete if self.last is None else complete | self.last.groups

    def drop_uniform(self, entry_ids: list[int], num_scored: int) -> None:
        """Drops groups that teach nothing, of so many prompts. Called on every process."""
        if self.main.is_here:
            self.buffer.drop_uniform(entry_ids, num_scored)
        self.forget(entry_ids)

    def forget(self, entry_ids: list[int]) -> None:
        """Removes prompts that are not trained on. Called on every process."""
        for entry_id in entry_ids:
            self.rows.pop(entry_id, None)
            self.prompt_ids.pop(entry_id, None)
            self.buffer.entries.pop(entry_id, None)

    def settle(
        self, rewards_of: Callable[[int], Sequence[float]], is_uniform: Callable[[int], bool], is_last: bool = False
    ) -> "Settlement":
        """
        Learns from the round that is over and defers its unsettled groups, unless its batch `is_last`. Called on the
        main process. `rewards_of` returns the rewards of a prompt's rows, and `is_uniform` whether they have no
        spread.
        """
        buffer, learned, policy = self.buffer, self.buffer.long_rewards, self.policy
        assert isinstance(policy, Settled)
        done = [entry for entry in self._round.entries if entry.state is Lifecycle.COMPLETE]
        own = [entry for entry in done if entry.audit_of is None]
        if self._round.long:
            rows = [row for entry in done for row in entry.candidates]
            num_uniform = sum(is_uniform(entry.entry_id) for entry in own)
            learned.observe_ends(sum(row.cut_off for row in rows), len(rows), num_uniform, len(own))
            if policy.defers and (warning := learned.pop_warning()) is not None:
                logger.warning(warning)
            for entry in own if learned.usual_length else ():  # else there was no short round yet
                lengths = [row.length for row in entry.candidates]
                learned.observe_long(entry.prompt.key, rewards_of(entry.entry_id), lengths)
            second = buffer.second_samples(entry.entry_id for entry in self._round.entries)
            self._audit(second, policy, rewards_of)
            return Settlement([], len(own), [entry.entry_id for entry in second], buffer.audits.metrics())
        deferred = [
            entry.entry_id
            for entry in own
            if policy.defers
            and not is_last
            and entry.was_cut
            and is_uniform(entry.entry_id)
            and learned.defers(entry.prompt.key, entry.entry_id)
        ]
        longest = max((row.length for entry in own for row in entry.candidates), default=0)
        learned.observe_short(longest, len(deferred), len(own))
        buffer.end_short(longest)
        buffer.defer(deferred)
        return Settlement(deferred, len(own), [], buffer.audits.metrics())

    def _audit(
        self, second: Sequence[BufferEntry], policy: Settled, rewards_of: Callable[[int], Sequence[float]]
    ) -> None:
        """Compares both samples of audited prompts with what a short round would have kept."""
        buffer = self.buffer
        for entry in second:
            first = buffer.entries.get(entry.audit_of or 0)
            if first is None or {first.state, entry.state} != {Lifecycle.COMPLETE} or not entry.usual_length:
                continue  # a server rejected one of them, or there was no short round since they entered
            rows = [*first.candidates, *entry.candidates]
            lengths, ended = [row.length for row in rows], [not row.cut_off for row in rows]
            known = [*rewards_of(first.entry_id), *rewards_of(entry.entry_id)]
            audited = policy.wait.audit(lengths, ended, known, entry.usual_length, entry.num_usual)
            buffer.audits.observe(audited)
        if not policy.defers and (warning := buffer.audits.pop_warning()) is not None:
            logger.warning(warning)

    # Rows go out

    def shares(self, rows: BufferedRows) -> list[BufferedRows]:
        """Returns the rows of each process, for `finish`. On the main process."""
        self._whole = rows
        return rows.shares([len(rows.completion_ids) // self.main.num_processes] * self.main.num_processes)

    def finish(self, rows: BufferedRows) -> Rows:
        """
        Returns TRL's `inputs` for this process's rows of a batch, which leaves the buffer. Called on every process at
        once.
        """
        self.last = self._whole if self.main.is_here else rows
        if rows.entry_ids[0] in self.rows:  # else the last batch is repeated
            self.trained = {i: (self.rows[i], self.prompt_ids[i]) for i in {*rows.entry_ids}}
            self._note(rows.left)
        for entry_id in rows.left:
            del self.rows[entry_id], self.prompt_ids[entry_id]
            self.buffer.entries.pop(entry_id, None)  # of a process that only counts
        first = self.main.index * len(rows.completion_ids)
        places = range(first, first + len(rows.completion_ids))
        ids = [rows.entry_ids[place // self.num_generations] for place in places]
        return [copy.deepcopy(self.trained[entry_id][0]) for entry_id in ids]  # functions may change them

    def _note(self, left: list[int]) -> None:
        """Notes the prompts of a new batch."""
        self._unfinished = [(end, prompts) for end, prompts in self._unfinished if end > self.loop.num_done]
        end = (self.loop.batch + 1) * self.loop.repeats
        self._unfinished.append((end, {i: self.trained[i] for i in left if i in self.trained}))

    def unfinished(self, num_items: int) -> dict[int, Prompt]:
        """Returns the prompts of batches that don't end within the first `num_items` of the loop."""
        return {i: prompt for end, prompts in self._unfinished if end > num_items for i, prompt in prompts.items()}

    def mine(self, num_rows: int) -> list[list[int]]:
        """Returns the prompt of each of this process's rows in the last batch, as it was decoded."""
        rows = [self.trained[entry_id][1] for entry_id in self.last.entry_ids for _ in range(self.num_generations)]
        return rows[self.main.index * num_rows : (self.main.index + 1) * num_rows]

    def ages(self, num_rows: int) -> list[list[tuple[int, int]]]:
        """How old the tokens of this process's rows in the last batch are, see [`BufferedRows`]."""
        return self.last.ages[self.main.index * num_rows : (self.main.index + 1) * num_rows]

    def clear(self) -> None:
        """Begins a training with an empty buffer."""
        self.buffer = self.policy.buffer()
        self.rows, self.prompt_ids, self.trained, self.last = {}, {}, {}, None
        self._whole = None
        self._round, self._dropped, self._unfinished = None, [], []


def _row(row: SampledCandidate) -> tuple[list[int], list[float] | None]:
    partial = row.partial
    return list(partial.tokens), None if partial.logprobs is None else list(partial.logprobs)
