"""The rollout buffer and its prompts in checkpoints."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger

from .prompt_rounds import PromptRounds
from .scheduling import BufferEntry, PromptInfo, RolloutBuffer, prompt_key
from .scheduling.buffer_state import dump, load


logger = get_logger(__name__)

BUFFER_FILE = "darts_buffer.npz"
PROMPTS_FILE = "darts_prompts.pkl"


def save_rounds(rounds: PromptRounds, directory: Path, mid_epoch: bool) -> None:
    """
    Writes the buffer and its prompts. Called on every process at once; the main process writes.

    The prompts of a batch that has not been used up count as waiting: a resumed training does not go on within a
    batch, but generates anew.

    Args:
        rounds ([`PromptRounds`]):
            Of the trainer.
        directory (`Path`):
            The checkpoint.
        mid_epoch (`bool`):
            Whether a resumed training skips what the loop has got.
    """
    rounds.take_arrived()
    if not rounds.accelerator.is_main_process:
        return
    directory.mkdir(parents=True, exist_ok=True)
    buffer, prompts = _rest(rounds)
    feed = [rounds.feed.position, rounds.feed.num_taken] if mid_epoch else [0, 0]
    np.savez_compressed(directory / BUFFER_FILE, **dump(buffer), feed=np.array(feed, np.int64))
    (directory / PROMPTS_FILE).write_bytes(pickle.dumps(prompts))


def _rest(rounds: PromptRounds) -> tuple[RolloutBuffer, list[tuple[dict[str, Any], list[int]]]]:
    """What a resumed training has to train on."""
    buffer = rounds.policy.buffer()
    prompts = {entry_id: (rounds.rows[entry_id], rounds.prompt_ids[entry_id]) for entry_id in rounds.buffer.entries}
    entries = dict(rounds.buffer.entries)
    if rounds.mid_batch():
        prompts |= rounds.trained
        for entry_id, (_, tokens) in rounds.trained.items():
            entries[entry_id] = BufferEntry(entry_id, PromptInfo(prompt_key(tokens), len(tokens)))
    buffer.entries = {entry_id: entries[entry_id] for entry_id in sorted(entries)}
    buffer.num_entered = rounds.buffer.num_entered
    return buffer, [prompts[entry_id] for entry_id in buffer.entries]


def load_rounds(rounds: PromptRounds, directory: Path, skips: bool) -> None:
    """
    Restores what [`save_rounds`] wrote. Called on every process at once; the main process reads. A checkpoint without
    it, of a schedule that trains on the loader's batches, is fine: the buffer begins empty.

    Args:
        rounds ([`PromptRounds`]):
            Of the trainer.
        directory (`Path`):
            The checkpoint.
        skips (`bool`):
            Whether the training skips what it had got of the epoch.

    Raises:
        [`StateMismatchError`]: If it is of another schedule.
    """
    rounds.forget()
    if not rounds.agree((directory / BUFFER_FILE).exists):
        logger.warning(f"{directory} has no {BUFFER_FILE}: the rollout buffer begins empty.")
        return
    arrays, prompts = rounds.agree(lambda: _read(directory))
    load(rounds.buffer, arrays)
    rounds.feed.restore(*(arrays["feed"].tolist() if skips else (0, 0)))
    for entry_id, (row, tokens) in zip(rounds.buffer.entries, prompts, strict=True):
        rounds.rows[entry_id], rounds.prompt_ids[entry_id] = row, tokens


def _read(directory: Path) -> tuple[dict[str, Any], list[tuple[dict[str, Any], list[int]]]]:
    with np.load(directory / BUFFER_FILE) as arrays:
        # Rows are what the data set yields: as in the trainer's other files, anything that Python can pickle.
        return dict(arrays), pickle.loads((directory / PROMPTS_FILE).read_bytes())


def warn_of_lost_prompts(directory: Path) -> None:
    """Says that a checkpoint has prompts in its buffer which a schedule without one does not train on."""
    if (directory / BUFFER_FILE).exists():
        with np.load(directory / BUFFER_FILE) as arrays:
            num_prompts = len(arrays["keys"])
        logger.warning(
            f"{directory} has {num_prompts} prompts in its rollout buffer, of another `schedule`. This one has no "
            "buffer: they are left out until they come up in the next epoch."
        )
