"""Callbacks that go with a [`DARTSGRPOTrainer`]."""

import json
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from .buffer.batches import BufferedBatches
from .buffer.checkpoint import load_buffer, save_buffer, warn_of_lost_prompts
from .engines.main_process import MainProcess
from .errors import ConfigurationError, StateMismatchError
from .policy import LengthTracker
from .scheduling import AdmissionPolicy
from .telemetry.length_history import LENGTHS_FILE, length_source, load_history
from .telemetry.log import SETTINGS, append_entry
from .training.resume import TRAINER_STATE


logger = get_logger(__name__)

ADMISSION_FILE = "darts_admission.json"


class VarianceTrackerCallback(TrainerCallback):
    """
    Owns what is known of response lengths. The trainer saves it with each checkpoint and restores it on resume.

    The trainer adds one by itself. Pass your own in `callbacks` to read it. `length_history` goes on from an
    earlier training's lengths.

    Args:
        tracker ([`LengthTracker`], *optional*):
            Length statistics per prompt. Defaults to a new one with the trainer's `length_ema`.
    """

    def __init__(self, tracker: LengthTracker | None = None) -> None:
        self.tracker: Any = tracker

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.tracker is None:
            source = length_source(kwargs["model"].config, kwargs["processing_class"])
            self.tracker = args.tracker(args.max_completion_length, source)

    def save(self, directory: Path) -> None:
        """Writes `darts_lengths.npz` to a checkpoint."""
        self.tracker.save(directory / LENGTHS_FILE)

    def load(self, directory: Path) -> None:
        """
        Restores what [`VarianceTrackerCallback.save`] wrote. A checkpoint without it, such as one of TRL's
        `GRPOTrainer`, is fine: lengths are then learned anew.

        Args:
            directory (`Path`):
                The checkpoint.

        Raises:
            [`StateMismatchError`]: If the state belongs to another version.
        """
        if _is_there(directory / LENGTHS_FILE):
            self.tracker.load(directory / LENGTHS_FILE)


def with_tracker(callbacks: list[Any], args: Any, model: Any, processing_class: Any) -> list[Any]:
    """A trainer's callbacks and, if there is none among them, a [`VarianceTrackerCallback`] with `length_history`."""
    has_history = args.length_history is not None
    if not any(isinstance(callback, VarianceTrackerCallback) for callback in callbacks):
        tracker = load_history(args, model, processing_class) if has_history else None
        return [*callbacks, VarianceTrackerCallback(tracker)]
    if has_history:
        raise ConfigurationError(
            f"`length_history` ({args.length_history!r}) has no effect with a `VarianceTrackerCallback` in "
            "`callbacks`, which has lengths of its own. Leave one of them out."
        )
    return callbacks


class RolloutStateCallback(TrainerCallback):
    """
    What rollouts have learned and have under way, in checkpoints: response lengths, what admission knows, and the
    rollout buffer, where there is one.

    Invariant (`tests/buffer/test_checkpoint.py`): a checkpoint that is whole (see `unreadable_file`) has all of it, of
    one moment, wherever the process that wrote it was killed.
    """

    def __init__(
        self,
        lengths: VarianceTrackerCallback,
        admission: AdmissionPolicy,
        batches: BufferedBatches | None,
        main: MainProcess,
        schedule: str,
    ) -> None:
        self.checkpoint: str | None = None  # the last one that this training has saved, or was resumed from
        self._is_finished = False
        self._lengths = lengths
        self._admission = admission
        self._batches = batches
        self._main = main
        self._schedule = schedule

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs where a resumed training goes on. One that was finished ends here: TRL 1.16 trains one step more."""
        self._is_finished = self.checkpoint is not None and state.global_step >= state.max_steps
        if self._is_finished:
            control.should_training_stop = True
            logger.warning(
                f"{self.checkpoint} is of a finished training (step {state.global_step} of {state.max_steps}): "
                "nothing is trained. Raise `max_steps` or `num_train_epochs` to train on."
            )
        elif self.checkpoint is not None and state.is_world_process_zero:
            tqdm.write(f"Going on from {self.checkpoint}: step {state.global_step} of {state.max_steps}")

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_finished:
            control.should_save = control.should_evaluate = False

    def save(self, directory: Path, mid_epoch: bool) -> None:
        """
        Called on every process at once, before TRL and transformers write the checkpoint. Where there is one of the
        same step already, it is not whole from here on until theirs are all written too.
        """
        if self._batches is not None:
            self._batches.add_arrived()
        self._main.run(lambda: self._write(directory, mid_epoch))

    def _write(self, directory: Path, mid_epoch: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TRAINER_STATE).unlink(missing_ok=True)
        self._lengths.save(directory)
        state = {"schedule": self._schedule, **self._admission.state_dict()}
        (directory / ADMISSION_FILE).write_text(json.dumps(state, indent=2))
        save_buffer(self._batches, directory, mid_epoch)

    def load(self, directory: Path, skips: bool) -> None:
        """
        Restores it, see [`load_buffer`]. Called on every process at once. [`StateMismatchError`] if another schedule's
        state is of no use for this one.
        """
        state = self._main.broadcast(lambda: self._read(directory))
        saved = self._schedule if state is None else state.pop("schedule", self._schedule)
        try:
            if state is not None:
                self._admission.load_state_dict(state)
            if self._batches is None:
                warn_of_lost_prompts(directory)
            else:
                load_buffer(self._batches, directory, skips)
        except StateMismatchError as error:
            if saved == self._schedule:
                raise
            raise StateMismatchError(
                f"{directory} is of schedule={saved!r}, and this training has schedule={self._schedule!r}. Resume "
                "with the schedule that saved it, or delete its darts_* files to go on from its model alone."
            ) from error

    def _read(self, directory: Path) -> dict[str, Any] | None:
        self._lengths.load(directory)
        if not _is_there(directory / ADMISSION_FILE):
            return None
        state: dict[str, Any] = json.loads((directory / ADMISSION_FILE).read_text())
        return state


def _is_there(path: Path) -> bool:
    if not path.exists():
        logger.warning(f"{path.parent} has no {path.name}: response lengths are learned anew.")
    return path.exists()


class RunLogCallback(TrainerCallback):
    """
    Writes a run's settings and what it logs to `output_dir/rollouts/log.jsonl`, beside its traces, for `trl-darts
    report`. The trainer adds one with `save_rollout_trace=True`.

    A resumed training goes on in the same file: of two entries of one step, the later counts.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            settings = {name: getattr(args, name) for name in SETTINGS}
            model = kwargs["model"].config._name_or_path
            source = length_source(kwargs["model"].config, kwargs["processing_class"])
            run = {"name": args.run_name or args.output_dir, "model": model, "source": source, **settings}
            append_entry(Path(args.output_dir), {"run": run})

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            append_entry(Path(args.output_dir), {"step": state.global_step, **logs})
