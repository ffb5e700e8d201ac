"""
The rows that a rollout hands to TRL, and the filler rows among them: those that stand in for a group that could not be
completed, and have no weight.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from accelerate import Accelerator

from ..scheduling import RolloutResult


Tokens = list[int]
Ages = Sequence[Sequence[tuple[int, int]]]  # of each row: (age of the policy, number of tokens in a row), in order
UNKNOWN = float("nan")  # TRL's value for a log-prob that is not known: such a token is not corrected for


@dataclass
class KeptRows:
    """
    Completions group by group; `logprobs` is `None` where the engine gives none.

    `fillers` are the rows that repeat those of a complete group: indices into the batch of all processes, also in a
    part of the rows.
    """

    completion_ids: list[Tokens]  # (N·M, ≤ max_completion_length)
    logprobs: list[list[float]] | None
    fillers: frozenset[int] = frozenset()

    @classmethod
    def of_result(cls, result: RolloutResult, num_generations: int) -> "KeptRows":
        """The rows of a rollout. Groups that were dropped repeat the others in turn."""
        groups = {group.plan.group_id: [(row.tokens, row.logprobs) for row in group.rows] for group in result.groups}
        return cls.of_groups(groups, dict(zip(sorted(result.dropped), cycle(groups), strict=False)), num_generations)

    @classmethod
    def of_groups(
        cls,
        groups: Mapping[int, Sequence[tuple[Any, list[float] | None]]],
        repeated: Mapping[int, int],
        num_generations: int,
    ) -> "KeptRows":
        """
        From tokens and log-probs of each group's rows, by place in the batch; `repeated` names, by place, the group
        that stands in for one that is missing, with log-probs that are not known.
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

    def __getitem__(self, rows: slice) -> "KeptRows":
        logprobs = None if self.logprobs is None else self.logprobs[rows]
        return KeptRows(self.completion_ids[rows], logprobs, self.fillers)


def forget_filler_rewards(rewards: torch.Tensor, fillers: Collection[int]) -> torch.Tensor:
    """
    Takes the rewards from filler rows: TRL leaves rows without any out of the mean and the standard deviation that
    scale the advantages of the others, and out of its metrics. `rewards` has the shape `(N·M, F)`, over all processes.
    A batch of filler rows alone keeps them, since the mean of no rewards is NaN.
    """
    if 0 < len(fillers) < len(rewards):
        rewards = rewards.clone()
        rewards[sorted(fillers)] = torch.nan
    return rewards


def mask_fillers(output: dict[str, Any], fillers: Collection[int], accelerator: Accelerator) -> None:
    """
    Takes the weight from filler rows: no advantage, and no token in the loss or in its normalization. Called on every
    process at once with what TRL's `_generate_and_score_completions` returned there, which is changed in place.
    """
    if not fillers:
        return
    mask = output["completion_mask"]
    first = accelerator.process_index * len(mask)
    rows = [row - first for row in fillers if first <= row < first + len(mask)]
    mask[rows] = 0
    output["advantages"][rows] = 0.0
    if "sampling_per_token_logps" in output:  # not a number times no weight is not a number
        output["sampling_per_token_logps"][rows] = 0.0
    _count_items(output, accelerator)


def forget_stale_logprobs(rows: KeptRows, ages: Ages, max_age: int) -> None:
    """
    Takes the log-probs from tokens that [`mask_stale`] will mask, so that they don't weigh in TRL's correction either:
    by default it is one ratio for the whole row.
    """
    if rows.logprobs is not None:
        for row, start, end in _stale_runs(ages, max_age):
            rows.logprobs[row][start:end] = [UNKNOWN] * (end - start)


def mask_stale(output: dict[str, Any], ages: Ages, max_age: int, accelerator: Accelerator) -> None:
    """
    Takes the weight from tokens that a policy older than `max_age` sampled. What comes after them still attends to
    them. Called like [`mask_fillers`], with the ages of this process's rows.
    """
    mask = output.get("tool_mask", torch.ones_like(output["completion_mask"]))
    for row, start, end in _stale_runs(ages, max_age):
        mask[row, start:end] = 0
        if "sampling_per_token_logps" in output:  # not a number times no weight is not a number
            output["sampling_per_token_logps"][row, start:end] = 0.0
    output["tool_mask"] = mask
    _count_items(output, accelerator)


def _stale_runs(ages: Ages, max_age: int) -> Iterator[tuple[int, int, int]]:
    """Row, start and end of each run of tokens that is older."""
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
