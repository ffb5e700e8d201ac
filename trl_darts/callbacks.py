"""Callbacks that go with a [`DARTSGRPOTrainer`]."""

import json
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .buffer.batches import BufferedBatches
from .buffer.checkpoint import save_buffer
from .errors import ConfigurationError
from .history import LENGTHS_FILE, length_source, load_history
from .policy import LengthTracker
from .scheduling import AdmissionPolicy
from .telemetry.log import SETTINGS, append_entry


logger = get_logger(__name__)

ADMISSION_FILE = "darts_admission.json"


class VarianceTrackerCallback(TrainerCallback):
    """
    Owns what is known of response lengths, saves it with each checkpoint and restores it on resume.

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

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the lengths next to the trainer's own state, on the main process."""
        if state.is_world_process_zero:
            self.save(_checkpoint(args, state))

    def save(self, directory: Path) -> None:
        """Writes `darts_lengths.npz` to a checkpoint."""
        directory.mkdir(parents=True, exist_ok=True)
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
    """Saves what admission has learned and the rollout buffer, where there is one, with each checkpoint."""

    def __init__(self, admission: AdmissionPolicy, batches: BufferedBatches | None) -> None:
        self.checkpoint: str | None = None  # the last one that this training has saved, or was resumed from
        self._admission = admission
        self._batches = batches

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Says what a resumed training goes on from."""
        if self.checkpoint is not None and state.is_world_process_zero:
            tqdm.write(f"Going on from {self.checkpoint}: step {state.global_step} of {state.max_steps}")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        directory = _checkpoint(args, state)
        if state.is_world_process_zero:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / ADMISSION_FILE).write_text(json.dumps(self._admission.state_dict(), indent=2))
        if self._batches is not None:
            save_buffer(self._batches, directory, mid_epoch=state.epoch != int(state.epoch))
        self.checkpoint = str(directory)

    def load(self, directory: Path) -> None:
        """Restores what admission has learned, on the main process; see [`load_buffer`] for the buffer."""
        if _is_there(directory / ADMISSION_FILE):
            self._admission.load_state_dict(json.loads((directory / ADMISSION_FILE).read_text()))


def _checkpoint(args: Any, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


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
