"""
Which groups teach something: rewards of those that wait for the others of their batch, for `drop_uniform_groups`
(dynamic sampling, [DAPO](https://huggingface.co/papers/2503.14476), Section 3.2).
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from ..engines.hf_generate import replaced
from .batches import BufferedBatches


Tokens = list[int]


@dataclass
class GroupScore:
    """A group's rewards, of shape `(M, F)`, and what reward functions logged for its rows, by column."""

    rewards: torch.Tensor
    extra: dict[str, list[Any]]


class GroupJudge:
    """
    Has TRL score groups before their batch is full, and gives it these rewards when it scores the batch: no function
    is called twice for a row. All methods are called on every process at once.

    Args:
        trainer ([`DARTSGRPOTrainer`]):
            With TRL's `reward_weights`, and what reward functions log.
        batches ([`BufferedBatches`]):
            Where the groups wait.
        calculate (`Callable`):
            TRL's `_calculate_rewards`.
        decode (`Callable[[list, list[Tokens]], list]`):
            Completions as TRL has them, from prompts and tokens.
    """

    def __init__(
        self,
        trainer: Any,
        batches: BufferedBatches,
        calculate: Callable[..., torch.Tensor],
        decode: Callable[[list[Any], list[Tokens]], list[Any]],
    ) -> None:
        self.trainer = trainer
        self.batches = batches
        self._calculate = calculate
        self._decode = decode
        self._scores: dict[int, GroupScore] = {}  # by entry ID
        self._metrics: Counter[str] = Counter()

    def judge(self) -> None:
        """Scores what the last round completed. Groups without a spread leave the buffer."""
        complete = self.batches.main.broadcast(self.batches.completions)
        new = {entry_id: rows for entry_id, rows in complete.items() if entry_id not in self._scores}
        if not new:
            return
        self._score(new)
        uniform = [entry_id for entry_id in new if self._is_uniform(self._scores[entry_id].rewards)]
        for entry_id in uniform:
            del self._scores[entry_id]
        self.batches.drop_uniform(uniform, len(new))
        self._metrics["darts/uniform/rounds"] += 1
        self._metrics["darts/uniform/sampled"] += len(new)
        self._metrics["darts/uniform/dropped"] += len(uniform)

    def _score(self, groups: dict[int, list[Tokens]]) -> None:
        """Each process scores as many rows: TRL gathers them. The last row is repeated where they don't divide."""
        rows = [(entry_id, tokens) for entry_id, own in groups.items() for tokens in own]
        main = self.batches.main
        share = -(-len(rows) // main.num_processes)
        padded = rows + rows[-1:] * (share * main.num_processes - len(rows))
        mine = padded[main.index * share : (main.index + 1) * share]
        inputs = [dict(self.batches.rows[entry_id]) for entry_id, _ in mine]
        prompts, completion_ids = [row["prompt"] for row in inputs], [tokens for _, tokens in mine]
        logged: dict[str, list[Any]] = defaultdict(list)
        with replaced(self.trainer, "_pending_extra_logs", logged):
            rewards = self._calculate(inputs, prompts, self._decode(prompts, completion_ids), completion_ids)
        shares = gather_object([dict(logged)])
        columns = {
            name: [value for own in shares for value in own.get(name, [None] * share)]
            for name in sorted({name for own in shares for name in own})
        }
        start = 0
        for entry_id, own in groups.items():
            place = slice(start, start := start + len(own))
            extra = {name: values[place] for name, values in columns.items()}
            self._scores[entry_id] = GroupScore(rewards[place].clone(), extra)

    def _is_uniform(self, rewards: torch.Tensor) -> bool:
        """Whether TRL would give all rows the advantage 0, as it does to those that no function has scored."""
        weighted = (rewards * self.trainer.reward_weights.to(rewards.device)).cpu()
        if self.trainer.multi_objective_aggregation == "sum_then_normalize":
            weighted = weighted[~weighted.isnan().all(dim=1)].nansum(dim=1, keepdim=True)
        known = [column[~column.isnan()] for column in weighted.T]
        return all(len(own) < 2 or bool(torch.isclose(own.std(), torch.zeros(()))) for own in known)

    def serve(self, num_rows: int) -> torch.Tensor:
        """The rewards of the batch that was taken, of shape `(N·M, F)`; this process has `num_rows` of its rows."""
        scores = [self._scores[entry_id] for entry_id in self.batches.last.entry_ids]
        self._scores = {}
        first = self.batches.main.index * num_rows
        for name in sorted({name for score in scores for name in score.extra}):
            values = [value for score in scores for value in score.extra.get(name, [None] * len(score.rewards))]
            self.trainer._pending_extra_logs[name].extend(values[first : first + num_rows])
        return torch.cat([score.rewards for score in scores])

    def pop_metrics(self, num_missing: int) -> dict[str, float]:
        """Rounds and prompts of the batch, see docs/metrics.md; `num_missing` groups are filler rows."""
        counts, self._metrics = self._metrics, Counter()
        counts["darts/uniform/missing"] = num_missing
        return {name: float(count) for name, count in counts.items()}
