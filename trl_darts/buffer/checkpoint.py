"""
What a checkpoint has beside TRL's files: the position in the data, the rollout buffer with its prompts (both in
`BUFFER_FILE`), and the rest of a batch that several optimizer steps share (`BATCH_FILE`).

State that does not depend on a setting survives its change; other state is dropped, with a warning that says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from numpy.typing import NDArray

from ..engines.answers import AnswerStore
from ..engines.main_process import MainProcess
from ..scheduling import FinishReason, PartialCandidate, PromptInfo
from ..training.resume import BUFFER_FILE
from .batches import BufferedBatches
from .buffer import BufferEntry, Lifecycle, RolloutBuffer, SampledCandidate, begin_again
from .codec import decode, encode
from .feed import PromptFeed
from .loop import LoopPosition


logger = get_logger(__name__)

BATCH_FILE = "darts_batch_{}.pt"  # of each process
# Settings that decide what a batch is. If one changes, batches of the checkpoint are not those of this run.
OF_BATCHES = ("generation_batch_size", "num_generations", "steps_per_generation", "num_iterations")
# Settings with which candidates are sampled. If one changes, tokens of unfinished prompts are dropped.
OF_CANDIDATES = (
    *("num_generations", "max_num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "schedule", "selection", "sorted_mode"),
)


@dataclass
class Rollouts:
    """What is saved and restored: the loop's position, the order of the data, and the buffer if there is one."""

    args: Any
    main: MainProcess
    columns: list[str] | None  # of the data set, if they are known
    loop: LoopPosition
    feed: PromptFeed
    batches: BufferedBatches | None
    answers: AnswerStore | None = None  # of earlier epochs, with `reuse_answers`

    def settings(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self.args, name) for name in names}


