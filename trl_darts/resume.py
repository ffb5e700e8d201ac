"""Where a training stopped, and where it goes on."""

from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .errors import ConfigurationError


TRAINER_STATE = "trainer_state.json"  # without it, a checkpoint was interrupted itself


def last_checkpoint(output_dir: str) -> Path | None:
    """The whole checkpoint of the latest step in a directory, which need not exist."""
    states = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*/{TRAINER_STATE}")
    return max((s.parent for s in states), key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def where_it_stopped(args: Any, state: TrainerState) -> str:
    """What Ctrl-C ends with: the step, and whether a checkpoint is there to go on from."""
    stopped = f"Stopped after step {state.global_step} of {state.max_steps}."
    checkpoint = last_checkpoint(args.output_dir)
    if checkpoint is not None:
        return (
            f"{stopped} To go on from {checkpoint}: `trainer.train(resume_from_checkpoint=True)`, or the same command "
            "of examples/train_grpo.py with `--resume_from_checkpoint true`."
        )
    return (
        f"{stopped} There is no checkpoint in {args.output_dir} to go on from: when one is saved is said by "
        f"`save_strategy` ({args.save_strategy.value!r}) and `save_steps` ({args.save_steps:g})."
    )


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
