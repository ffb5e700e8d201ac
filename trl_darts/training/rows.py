"""
The rows that TRL trains on. Filler rows repeat those of another group in place of a group that could not be completed,
and have zero loss weight.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, cycle
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator

from ..scheduling import RolloutResult


Tokens = list[int]
Packed = tuple[np.ndarray, np.ndarray]  # length of each row, and the values of all rows
Ages = Sequence[Sequence[tuple[int, int]]]  # per row, runs of tokens: (age of the policy in steps, number of tokens)
UNKNOWN = float("nan")  # TRL's value for an unknown log-prob, whose token gets no importance sampling correction


@dataclass
class KeptRows:
    """
    Completions in the order of the groups. `logprobs` is `None` if the engine returns none. `fillers` are the indices
    of the filler rows in the batch of all processes, also in a slice of the rows.
    """

    completion_ids: list[Tokens]  # (N·M, ≤ max_completion_length)
    logprobs: list[list[float]] | None
    fillers: frozenset[int] = frozenset()

    @classmethod
    def of_result(cls, result: RolloutResult, num_generations: int) -> "KeptRows":
        """Collects the rows of a rollout. Each dropped group repeats another one, in turn."""
        groups = {group.plan.group_id: [(row.tokens, row.logprobs) for row in group.rows] for group in result.groups}
        return cls.of_groups(groups, repeated_groups(result), num_generations)

    @classmethod
    def of_groups(
        cls,
        groups: Mapping[int, Sequence[tuple[Any, list[float] | None]]],
        repeated: Mapping[int, int],
        num_generations: int,
    ) -> "KeptRows":
        """
        Builds the rows from tokens and log-probs by the group's position in the batch. `repeated` maps the position of
        a missing group to that of the group that it repeats.
        """
        rows = {place: list(own) for place, own in groups.items()}
        for place, other in repeated.items():
            rows[place] = [(tokens, [UNKNOWN] * len(tokens)) for tokens, _ in groups[other]]
        flat = [row for place in sorted(rows) for row in rows[place]]
        given = all(logprobs is not None for _, logprobs in flat)
        fillers = frozenset(place * num_generations + i for place in repeated for i in range(num_generations))
        return cls(
            [tokens for tokens, _ in flat], [logprobs or [] for _, logprobs in flat] if given else None, fillers
        )

    def shares(self, sizes: Sequence[int]) -> list[Self]:
        """Returns the rows of each process."""
        ends = list(accumulate(sizes))
        slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        logprobs = self.logprobs
        return [
            replace(self, completion_ids=self.completion_ids[own], logprobs=logprobs and logprobs[own])
            for own in slices
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Rows travel between processes as arrays, a tenth of the size of lists."""
        packed = _pack(self.completion_ids, np.int32), self.logprobs and _pack(self.logprobs, np.float32)
        return {**vars(self), "completion_ids": packed[0], "logprobs": packed[1]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.completion_ids = _unpack(state["completion_ids"])
        self.logprobs = state["logprobs"] and _unpack(state["logprobs"])


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
    is_long: bool | None = None  # whether the round was a long one, with tail batching


def repeated_groups(result: RolloutResult) -> dict[int, int]:
    """Returns the ID of the group that each dropped one repeats, in turn, by its own."""
    return dict(zip(sorted(result.dropped), cycle(group.plan.group_id for group in result.groups), strict=False))


def _pack(rows: Sequence[Sequence[Any]], dtype: Any) -> Packed:
    return np.array([len(row) for row in rows]), np.fromiter(chain.from_iterable(rows), dtype)


def _unpack(packed: Packed) -> list[Any]:
    lengths, values = packed
    return [row.tolist() for row in np.split(values, lengths.cumsum()[:-1])] if len(lengths) else []


def total_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of each row's rewards, of shape `(B,)`. NaN if no function scored the row."""
    totals = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    totals[rewards_per_func.isnan().all(dim=1)] = torch.nan
    return totals


def is_uniform(rewards_per_func: torch.Tensor, trainer: Any) -> bool:
    """
    Whether TRL would give all rows of a group the advantage 0, as it does to those that no function has scored.
    `rewards_per_func` has the shape `(M, F)`.
    """
    weighted = (rewards_per_func * trainer.reward_weights.to(rewards_per_func.device)).cpu()
    if trainer.multi_objective_aggregation == "sum_then_normalize":
        weighted = weighted[~weighted.isnan().all(dim=1)].nansum(dim=1, keepdim=True)
    known = [column[~column.isnan()] for column in weighted.T]
    return all(len(own) < 2 or bool(torch.isclose(own.std(), torch.zeros(()))) for own in known)


def forget_filler_rewards(rewards: torch.Tensor, fillers: Collection[int]) -> torch.Tensor:
    """
    Sets the rewards of filler rows to NaN, so that TRL ignores them in its metrics and in the mean and the standard
    deviation that scale advantages. `rewards` has the shape `(N·M, F)`, over all processes. A batch that only has
    filler rows keeps its rewards, because the mean of no rewards is NaN.
    """
    if 0 < len(fillers) < len(rewards):
        rewards = rewards.clone()
        rewards[sorted(fillers)] = torch.nan
    return rewards


def mask_fillers(output: dict[str, Any], fillers: Collection[int], accelerator: Accelerator) -> None:
    """
    Gives filler rows zero loss weight: no advantage, and no token in the loss or its normalization. Changes the output
    of TRL's `_generate_and_score_completions` in place. Must be called on every process.
    """
    if not fillers:
        return
    mask = output["completion_mask"]
    first = accelerator.process_index * len(mask)
    rows = [row - first for row in fillers if first <= row < first + len(mask)]
    mask[rows] = 0
    output["advantages"][rows] = 0.0
    if "sampling_per_token_logps" in output:  # NaN * 0 is NaN
        output["sampling_per_token_logps"][rows] = 0.0
    _count_items(output, accelerator)


def forget_stale_logprobs(rows: KeptRows, ages: Ages, max_age: int) -> None:
    """
    Sets the log-probs of tokens that [`mask_stale`] will mask to NaN, so that they don't count in TRL's correction
    either, which by default is one ratio per row.
    """
    if rows.logprobs is not None:
        for row, start, end in _stale_runs(ages, max_age):
            rows.logprobs[row][start:end] = [UNKNOWN] * (end - start)


def mask_stale(output: dict[str, Any], ages: Ages, max_age: int, accelerator: Accelerator) -> None:
    """
    Masks tokens in the loss that were sampled by a policy older than `max_age`. Later tokens still attend to them.
    Called like [`mask_fillers`], with the ages of this process's rows.
    """
    mask = output.get("tool_mask", torch.ones_like(output["completion_mask"]))
    for row, start, end in _stale_runs(ages, max_age):
        mask[row, start:end] = 0
        if "sampling_per_token_logps" in output:  # NaN * 0 is NaN
            output["sampling_per_token_logps"][row, start:end] = 0.0
    output["tool_mask"] = mask
    _count_items(output, accelerator)


def _stale_runs(ages: Ages, max_age: int) -> Iterator[tuple[int, int, int]]:
    """Yields row, start and end of each run of tokens older than `max_age`."""
    for row, runs in enumerate(ages):
        start = 0
        for age, count in runs:
            if age > max_age:
                yield row, start, start + count
            start += count


def _count_items(output: dict[str, Any], accelerator: Accelerator) -> None:
    mask = output["completion_mask"]
    weights = mask * output["tool_mask"] if "tool_mask" in output else mask
    output["num_items_in_batch"] = accelerator.gather(weights.sum()).sum()