def save_rollouts(rollouts: Rollouts, directory: Path, has_batch: bool) -> None:
    """
    Writes `BUFFER_FILE`, on the main process. `has_batch` tells whether the batch within which the last optimizer step
    ended is saved too. The prompts of others that the step in progress trains on count as waiting, and so do those of
    a rollout under way, with the tokens that they had before it.
    """
    loop = rollouts.loop
    # Items of complete steps, to the end of a batch that is saved.
    num_finished = -(-loop.num_done // loop.repeats) if has_batch else loop.num_done // loop.repeats
    state: dict[str, Any] = {
        "num_items": loop.num_done,
        "has_batch": has_batch,
        "feed": rollouts.feed.state(num_finished),
        "columns": rollouts.columns,
        "of_batches": rollouts.settings(OF_BATCHES),
        "of_candidates": rollouts.settings(OF_CANDIDATES),
    }
    arrays: dict[str, NDArray[Any]] = {}
    if rollouts.batches is not None:
        own, arrays = dump(_rest(rollouts.batches, num_finished * loop.repeats))
        state |= {**own, "learned": rollouts.batches.policy.state_dict()}
        if (skips := rollouts.batches.skips) is not None:
            state["skips"] = skips.state_dict()
    if rollouts.answers is not None:
        rollouts.answers.save(directory)
    text = np.frombuffer(encode(state), np.uint8)
    np.savez_compressed(directory / BUFFER_FILE, allow_pickle=False, state=text, **arrays)


def load_rollouts(rollouts: Rollouts, directory: Path, step: int, skips: bool) -> list[dict[str, Any]] | None:
    """
    Restores what [`save_rollouts`] wrote, after `step` optimizer steps. Called on every process at once; the main
    process reads. A checkpoint without it, such as one of TRL's `GRPOTrainer`, continues with the prompts that the
    loader would have yielded next. `skips` tells whether the run skips the prompts that it has trained on in this
    epoch. Returns the rest of the batch in use, if there is one.
    """
    state, arrays = rollouts.main.broadcast(lambda: _read(directory))
    answers = rollouts.answers
    if answers is not None and (problem := rollouts.main.broadcast(lambda: answers.load(directory))):
        logger.warning(problem)
    are_dropped = False
    if rollouts.batches is not None:
        are_dropped = _load_buffer(rollouts, rollouts.batches, directory, state, arrays)
    elif num_prompts := len(state.get("entries", ())):
        logger.warning(
            f"{directory} has {num_prompts} prompts in its rollout buffer, of another `schedule`. This one has no "
            "buffer: they are left out until they come up in the next epoch."
        )
    loop, feed = rollouts.loop, rollouts.feed
    is_same = state.get("of_batches") == rollouts.settings(OF_BATCHES)
    if not skips:
        loop.begin(loop.epochs(step) * loop.batches_per_epoch * loop.repeats)
        feed.restore_after(loop.batch)
    elif is_same:
        loop.begin(state["num_items"])
        feed.restore(**state["feed"] | ({"num_pulled": loop.batch} if are_dropped else {}))
    else:
        loop.begin(loop.items(step))
        feed.restore_after(loop.batch)
        if "feed" in state:
            _convert(rollouts, state)
    batch = _load_batch(rollouts, directory) if is_same and skips and state["has_batch"] else None
    feed.begin(has_batch=batch is not None)
    return batch


def _convert(rollouts: Rollouts, state: Mapping[str, Any]) -> None:
    """Continues in the order of the data after as many prompts, in batches of another size."""
    before, now = (own["generation_batch_size"] // own["num_generations"] for own in
                   (state["of_batches"], rollouts.settings(OF_BATCHES)))  # fmt: skip
    saved, waiting = state["feed"], 0 if rollouts.batches is None else len(rollouts.batches.buffer)
    rollouts.feed.restore(
        saved["num_passes"], saved["num_taken"] * before // now, rollouts.loop.batch + -(-waiting // now)
    )
    logger.warning(
        f"A batch has {now} prompts, and had {before} before the checkpoint, or is used differently. The data "
        "continues after as many prompts, and the rest of a batch that was in use is dropped."
    )


def save_batch(directory: Path, batch: list[dict[str, Any]], index: int) -> None:
    """Writes the micro-batches of a process that TRL has buffered."""
    torch.save(batch, directory / BATCH_FILE.format(index))


def _load_batch(rollouts: Rollouts, directory: Path) -> list[dict[str, Any]] | None:
    """Returns the micro-batches in use of this process. Called on every process at once."""
    loop, path = rollouts.loop, directory / BATCH_FILE.format(rollouts.main.index)
    if all(gather_object([path.exists()])):
        batch: list[dict[str, Any]] = torch.load(path, map_location=rollouts.args.device, weights_only=True)
        return batch
    logger.warning(
        f"{directory} was saved within a batch, by another number of processes. The rest of that batch is dropped."
    )
    loop.begin((loop.batch + 1) * loop.repeats)
    return None


def _load_buffer(
    rollouts: Rollouts,
    batches: BufferedBatches,
    directory: Path,
    state: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
) -> bool:
    """Restores the buffer. Returns whether its prompts were dropped."""
    if "entries" not in state:
        logger.warning(f"{directory} has no rollout buffer: it begins empty.")
        return False
    saved, own = state["of_candidates"], rollouts.settings(OF_CANDIDATES)
    changed = next((name for name in own if own[name] != saved[name]), None)
    load(batches.buffer, state, arrays, keeps_candidates=changed is None)
    batches.policy.load_state_dict(state["learned"])
    if batches.skips is not None and "skips" in state:
        batches.skips.load_state_dict(state["skips"])
    if changed is not None and len(arrays["tokens"]):
        logger.warning(
            f"`{changed}` ({own[changed]!r}) was {saved[changed]!r} before {directory}: the answers in its rollout "
            "buffer are dropped, and their prompts are sampled again."
        )
    audits = [i for i, entry in batches.buffer.entries.items() if entry.audit_of is not None]
    batches.buffer.remove([] if rollouts.args.scores_early else audits)
    columns = state["columns"], rollouts.columns
    if columns[0] == columns[1] or None in columns or not len(batches.buffer):
        return False
    logger.warning(
        f"The data set has the columns {', '.join(rollouts.columns or ())}, and had {', '.join(state['columns'])} "
        f"before {directory}: {len(batches.buffer)} prompts in its rollout buffer are dropped."
    )
    batches.buffer.remove(list(batches.buffer.entries))
    return True


def known_columns(dataset: Any) -> list[str] | None:
    """Returns the columns of a data set's rows, sorted. `None` if a transform makes them, or they are unknown."""
    names = getattr(dataset, "column_names", None)
    if isinstance(dataset, Dataset):
        names = None if dataset.format["type"] == "custom" else dataset.format["columns"]
    return sorted(names) if isinstance(names, list) else None


def _rest(batches: BufferedBatches, num_items: int) -> RolloutBuffer:
    """Returns the prompts that a run has to train on after the first `num_items` of the loop, in a buffer."""
    buffer = batches.policy.buffer()
    entries = {i: at_rest(entry) for i, entry in batches.buffer.entries.items()}
    for entry in batches.unfinished(num_items):
        entries[entry.entry_id] = BufferEntry(entry.entry_id, entry.prompt, entry.row, entry.tokens)
    buffer.entries = {entry_id: entries[entry_id] for entry_id in sorted(entries)}
    buffer.num_entered = batches.buffer.num_entered
    return buffer


def at_rest(entry: BufferEntry) -> BufferEntry:
    """Returns an entry as it was before the rollout under way, which begins again after a resume."""
    if entry.state is not Lifecycle.IN_FLIGHT:
        return entry
    return replace(entry, state=Lifecycle.PARTIAL if entry.candidates else Lifecycle.WAITING)


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Returns the state, empty if there is none, and the arrays."""
    if not (directory / BUFFER_FILE).exists():
        return {}, {}
    with np.load(directory / BUFFER_FILE) as file:  # only numbers: nothing is unpickled
        arrays = dict(file)
    return decode(arrays.pop("state").tobytes()) or {}, arrays


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
    return {"num_entered": buffer.num_entered, "entries": [_saved(entry) for entry in buffer.entries.values()]}, arrays


def _saved(entry: BufferEntry) -> dict[str, Any]:
    """An entry without its scores: rewards are computed again after a resume."""
    own = {own.name: getattr(entry, own.name) for own in fields(entry) if own.name != "score"}
    return own | {"prompt": asdict(entry.prompt), "candidates": [_as_json(c) for c in entry.candidates]}


def load(
    buffer: RolloutBuffer,
    state: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    keeps_candidates: bool = True,
) -> None:
    """Restores what [`dump`] returned into an empty buffer, with or without what was sampled."""
    tokens, logprobs = (iter(arrays[name].tolist()) for name in ("tokens", "logprobs"))
    buffer.num_entered, buffer.entries = state["num_entered"], {}
    for saved in state["entries"]:
        entry = BufferEntry(**saved | {"prompt": PromptInfo(**saved["prompt"]), "state": Lifecycle(saved["state"])})
        entry.candidates = [_from_json(candidate, tokens, logprobs) for candidate in saved["candidates"]]
        if not keeps_candidates:
            begin_again(entry)
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
