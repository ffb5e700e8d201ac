"""Where a training stopped, and where it goes on."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError


if TYPE_CHECKING:
    from transformers import TrainerState

TRAINER_STATE = "trainer_state.json"  # without it, a checkpoint was interrupted itself


def last_checkpoint(output_dir: str) -> Path | None:
    """The whole checkpoint of the latest step in a directory, which need not exist."""
    states = Path(output_dir).glob(f"checkpoint-[0-9]*/{TRAINER_STATE}")
    return max((s.parent for s in states), key=lambda path: int(path.name.rpartition("-")[2]), default=None)


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
    The directory that `resume_from_checkpoint` means, also on a command line, where `true` is text: the last
    one of `output_dir`. Raises [`ConfigurationError`] if there is no checkpoint.
    """
    word = str(given).lower()
    if word in ("none", "false"):
        return None
    checkpoint = last_checkpoint(output_dir) if word == "true" else Path(given)
    if checkpoint is None:
        raise ConfigurationError(
            f"`resume_from_checkpoint` ({word}) needs a checkpoint in `output_dir` ({output_dir!r}), and there is "
            "none. Correct `output_dir`, or leave it out to begin anew."
        )
    if not (checkpoint / TRAINER_STATE).is_file():
        raise ConfigurationError(
            f"`resume_from_checkpoint` ({given!r}) must be the directory of a checkpoint, and has no {TRAINER_STATE}. "
            "Correct it; `true` takes the last one of `output_dir`."
        )
    return str(checkpoint)
