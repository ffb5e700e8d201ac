"""
Where a training stopped, and where it goes on: which checkpoints are whole.

transformers writes `trainer_state.json` last, and our files are there before it writes its first (see
`RolloutStateCallback`). So a checkpoint whose trainer state can be read has all of them.
"""

import json
import logging
import shlex
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError, safe_open

from .errors import ConfigurationError


if TYPE_CHECKING:
    from transformers import TrainerState

logger = logging.getLogger(__name__)  # not accelerate's, whose state does not exist yet where a script begins

TRAINER_STATE = "trainer_state.json"
BUFFER_FILE = "darts_buffer.npz"  # also of a schedule without a buffer


def last_checkpoint(output_dir: str) -> Path | None:
    """The whole checkpoint of the latest step in a directory, which need not exist. Others are named in a warning."""
    checkpoints = [path for path in Path(output_dir).glob("checkpoint-*") if path.name[11:].isdecimal()]
    for path in sorted(checkpoints, key=lambda path: int(path.name[11:]), reverse=True):
        if (file := unreadable_file(path)) is None:
            return path
        logger.warning(f"{path} is not a whole checkpoint: {file} is missing or incomplete. An earlier one counts.")
    return None


def unreadable_file(checkpoint: Path) -> str | None:
    """
    The name of a file without which a checkpoint is not whole: missing, or not written to its end. One of TRL's
    `GRPOTrainer` has none of our files, and needs none.
    """
    ours = {path for path in checkpoint.glob("darts_*") if path.suffix in (".json", ".npz")}
    if any(checkpoint.glob("darts_*")):
        ours.add(checkpoint / BUFFER_FILE)
    theirs = {path for suffix in ("safetensors", "pt", "pth") for path in checkpoint.glob(f"*.{suffix}")}
    paths = [checkpoint / TRAINER_STATE, *sorted(ours), *sorted(theirs)]
    return next((path.name for path in paths if not _is_whole(path)), None)


def _is_whole(path: Path) -> bool:
    """As far as can be told fast: of weights and of torch's zip archives, their length alone."""
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
    """What Ctrl-C ends with: the step, and the checkpoint to go on from, saved or resumed from by this training."""
    stopped = f"Stopped after step {state.global_step} of {state.max_steps}."
    last = last_checkpoint(args.output_dir)
    if checkpoint is not None:
        is_last = last == Path(checkpoint)
        value, word = ("True", "true") if is_last else (repr(checkpoint), shlex.quote(checkpoint))
        return (
            f"{stopped} To go on from {checkpoint}: `trainer.train(resume_from_checkpoint={value})`, or the same "
            f"command of examples/train_grpo.py with `--resume_from_checkpoint {word}`."
        )
    strategy = args.save_strategy.value
    when = f"`save_steps` is {args.save_steps:g}" if strategy == "steps" else f"`save_strategy` is {strategy!r}"
    others = "" if last is None else f" {last} is an earlier training's."
    return f"{stopped} No checkpoint saved yet ({when}).{others}"


def checkpoint_to_resume(given: Any, output_dir: str) -> str | None:
    """
    The directory that `resume_from_checkpoint` means, also on a command line, where `true` is text: the last whole
    one of `output_dir`. Raises [`ConfigurationError`] if there is none, or the one that is named is not whole.
    """
    word = str(given).lower()
    if word in ("none", "false"):
        return None
    checkpoint = last_checkpoint(output_dir) if word == "true" else Path(given)
    if checkpoint is None:
        raise ConfigurationError(
            f"`resume_from_checkpoint` ({word}) needs a whole checkpoint in `output_dir` ({output_dir!r}), and there "
            "is none. Correct `output_dir`, or leave it out to begin anew."
        )
    if (file := unreadable_file(checkpoint)) is not None:
        raise ConfigurationError(
            f"`resume_from_checkpoint` ({given!r}) must be the directory of a whole checkpoint, and its {file} is "
            "missing or incomplete. Name another; `true` takes the last whole one of `output_dir`."
        )
    return str(checkpoint)
