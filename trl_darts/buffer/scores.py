"""
Rewards of groups that wait for the others of their batch: for `drop_uniform_groups` (dynamic sampling,
[DAPO](https://huggingface.co/papers/2503.14476), Section 3.2), and for `stream_rewards` with a rollout buffer.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from ..training.rows import Tokens, total_rewards
from ..trl_compat import replaced
from .batches import BufferedBatches
from .rounds import Informative


@dataclass
class GroupScore:
    """Rewards of a group's rows, of shape `(M, F)`, and what reward functions logged for them, by column."""

    rewards: torch.Tensor
    extra: dict[str, list[Any]]


@dataclass
class Share:
    """The rows that a process scores, and where all rows of each new group are among the gathered rewards."""

    rows: list[tuple[int, int]]  # entry ID and index
    completion_ids: list[Tokens]
    places: dict[int, list[int]]  # by entry ID


class GroupScores:
    """
    Has TRL score groups before it scores their batch, and gives it these rewards then: no function is called twice for
    a row. All methods are called on every process at once.

    `calculate` is TRL's `_calculate_rewards`, which is given the numbers of the rows first, see
    [`BufferedBatches.input_of`]. `decode` makes completions as TRL has them of prompts and tokens. `owners` tells, on
    the main process, which process has begun to score which group.
    """

    def __init__(
        self,
        trainer: Any,
        batches: BufferedBatches,
        decode: Callable[[list[Any], list[Tokens]], list[Any]],
        owners: Callable[[], Mapping[int, int]],
    ) -> None:
        self.trainer = trainer
        self.batches = batches
        self._decode = decode
        self._owners = owners
        self._scores: dict[int, GroupScore] = {}  # by entry ID
        self._scored: dict[int, list[list[int]]] = {}  # the rows that they are of, on the main process
        self._metrics: Counter[str] = Counter()
        self._audits: dict[str, float] = {}  # estimates so far

    def clear(self) -> None:
        """Begins a training, whose prompts may have the same IDs again."""
        self._scores.clear()
        self._scored.clear()
        self._metrics.clear()

    def drop_uniform(self) -> None:
        """Scores what the last round completed. Groups without a spread leave the buffer."""
        if not (new := self._score_new()):
            return
        uniform = [entry_id for entry_id in new if self._is_uniform(self._scores[entry_id].rewards)]
        for entry_id in uniform:
            del self._scores[entry_id]
        self.batches.drop_uniform(uniform, len(new))
        self._metrics["darts/uniform/rounds"] += 1
        self._metrics["darts/uniform/sampled"] += len(new)
        self._metrics["darts/uniform/dropped"] += len(uniform)

    def settle(self, is_last: bool) -> None:
        """Scores what the last round completed. Unsettled groups wait for a long round, but not in the last batch."""
        self._score_new()

        def is_uniform(entry_id: int) -> bool:
            return self._is_uniform(self._scores[entry_id].rewards)

        def rewards_of(entry_id: int) -> list[float]:
            return list(total_rewards(self._scores[entry_id].rewards, self.trainer.reward_weights).tolist())

        settled = self.batches.main.broadcast(lambda: self.batches.settle(rewards_of, is_uniform, is_last))
        self.batches.forget(settled.second)
        self._metrics["darts/deferral/deferred"] += len(settled.deferred)
        self._metrics["darts/deferral/sampled"] += settled.num_scored
        self._audits = {f"darts/audit/{name}": value for name, value in settled.audits.items()}

    def serve(self, num_rows: int) -> torch.Tensor:
        """
        The rewards of the batch that was taken, of shape `(N·M, F)`; this process has `num_rows` of its rows. Groups
        that wait for a later batch are scored too: what was begun while they decoded is ready.
        """
        last = self.batches.last
        self._score_new()
        scores = [self._scores[entry_id] for entry_id in last.entry_ids]
        waiting = self.batches.rows.keys() | last.entry_ids  # the last batch may have to stand for another
        self._scores = {entry_id: score for entry_id, score in self._scores.items() if entry_id in waiting}
        first = self.batches.main.index * num_rows
        for name in sorted({name for score in scores for name in score.extra}):
            values = [value for score in scores for value in score.extra.get(name, [None] * len(score.rewards))]
            self.trainer._pending_extra_logs[name].extend(values[first : first + num_rows])
        return torch.cat([score.rewards for score in scores])

    def pop_metrics(self, num_missing: int) -> dict[str, float]:
        """Rounds and prompts of the batch, see docs/metrics.md; `num_missing` groups are filler rows."""
        counts, self._metrics = self._metrics, Counter()
        is_dynamic = isinstance(self.batches.policy, Informative)
        counts["darts/uniform/missing" if is_dynamic else "darts/deferral/missing"] = num_missing
        return {**{name: float(count) for name, count in counts.items()}, **self._audits}

    def _score_new(self) -> list[int]:
        """
        Scores new groups that wait for their batch, or were taken for it, and returns their IDs. Each process scores
        as many groups, since TRL gathers them: the last one is repeated where they are fewer.
        """
        share = self.batches.main.scatter(self._split)
        if not share.places:
            return []
        rewards, columns = self._score(share)
        for entry_id, places in share.places.items():
            extra = {name: [values[place] for place in places] for name, values in columns.items()}
            self._scores[entry_id] = GroupScore(rewards[places], extra)
        return list(share.places)

    def _split(self) -> list[Share]:
        """
        Splits groups without rewards, or that were sampled again since: each process's own, and a part of those
        without owner. On the main process.
        """
        complete = self.batches.complete()
        new = {i: rows for i, rows in complete.items() if self._scored.get(i) != rows}
        self._scored = complete
        groups: list[list[int]] = [[] for _ in range(self.batches.main.num_processes)]
        owners = self._owners()
        for entry_id in sorted(new, key=lambda entry_id: entry_id not in owners):
            (groups[owners[entry_id]] if entry_id in owners else min(groups, key=len)).append(entry_id)
        most, size = max(map(len, groups)), self.batches.num_generations
        places = {
            entry_id: list(range((process * most + place) * size, (process * most + place + 1) * size))
            for process, own in enumerate(groups)
            for place, entry_id in enumerate(own)
        }
        fill = next((own[-1:] for own in groups if own), [])
        shares = []
        for own in groups:
            ids = own + (own[-1:] or fill) * (most - len(own))
            rows = [(entry_id, index) for entry_id in ids for index in range(size)]
            shares.append(Share(rows, [new[entry_id][index] for entry_id, index in rows], places))
        return shares

    def _score(self, share: Share) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """Returns rewards and logged columns of the rows of all processes, in the order of the processes."""
        numbers = [entry_id * self.batches.num_generations + index for entry_id, index in share.rows]
        inputs = [copy.deepcopy(self.batches.input_of(number)) for number in numbers]  # functions may change them
        prompts, completion_ids = [row["prompt"] for row in inputs], [list(ids) for ids in share.completion_ids]
        logged: dict[str, list[Any]] = defaultdict(list)
        with replaced(self.trainer, "_pending_extra_logs", logged):
            completions = self._decode(prompts, completion_ids)
            rewards = self.trainer._score_rows(numbers, inputs, prompts, completions, completion_ids)
        shares = gather_object([dict(logged)])
        return rewards, {
            name: [value for own in shares for value in own.get(name, [None] * len(share.rows))]
            for name in sorted({name for own in shares for name in own})
        }

    def _is_uniform(self, rewards: torch.Tensor) -> bool:
        """Whether TRL would give all rows the advantage 0, as it does to those that no function has scored."""
        weighted = (rewards * self.trainer.reward_weights.to(rewards.device)).cpu()
        if self.trainer.multi_objective_aggregation == "sum_then_normalize":
            weighted = weighted[~weighted.isnan().all(dim=1)].nansum(dim=1, keepdim=True)
        known = [column[~column.isnan()] for column in weighted.T]
        return all(len(own) < 2 or bool(torch.isclose(own.std(), torch.zeros(()))) for own in known)
