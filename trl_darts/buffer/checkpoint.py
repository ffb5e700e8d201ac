"""The rollout buffer and its prompts in checkpoints."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from numpy.typing import NDArray

from ..errors import StateMismatchError
from ..scheduling import FinishReason, PartialCandidate, PromptInfo, prompt_key
from .batches import BufferedBatches
from .buffer import BufferEntry, Lifecycle, RolloutBuffer, SampledCandidate


logger = get_logger(__name__)

BUFFER_FILE = "darts_buffer.npz"
PROMPTS_FILE = "darts_prompts.json"
VERSION = 2
STATES = (Lifecycle.WAITING, Lifecycle.PARTIAL, Lifecycle.COMPLETE)  # between two rollouts nothing is in flight
REASONS = (None, FinishReason.STOP, FinishReason.LENGTH)


def save_buffer(batches: BufferedBatches, directory: Path, mid_epoch: bool) -> None:
    """
    Writes the buffer and its prompts. Called on every process at once; the main process writes. `mid_epoch` tells
    whether a resumed training skips what the loop has got.

    The prompts of a batch that has not been used up count as waiting: a resumed training does not go on within a
    batch, but generates anew.
    """
    batches.add_arrived()
    batches.main.run(lambda: _write(batches, directory, mid_epoch))


def load_buffer(batches: BufferedBatches, directory: Path, skips: bool) -> None:
    """
    Restores what [`save_buffer`] wrote. Called on every process at once; the main process reads. A checkpoint without
    it, of a schedule that trains on the loader's batches, is fine: the buffer begins empty. `skips` tells whether the
    training skips what it had got of the epoch.
    """
    batches.clear()
    if not batches.main.broadcast((directory / BUFFER_FILE).exists):
        logger.warning(f"{directory} has no {BUFFER_FILE}: the rollout buffer begins empty.")
        return
    arrays, prompts = batches.main.broadcast(lambda: _read(directory))
    load(batches.buffer, arrays)
    batches.feed.restore(*(arrays["feed"].tolist() if skips else (0, 0)))
    for entry_id, (row, tokens) in zip(batches.buffer.entries, prompts, strict=True):
        batches.rows[entry_id], batches.prompt_ids[entry_id] = row, tokens


def warn_of_lost_prompts(directory: Path) -> None:
    """Says that a checkpoint has prompts in its buffer which a schedule without one does not train on."""
    if (directory / BUFFER_FILE).exists():
        with np.load(directory / BUFFER_FILE) as arrays:
            num_prompts = len(arrays["keys"])
        logger.warning(
            f"{directory} has {num_prompts} prompts in its rollout buffer, of another `schedule`. This one has no "
            "buffer: they are left out until they come up in the next epoch."
        )


def _write(batches: BufferedBatches, directory: Path, mid_epoch: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    buffer, prompts = _rest(batches)
    feed = [batches.feed.position, batches.feed.num_taken] if mid_epoch else [0, 0]
    arrays: dict[str, Any] = {**dump(buffer), "feed": np.array(feed, np.int64)}
    np.savez_compressed(directory / BUFFER_FILE, **arrays)
    (directory / PROMPTS_FILE).write_text(json.dumps(prompts, default=_refuse), encoding="utf-8")


def _refuse(value: Any) -> None:
    raise StateMismatchError(
        f"A checkpoint can't hold the {type(value).__name__} of the data set that its rollout buffer has: {value!r}. "
        "Convert that column to text or numbers, or set `save_strategy='no'`."
    )


def _rest(batches: BufferedBatches) -> tuple[RolloutBuffer, list[tuple[dict[str, Any], list[int]]]]:
    """What a resumed training has to train on."""
    buffer = batches.policy.buffer()
    prompts = {i: (batches.rows[i], batches.prompt_ids[i]) for i in batches.buffer.entries}
    entries = dict(batches.buffer.entries)
    if batches.mid_batch:
        prompts |= batches.trained
        for entry_id, (_, tokens) in batches.trained.items():
            entries[entry_id] = BufferEntry(entry_id, PromptInfo(prompt_key(tokens), len(tokens)))
    buffer.entries = {entry_id: entries[entry_id] for entry_id in sorted(entries)}
    buffer.num_entered = batches.buffer.num_entered
    return buffer, [prompts[entry_id] for entry_id in buffer.entries]


def _read(directory: Path) -> tuple[dict[str, Any], list[tuple[dict[str, Any], list[int]]]]:
    with np.load(directory / BUFFER_FILE) as arrays:  # numbers alone: nothing is unpickled
        return dict(arrays), json.loads((directory / PROMPTS_FILE).read_text(encoding="utf-8"))


def dump(buffer: RolloutBuffer) -> dict[str, NDArray[Any]]:
    """
    The state of a buffer between two rollouts, as numbers only: entries, their candidates, and the candidates' tokens,
    log-probs and versions one after another.
    """
    entries = list(buffer.entries.values())
    candidates = [candidate for entry in entries for candidate in entry.candidates]
    given = [c.partial.logprobs for c in candidates if c.partial.logprobs is not None]
    return {
        "head": np.array([VERSION, buffer.keeps_tokens, buffer.num_entered], np.int64),
        "keys": np.array([entry.prompt.key for entry in entries], np.uint64),
        "entries": _table([_entry_row(entry) for entry in entries], 7),
        "candidates": _table([_candidate_row(candidate) for candidate in candidates], 5),
        "tokens": np.array([token for c in candidates for token in c.partial.tokens], np.int64),
        "logprobs": np.array([value for values in given for value in values], np.float64),
        "versions": _table([run for c in candidates for run in c.versions], 2),
    }


def load(buffer: RolloutBuffer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """
    Restores what [`dump`] returned into an empty buffer; [`StateMismatchError`] if it is of another schedule or
    version.
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
        entry_id, num_tokens, extendable, state, num_candidates, num_deferrals, num_kept = map(int, row)
        buffer.entries[entry_id] = BufferEntry(
            entry_id,
            PromptInfo(int(key), num_tokens, bool(extendable)),
            STATES[state],
            num_candidates,
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
