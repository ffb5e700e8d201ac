"""The rollout buffer and its prompts in checkpoints: one file, see `RolloutStateCallback`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from numpy.typing import NDArray

from ..errors import StateMismatchError
from ..scheduling import FinishReason, PartialCandidate, PromptInfo, prompt_key
from ..training.resume import BUFFER_FILE
from .batches import BufferedBatches
from .buffer import BufferEntry, Lifecycle, RolloutBuffer, SampledCandidate


logger = get_logger(__name__)


def save_buffer(batches: BufferedBatches | None, directory: Path, mid_epoch: bool) -> None:
    """
    Writes the buffer and its prompts, on the main process, once all processes have added what has arrived. `mid_epoch`
    tells whether a resumed training skips what the loop has got. Schedules without a buffer write a file without one.

    The prompts of a batch that has not been used up count as waiting: a resumed training does not go on within a
    batch, but generates anew. So do those of a rollout that is under way, from what they had before it.
    """
    state: dict[str, Any] | None = None
    arrays: dict[str, NDArray[Any]] = {}
    if batches is not None:
        buffer, prompts = _rest(batches)
        own, arrays = dump(buffer)
        state = {**own, "feed": batches.feed.state(mid_epoch), "prompts": prompts}
    text = json.dumps(state, default=_refuse).encode()
    np.savez_compressed(directory / BUFFER_FILE, allow_pickle=False, state=np.frombuffer(text, np.uint8), **arrays)


def load_buffer(batches: BufferedBatches, directory: Path, skips: bool) -> None:
    """
    Restores what [`save_buffer`] wrote into an empty buffer. Called on every process at once; the main process reads.
    A checkpoint without it, of a schedule that trains on the loader's batches or of TRL's `GRPOTrainer`, is fine: the
    buffer begins empty. `skips` tells whether the training skips what it had got of the epoch.
    """
    state, arrays = batches.main.broadcast(lambda: _read(directory))
    if skips:
        batches.feed.resume(directory, {} if state is None else state["feed"])
    if state is None:
        logger.warning(f"{directory} has no rollout buffer: it begins empty.")
        return
    load(batches.buffer, state, arrays)
    for entry_id, (row, tokens) in zip(batches.buffer.entries, state["prompts"], strict=True):
        batches.rows[entry_id], batches.prompt_ids[entry_id] = row, tokens


def warn_of_lost_prompts(directory: Path) -> None:
    """Says that a checkpoint has prompts in its buffer which a schedule without one does not train on."""
    state, _ = _read(directory)
    if state is not None and (num_prompts := len(state["entries"])):
        logger.warning(
            f"{directory} has {num_prompts} prompts in its rollout buffer, of another `schedule`. This one has no "
            "buffer: they are left out until they come up in the next epoch."
        )


def _refuse(value: Any) -> None:
    raise StateMismatchError(
        f"A checkpoint can't hold the {type(value).__name__} of the data set that its rollout buffer has: {value!r}. "
        "Convert that column to text or numbers, or set `save_strategy='no'`."
    )


def _rest(batches: BufferedBatches) -> tuple[RolloutBuffer, list[tuple[dict[str, Any], list[int]]]]:
    """What a resumed training has to train on."""
    buffer = batches.policy.buffer()
    prompts = {i: (batches.rows[i], batches.prompt_ids[i]) for i in batches.buffer.entries}
    entries = {i: at_rest(entry) for i, entry in batches.buffer.entries.items()}
    if batches.mid_batch:
        unused = {i: prompt for i, prompt in batches.trained.items() if i in batches.last.left}  # else repeated
        prompts |= unused
        for entry_id, (_, tokens) in unused.items():
            entries[entry_id] = BufferEntry(entry_id, PromptInfo(prompt_key(tokens), len(tokens)))
    buffer.entries = {entry_id: entries[entry_id] for entry_id in sorted(entries)}
    buffer.num_entered = batches.buffer.num_entered
    buffer.informative_share = batches.buffer.informative_share
    buffer.long_rewards, buffer.audits = batches.buffer.long_rewards, batches.buffer.audits
    return buffer, [prompts[entry_id] for entry_id in buffer.entries]


def at_rest(entry: BufferEntry) -> BufferEntry:
    """As it was before the rollout that is under way: that one is begun again after a resume."""
    if entry.state is not Lifecycle.IN_FLIGHT:
        return entry
    return replace(entry, state=Lifecycle.PARTIAL if entry.candidates else Lifecycle.WAITING)


def _read(directory: Path) -> tuple[dict[str, Any] | None, dict[str, NDArray[Any]]]:
    """The state, `None` where there is none, and the arrays."""
    if not (directory / BUFFER_FILE).exists():
        return None, {}
    with np.load(directory / BUFFER_FILE) as file:  # numbers alone: nothing is unpickled
        arrays = dict(file)
    return json.loads(arrays.pop("state").tobytes()), arrays


def dump(buffer: RolloutBuffer) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """
    The state of a buffer between two rollouts: what JSON can hold, and as arrays the tokens and log-probs of all
    candidates one after another.
    """
    candidates = [c.partial for entry in buffer.entries.values() for c in entry.candidates]
    arrays = {
        "tokens": np.array([token for c in candidates for token in c.tokens], np.int64),
        "logprobs": np.array([value for c in candidates for value in c.logprobs or ()], np.float64),
    }
    entries = [
        {**asdict(replace(entry, candidates=[])), "candidates": [_as_json(c) for c in entry.candidates]}
        for entry in buffer.entries.values()
    ]
    own = {name: getattr(buffer, name) for name in ("keeps_tokens", "num_entered", "informative_share")}
    learned = {"long_rewards": buffer.long_rewards.state_dict(), "audits": buffer.audits.state_dict()}
    return {**own, **learned, "entries": entries}, arrays


def load(buffer: RolloutBuffer, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Restores what [`dump`] returned into an empty buffer, or raises [`StateMismatchError`]."""
    if state["keeps_tokens"] != buffer.keeps_tokens:
        raise StateMismatchError(
            f"The checkpoint's rollout buffer has keeps_tokens={state['keeps_tokens']}, and this training needs "
            f"keeps_tokens={buffer.keeps_tokens}. Resume with the `schedule` that saved it."
        )
    tokens, logprobs = (iter(arrays[name].tolist()) for name in ("tokens", "logprobs"))
    buffer.num_entered, buffer.entries = state["num_entered"], {}
    buffer.informative_share = state["informative_share"]
    buffer.long_rewards.load_state_dict(state["long_rewards"])
    buffer.audits.load_state_dict(state["audits"])
    for saved in state["entries"]:
        entry = BufferEntry(**saved | {"prompt": PromptInfo(**saved["prompt"]), "state": Lifecycle(saved["state"])})
        entry.candidates = [_from_json(candidate, tokens, logprobs) for candidate in saved["candidates"]]
        buffer.entries[entry.entry_id] = entry


def _as_json(candidate: SampledCandidate) -> dict[str, Any]:
    partial = candidate.partial
    return {
        "num_tokens": len(partial.tokens),
        "has_logprobs": partial.logprobs is not None,
        "finish_reason": partial.finish_reason,
        "num_segments": partial.num_segments,
        "versions": candidate.versions,
    }


def _from_json(saved: Mapping[str, Any], tokens: Iterator[int], logprobs: Iterator[float]) -> SampledCandidate:
    num_tokens, reason = saved["num_tokens"], saved["finish_reason"]
    partial = PartialCandidate(
        list(islice(tokens, num_tokens)),
        list(islice(logprobs, num_tokens)) if saved["has_logprobs"] else None,
        reason and FinishReason(reason),
        saved["num_segments"],
    )
    return SampledCandidate(partial, tuple(tuple(run) for run in saved["versions"]))
