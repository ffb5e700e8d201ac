"""The rollout buffer and its prompts in checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger

from ..errors import StateMismatchError
from ..scheduling import PromptInfo, prompt_key
from .batches import BufferedBatches
from .buffer import BufferEntry, RolloutBuffer
from .state import dump, load


logger = get_logger(__name__)

BUFFER_FILE = "darts_buffer.npz"
PROMPTS_FILE = "darts_prompts.json"


def save_buffer(batches: BufferedBatches, directory: Path, mid_epoch: bool) -> None:
    """
    Writes the buffer and its prompts. Called on every process at once; the main process writes.

    The prompts of a batch that has not been used up count as waiting: a resumed training does not go on within a
    batch, but generates anew.

    Args:
        batches ([`BufferedBatches`]):
            Of the trainer.
        directory (`Path`):
            The checkpoint.
        mid_epoch (`bool`):
            Whether a resumed training skips what the loop has got.

    Raises:
        [`StateMismatchError`]: If a row of the data set has values that are no JSON.
    """
    batches.add_arrived()
    batches.main.run(lambda: _write(batches, directory, mid_epoch))


def load_buffer(batches: BufferedBatches, directory: Path, skips: bool) -> None:
    """
    Restores what [`save_buffer`] wrote. Called on every process at once; the main process reads. A checkpoint without
    it, of a schedule that trains on the loader's batches, is fine: the buffer begins empty.

    Args:
        batches ([`BufferedBatches`]):
            Of the trainer.
        directory (`Path`):
            The checkpoint.
        skips (`bool`):
            Whether the training skips what it had got of the epoch.

    Raises:
        [`StateMismatchError`]: If it is of another schedule.
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
