"""Callbacks that go with a [`DARTSGRPOTrainer`]."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .policy import LengthTracker
from .prompt_checkpoint import save_rounds
from .telemetry.log import SETTINGS, append_entry


if TYPE_CHECKING:
    from .prompt_rounds import PromptRounds
    from .scheduling import AdmissionPolicy

logger = get_logger(__name__)

LENGTHS_FILE = "darts_lengths.npz"
ADMISSION_FILE = "darts_admission.json"


class VarianceTrackerCallback(TrainerCallback):
    """
    Owns what is known of response lengths, saves it with each checkpoint and restores it on resume.

    The trainer adds one by itself. Pass your own in `callbacks` to read it, or to go on from an earlier training's
    lengths.

    Args:
        tracker ([`LengthTracker`], *optional*):
            Length statistics per prompt. Defaults to a new one with the trainer's `length_ema`.
    """

    def __init__(self, tracker: LengthTracker | None = None) -> None:
        self.tracker = tracker
        self.admission: AdmissionPolicy | None = None  # set by the trainer: its budget belongs to the same state
        self.rounds: PromptRounds | None = None  # likewise, with a schedule that chooses its prompts

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the state next to the trainer's own, on the main process."""
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero:
            self.save(directory)
        if self.rounds is not None:
            save_rounds(self.rounds, directory, mid_epoch=state.epoch != int(state.epoch))

    def save(self, directory: Path) -> None:
        """
        Writes two files: the lengths (`.npz`) and the budget (`.json`).

        Args:
            directory (`Path`):
                The checkpoint.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.tracker.save(directory / LENGTHS_FILE)
        (directory / ADMISSION_FILE).write_text(json.dumps(self.admission.state_dict(), indent=2))

    def load(self, directory: Path) -> None:
        """
        Restores what [`VarianceTrackerCallback.save`] wrote. A checkpoint without it, such as one of TRL's
        `GRPOTrainer`, is fine: lengths are then learned anew.

        Args:
            directory (`Path`):
                The checkpoint.

        Raises:
            [`StateMismatchError`]: If the state belongs to another schedule or version.
        """
        if missing := [name for name in (LENGTHS_FILE, ADMISSION_FILE) if not (directory / name).exists()]:
            logger.warning(f"{directory} has no {' and no '.join(missing)}: response lengths are learned anew.")
            return
        self.tracker.load(directory / LENGTHS_FILE)
        self.admission.load_state_dict(json.loads((directory / ADMISSION_FILE).read_text()))


class RunLogCallback(TrainerCallback):
    """
    Writes a run's settings and what it logs to `output_dir/rollouts/log.jsonl`, beside its traces, for `trl-darts
    report`. The trainer adds one with `save_rollout_trace=True`.

    A resumed training goes on in the same file: of two entries of one step, the later counts.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the settings."""
        if state.is_world_process_zero:
            settings = {name: getattr(args, name) for name in SETTINGS}
            model = kwargs["model"].config._name_or_path
            run = {"name": args.run_name or args.output_dir, "model": model, **settings}
            append_entry(Path(args.output_dir), {"run": run})

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Writes an entry."""
        if state.is_world_process_zero:
            append_entry(Path(args.output_dir), {"step": state.global_step, **logs})
