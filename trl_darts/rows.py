"""What a rollout hands to TRL, and what is done with rows that stand in for a group that could not be completed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from accelerate import Accelerator

from .scheduling import RolloutResult


Tokens = list[int]
UNKNOWN = float("nan")  # TRL's word for a log-prob that is not known: such a token is not corrected for


@dataclass
class KeptRows:
    """
    The rows that TRL trains on, group by group; `logprobs` is `None` where the engine gives none.

    `repeats` says which rows are only there because their groups could not be completed, and which rows of a complete
    group they repeat. Both are indices into the batch of all processes, also in a part of the rows.
    """

    completion_ids: list[Tokens]  # (N·M, ≤ max_completion_length)
    logprobs: list[list[float]] | None
    repeats: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[tuple[Tokens, list[float] | None]]) -> "KeptRows":
        """From tokens and log-probs of each row."""
        given = all(logprobs is not None for _, logprobs in rows)
        return cls([tokens for tokens, _ in rows], [logprobs or [] for _, logprobs in rows] if given else None)

    @classmethod
    def of_result(cls, result: RolloutResult, num_generations: int) -> "KeptRows":
        """From a rollout. Groups that were dropped repeat the others in turn, with log-probs that are not known."""
        groups = {group.plan.group_id: [(row.tokens, row.logprobs) for row in group.rows] for group in result.groups}
        return cls.of_groups(groups, dict(zip(sorted(result.dropped), cycle(groups), strict=False)), num_generations)

    @classmethod
    def of_groups(
        cls,
        groups: Mapping[int, Sequence[tuple[Tokens, list[float] | None]]],
        repeated: Mapping[int, int],
        num_generations: int,
    ) -> "KeptRows":
        """
        From tokens and log-probs of each row.

        Args:
            groups (`Mapping[int, Sequence[tuple[list[int], list[float]]]]`):
                Rows by their group's place in the batch.
            repeated (`Mapping[int, int]`):
                By place, the group that stands in for one that is missing; with log-probs that are not known.
            num_generations (`int`):
                Rows per group.
        """
        rows = {place: list(own) for place, own in groups.items()}
        for place, other in repeated.items():
            rows[place] = [(tokens, [UNKNOWN] * len(tokens)) for tokens, _ in groups[other]]
        kept = cls.of([row for place in sorted(rows) for row in rows[place]])
        kept.repeats = {
            place * num_generations + index: other * num_generations + index
            for place, other in repeated.items()
            for index in range(num_generations)
        }
        return kept

    def __getitem__(self, rows: slice) -> "KeptRows":
        logprobs = None if self.logprobs is None else self.logprobs[rows]
        return KeptRows(self.completion_ids[rows], logprobs, self.repeats)


def repeat_rewards(rewards: torch.Tensor, repeats: dict[int, int]) -> torch.Tensor:
    """
    Gives repeated rows the rewards of the rows that they repeat.

    Reward functions saw them with the prompt of the group that was dropped. What they said of that means nothing.

    Args:
        rewards (`torch.Tensor` of shape `(N·M, F)`):
            Of the rows of all processes, by reward function.
        repeats (`dict[int, int]`):
            See [`KeptRows`].

    Returns:
        `torch.Tensor` of shape `(N·M, F)`: The same rewards but for those rows.
    """
    if repeats:
        rewards = rewards.clone()
        rewards[list(repeats)] = rewards[list(repeats.values())]
    return rewards


def take_weight(output: dict[str, Any], repeats: dict[int, int], accelerator: Accelerator) -> None:
    """
    Takes the weight from repeated rows: no advantage, and no token in the loss or in its normalization.

    Args:
        output (`dict[str, Any]`):
            What TRL's `_generate_and_score_completions` returned on this process. Changed in place.
        repeats (`dict[int, int]`):
            See [`KeptRows`]. The same on every process, which all call this at once.
        accelerator (`Accelerator`):
            The trainer's.
    """
    if not repeats:
        return
    mask = output["completion_mask"]
    first = accelerator.process_index * len(mask)
    rows = [row - first for row in repeats if first <= row < first + len(mask)]
    mask[rows] = 0
    output["advantages"][rows] = 0.0
    if "sampling_per_token_logps" in output:  # not a number times no weight is not a number
        output["sampling_per_token_logps"][rows] = 0.0
    _count_items(output, accelerator)


def forget_stale(rows: KeptRows, ages: Sequence[Sequence[tuple[int, int]]], max_age: int) -> None:
    """
    Takes the log-probs from tokens that will have no weight, so that they don't weigh in TRL's correction either: by
    default it is one ratio for the whole row.

    Args:
        rows ([`KeptRows`]):
            Of this process. Changed in place.
        ages (`Sequence[Sequence[tuple[int, int]]]` of shape `(≤ B,)`):
            See [`mask_stale`].
        max_age (`int`):
            See [`mask_stale`].
    """
    if rows.logprobs is not None:
        for row, start, end in _stale_runs(ages, max_age):
            rows.logprobs[row][start:end] = [UNKNOWN] * (end - start)


def mask_stale(
    output: dict[str, Any], ages: Sequence[Sequence[tuple[int, int]]], max_age: int, accelerator: Accelerator
) -> None:
    """
    Takes the weight from tokens that an old policy sampled. What comes after them still attends to them.

    Args:
        output (`dict[str, Any]`):
            What TRL's `_generate_and_score_completions` returned on this process. Changed in place.
        ages (`Sequence[Sequence[tuple[int, int]]]` of shape `(≤ B,)`):
            For each row of this process, how old the policy was that sampled how many tokens in a row.
        max_age (`int`):
            Age from which on tokens have no weight, less one.
        accelerator (`Accelerator`):
            The trainer's. Called on every process at once.
    """
    mask = output.get("tool_mask", torch.ones_like(output["completion_mask"]))
    for row, start, end in _stale_runs(ages, max_age):
        mask[row, start:end] = 0
        if "sampling_per_token_logps" in output:  # not a number times no weight is not a number
            output["sampling_per_token_logps"][row, start:end] = 0.0
    output["tool_mask"] = mask
    _count_items(output, accelerator)


def _stale_runs(ages: Sequence[Sequence[tuple[int, int]]], max_age: int) -> Iterator[tuple[int, int, int]]:
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
