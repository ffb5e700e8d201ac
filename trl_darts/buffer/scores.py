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

from ..training.rows import Tokens, is_uniform, total_rewards
from ..trl_compat import replaced
from .batches import BufferedBatches
from .buffer import GroupScore


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
        self._counts: Counter[str] = Counter()
        self._estimates: dict[str, float] = {}

    def clear(self) -> None:
        """Begins a training."""
        self._counts.clear()

    def judge(self, is_last: bool) -> None:
        """Scores what the last round completed. The policy decides which groups leave, or wait for a long round."""
        self._score_new()
        outcome = self.batches.main.broadcast(lambda: self.batches.judge(is_last))
        self.batches.buffer.remove(outcome.left)
        self._counts.update(outcome.counts)
        self._estimates = outcome.estimates

    def serve(self) -> torch.Tensor:
        """
        Returns the rewards of the batch that was taken, of shape `(N·M, F)`. Groups that wait for a later batch are
        scored too: what was begun while they decoded is ready.
        """
        self._score_new()
        scores: list[Any] = [self.batches.trained[entry_id].score for entry_id in self.batches.last.entry_ids]
        for name in sorted({name for score in scores for name in score.logged}):
            values = [value for score in scores for value in score.logged.get(name, [None] * len(score.rewards))]
            self.trainer._pending_extra_logs[name].extend(values[self.batches.mine])
        return torch.cat([score.rewards for score in scores])

    def pop_metrics(self) -> dict[str, float]:
        """Returns what happened to the groups of the batch, see docs/metrics.md."""
        counts, self._counts = self._counts, Counter()
        return {**{name: float(count) for name, count in counts.items()}, **self._estimates}

    def _score_new(self) -> None:
        """
        Scores new groups that wait for their batch, or were taken for it. Each process scores as many groups, since
        TRL gathers them: the last one is repeated where they are fewer.
        """
        share = self.batches.main.scatter(self._split)
        if not share.places:
            return
        rewards, columns = self._score(share)
        for entry_id, places in share.places.items():
            logged = {name: [values[place] for place in places] for name, values in columns.items()}
            own = rewards[places]
            totals = total_rewards(own, self.trainer.reward_weights).tolist()
            self.batches.entry(entry_id).score = GroupScore(own, logged, totals, is_uniform(own, self.trainer))

    def _split(self) -> list[Share]:
        """
        Splits groups without rewards: each process's own, and a part of those without owner. On the main process.
        """
        new = {entry.entry_id: [list(row.partial.tokens) for row in entry.candidates] for entry in
               self.batches.unscored()}  # fmt: skip
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
