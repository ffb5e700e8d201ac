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
    """A group's rows, their rewards, of shape `(M, F)`, and what reward functions logged for them, by column."""

    completion_ids: list[Tokens]
    rewards: torch.Tensor
    extra: dict[str, list[Any]]


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
        self._metrics: Counter[str] = Counter()
        self._audits: dict[str, float] = {}  # estimates so far

    def clear(self) -> None:
        """Begins a training, whose prompts may have the same IDs again."""
        self._scores.clear()
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
        self._metrics["darts/deferral/deferred"] += settled.num_deferred
        self._metrics["darts/deferral/sampled"] += settled.num_scored
        self._audits = {f"darts/audit/{name}": value for name, value in settled.audits.items()}

    def serve(self, num_rows: int) -> torch.Tensor:
        """
        The rewards of the batch that was taken, of shape `(N·M, F)`; this process has `num_rows` of its rows. Groups
        that wait for a later batch are scored too: what was begun while they decoded is ready.
        """
        last = self.batches.last
        self._score_new(last.groups)
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

    def _score_new(self, taken: Mapping[int, list[Tokens]] | None = None) -> dict[int, list[Tokens]]:
        """
        Scores groups that wait for their batch, or were `taken` for it, and have no rewards or were sampled anew;
        returns them. Each process scores as many groups, since TRL gathers them: the last one is repeated where they
        are fewer.
        """
        waiting, owners = self.batches.main.broadcast(lambda: (self.batches.complete(), dict(self._owners())))
        new = {
            entry_id: rows
            for entry_id, rows in {**waiting, **(taken or {})}.items()
            if entry_id not in self._scores or self._scores[entry_id].completion_ids != rows
        }
        if not new:
            return {}
        shares = self._split(new, owners)
        size = max(map(len, shares))
        fill = next(share for share in shares if share)
        num_generations = self.batches.num_generations
        mine = shares[self.batches.main.index]
        mine = mine + (mine or fill)[-num_generations:] * ((size - len(mine)) // num_generations)
        rewards, columns = self._score(mine, new)
        places = {row: process * size + place for process, own in enumerate(shares) for place, row in enumerate(own)}
        for entry_id, completion_ids in new.items():
            own = [places[entry_id, index] for index in range(len(completion_ids))]
            extra = {name: [values[place] for place in own] for name, values in columns.items()}
            self._scores[entry_id] = GroupScore(completion_ids, rewards[own], extra)
        return new

    def _split(self, new: Mapping[int, list[Tokens]], owners: Mapping[int, int]) -> list[list[tuple[int, int]]]:
        """Entry ID and index of the rows of each process: whole groups, its own and a part of those without owner."""
        shares: list[list[tuple[int, int]]] = [[] for _ in range(self.batches.main.num_processes)]
        for entry_id in sorted(new, key=lambda entry_id: entry_id not in owners):
            share = shares[owners[entry_id]] if entry_id in owners else min(shares, key=len)
            share.extend((entry_id, index) for index in range(len(new[entry_id])))
        return shares

    def _score(
        self, rows: list[tuple[int, int]], groups: Mapping[int, list[Tokens]]
    ) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """Rewards and logged columns of these rows of this process, and of as many of each other one, in one."""
        numbers = [entry_id * self.batches.num_generations + index for entry_id, index in rows]
        inputs = [copy.deepcopy(self.batches.input_of(number)) for number in numbers]  # functions may change them
        prompts, completion_ids = [row["prompt"] for row in inputs], [list(groups[i][index]) for i, index in rows]
        logged: dict[str, list[Any]] = defaultdict(list)
        with replaced(self.trainer, "_pending_extra_logs", logged):
            completions = self._decode(prompts, completion_ids)
            rewards = self.trainer._score_rows(numbers, inputs, prompts, completions, completion_ids)
        shares = gather_object([dict(logged)])
        return rewards, {
            name: [value for own in shares for value in own.get(name, [None] * len(rows))]
            for name in sorted({name for own in shares for name in own})
        }

    def _is_uniform(self, rewards: torch.Tensor) -> bool:
        """Whether TRL would give all rows the advantage 0, as it does to those that no function has scored."""
        weighted = (rewards * self.trainer.reward_weights.to(rewards.device)).cpu()
        if self.trainer.multi_objective_aggregation == "sum_then_normalize":
            weighted = weighted[~weighted.isnan().all(dim=1)].nansum(dim=1, keepdim=True)
        known = [column[~column.isnan()] for column in weighted.T]
        return all(len(own) < 2 or bool(torch.isclose(own.std(), torch.zeros(()))) for own in known)
