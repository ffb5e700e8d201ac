"""
Finds complete checkpoints to resume from.

transformers writes `trainer_state.json` last, and our files are written before its first one (see
`RolloutStateCallback`). A checkpoint with a readable trainer state therefore has all files.
"""

import json
import logging
import os
import shlex
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError, safe_open

from ..errors import ConfigurationError


if TYPE_CHECKING:
    from transformers import TrainerState

logger = logging.getLogger(__name__)  # accelerate's needs a state, which does not exist when a script starts

TRAINER_STATE = "trainer_state.json"
BUFFER_FILE = "darts_buffer.npz"  # written for every schedule


def last_checkpoint(output_dir: str) -> Path | None:
    """Returns the last complete checkpoint in a directory, if any. Warns about incomplete ones after it."""
    checkpoints = [path for path in Path(output_dir).glob("checkpoint-*") if path.name[11:].isdecimal()]
    for path in sorted(checkpoints, key=lambda path: int(path.name[11:]), reverse=True):
        if (file := unreadable_file(path)) is None:
            return path
        logger.warning(f"{path} is skipped, because its {file} is missing or incomplete.")
    return None


def unreadable_file(checkpoint: Path) -> str | None:
    """
    Returns the name of a file of a checkpoint that is missing or incomplete, if any. A checkpoint of TRL's
    `GRPOTrainer` needs none of our files.
    """
    ours = {path for path in checkpoint.glob("darts_*") if path.suffix in (".json", ".npz")}
    if any(checkpoint.glob("darts_*")):
        ours.add(checkpoint / BUFFER_FILE)
    theirs = {path for suffix in ("safetensors", "pt", "pth") for path in checkpoint.glob(f"*.{suffix}")}
    paths = [checkpoint / TRAINER_STATE, *sorted(ours), *sorted(theirs)]
    return next((path.name for path in paths if not _is_whole(path)), None)


def _is_whole(path: Path) -> bool:
    """Whether a file is complete. Only the length is checked for weights and torch's zip archives."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, "np"):
                pass
        else:
            with ZipFile(path) as file:
                return path.suffix != ".npz" or file.testzip() is None
    except (OSError, ValueError, BadZipFile, zlib.error, SafetensorError):
        return False
    return True


def where_it_stopped(args: Any, state: "TrainerState", checkpoint: str | None) -> str:
    """Returns the message after Ctrl-C: the step, and the checkpoint of this run to resume from."""
    stopped = f"Stopped after step {state.global_step} of {state.max_steps}."
    last = last_checkpoint(args.output_dir)
    if checkpoint is not None:
        is_last = last == Path(checkpoint)
        value, flag = ("True", "true") if is_last else (repr(checkpoint), shlex.quote(checkpoint))
        return (
            f"{stopped} To resume from {checkpoint}: `trainer.train(resume_from_checkpoint={value})`, or the same "
            f"command of examples/train_grpo.py with `--resume_from_checkpoint {flag}`."
        )
    strategy = args.save_strategy.value
    when = f"`save_steps` is {args.save_steps:g}" if strategy == "steps" else f"`save_strategy` is {strategy!r}"
    others = "" if last is None else f" {last} is from an earlier run."
    return f"{stopped} No checkpoint saved yet ({when}).{others}"


def checkpoint_to_resume(given: Any, output_dir: str) -> str | None:
    """
    Resolves `resume_from_checkpoint` to a directory. `True`, also as text on a command line, is the last complete
    checkpoint of `output_dir`. Raises [`ConfigurationError`] if there is none, or if the given one is incomplete.
    """
    if not isinstance(given, str | os.PathLike | bool | None):
        raise ConfigurationError(
            f"`resume_from_checkpoint` ({given!r:.60}) must be the directory of a checkpoint, or `True` for the last "
            "complete one of `output_dir`. Correct it."
        )
    text = str(given).lower()
    if text in ("none", "false"):
        return None
    checkpoint = last_checkpoint(output_dir) if text == "true" else Path(str(given))
    if checkpoint is None:
        raise ConfigurationError(
            f"`resume_from_checkpoint` ({text}) needs a complete checkpoint in `output_dir` ({output_dir!r}), and "
            "there is none. Correct `output_dir`, or leave it out to start from scratch."
        )
    if (file := unreadable_file(checkpoint)) is not None:
        raise ConfigurationError(
            f"`resume_from_checkpoint` ({given!r}) must be the directory of a complete checkpoint, and its {file} is "
            "missing or incomplete. Use another one, or `true` for the last complete one of `output_dir`."
        )
    return str(checkpoint)
