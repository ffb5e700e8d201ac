"""A rollout buffer as arrays, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StateMismatchError
from ..scheduling import FinishReason, PartialCandidate, PromptInfo
from .buffer import BufferEntry, Lifecycle, RolloutBuffer, SampledCandidate


VERSION = 1
STATES = (Lifecycle.WAITING, Lifecycle.PARTIAL, Lifecycle.COMPLETE)  # between two rollouts nothing is in flight
REASONS = (None, FinishReason.STOP, FinishReason.LENGTH)


def dump(buffer: RolloutBuffer) -> dict[str, NDArray[Any]]:
    """
    The state of a buffer between two rollouts.

    Args:
        buffer ([`RolloutBuffer`]):
            The buffer.

    Returns:
        `dict[str, numpy.ndarray]`: Numbers only. Entries, their candidates, and the candidates' tokens, log-probs and
        versions one after another.
    """
    entries = list(buffer.entries.values())
    candidates = [candidate for entry in entries for candidate in entry.candidates]
    given = [c.partial.logprobs for c in candidates if c.partial.logprobs is not None]
    return {
        "head": np.array([VERSION, buffer.keeps_tokens, buffer.num_entered], np.int64),
        "keys": np.array([entry.prompt.key for entry in entries], np.uint64),
        "entries": _table([_entry_row(entry) for entry in entries], 8),
        "candidates": _table([_candidate_row(candidate) for candidate in candidates], 5),
        "tokens": np.array([token for c in candidates for token in c.partial.tokens], np.int64),
        "logprobs": np.array([value for values in given for value in values], np.float64),
        "versions": _table([run for c in candidates for run in c.versions], 2),
    }


def load(buffer: RolloutBuffer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """
    Restores what [`dump`] returned.

    Args:
        buffer ([`RolloutBuffer`]):
            A new one, of the same schedule.
        arrays (`Mapping[str, numpy.ndarray]`):
            The state.

    Raises:
        [`StateMismatchError`]: If it is of another schedule or version.
    """
    version, keeps_tokens, num_entered = (int(number) for number in arrays["head"])
    if (version, bool(keeps_tokens)) != (VERSION, buffer.keeps_tokens):
        raise StateMismatchError(
            f"The checkpoint's rollout buffer has version {version} and keeps_tokens={bool(keeps_tokens)}, and this "
            f"training needs version {VERSION} and keeps_tokens={buffer.keeps_tokens}. Resume with the `schedule` "
            "that saved it."
        )
    candidates = iter(_candidates(arrays))
    buffer.num_entered = num_entered
    buffer.entries = {}
    for key, row in zip(arrays["keys"], arrays["entries"], strict=True):
        entry_id, num_tokens, extendable, state, num_candidates, num_rounds, num_deferrals, num_kept = map(int, row)
        buffer.entries[entry_id] = BufferEntry(
            entry_id,
            PromptInfo(int(key), num_tokens, bool(extendable)),
            STATES[state],
            num_candidates,
            num_rounds,
            num_deferrals,
            [next(candidates) for _ in range(num_kept)],
        )


def _entry_row(entry: BufferEntry) -> tuple[int, ...]:
    prompt = entry.prompt
    return (
        entry.entry_id,
        prompt.num_tokens,
        prompt.extendable,
        STATES.index(entry.state),
        entry.num_candidates,
        entry.num_rounds,
        entry.num_deferrals,
        len(entry.candidates),
    )


def _candidate_row(candidate: SampledCandidate) -> tuple[int, ...]:
    partial = candidate.partial
    given = partial.logprobs is not None
    reason = REASONS.index(partial.finish_reason)
    return (len(partial.tokens), given, reason, partial.num_segments, len(candidate.versions))


def _candidates(arrays: Mapping[str, NDArray[Any]]) -> list[SampledCandidate]:
    table = arrays["candidates"]
    tokens = _cut(arrays["tokens"].tolist(), table[:, 0].tolist())
    logprobs = _cut(arrays["logprobs"].tolist(), (table[:, 0] * table[:, 1]).tolist())
    versions = _cut([tuple(run) for run in arrays["versions"].tolist()], table[:, 4].tolist())
    return [
        SampledCandidate(PartialCandidate(own, values if given else None, REASONS[reason], num_segments), tuple(runs))
        for own, values, runs, (_, given, reason, num_segments, _) in zip(
            tokens, logprobs, versions, table.tolist(), strict=True
        )
    ]


def _cut(items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    return [items[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _table(rows: Sequence[Sequence[int]], width: int) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(len(rows), width)
