"""Callbacks of a [`DARTSGRPOTrainer`]."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .buffer.checkpoint import BATCH_FILE, Rollouts, load_rollouts, save_batch, save_rollouts
from .buffer.feed import skip_passes
from .errors import ConfigurationError, StateMismatchError
from .policy import LengthTracker
from .scheduling import AdmissionPolicy
from .telemetry.length_history import LENGTHS_FILE, length_source, load_history
from .telemetry.run_log import SETTINGS, append_entry
from .training.resume import TRAINER_STATE


logger = get_logger(__name__)

ADMISSION_FILE = "darts_admission.json"


class VarianceTrackerCallback(TrainerCallback):
    """
    Holds the statistics of response lengths, and saves them in each checkpoint.

    The trainer adds one by default. Pass your own in `callbacks` to read it. With `length_history`, it starts from an
    earlier run's lengths.

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
        Restores the file that [`VarianceTrackerCallback.save`] wrote. If the checkpoint has none, such as one of TRL's
        `GRPOTrainer`, the statistics start empty.

        Args:
            directory (`Path`):
                The checkpoint.

        Raises:
            [`StateMismatchError`]: If the file holds another kind of state, or lengths of another model.
        """
        if _is_there(directory / LENGTHS_FILE):
            self.tracker.load(directory / LENGTHS_FILE)


def with_tracker(callbacks: list[Any], args: Any, model: Any, processing_class: Any) -> list[Any]:
    """Returns the callbacks with a [`VarianceTrackerCallback`], which is added if there is none."""
    has_history = args.length_history is not None
    if not any(isinstance(callback, VarianceTrackerCallback) for callback in callbacks):
        tracker = load_history(args, model, processing_class) if has_history else None
        return [*callbacks, VarianceTrackerCallback(tracker)]
    if has_history:
        raise ConfigurationError(
            f"`length_history` ({args.length_history!r}) has no effect with a `VarianceTrackerCallback` in "
            "`callbacks`, which has its own lengths. Leave one of them out."
        )
    return callbacks


class RolloutStateCallback(TrainerCallback):
    """
    Saves the state of rollouts in checkpoints: response lengths, the admission policy, and the rollout buffer, if the
    schedule has one.

    Invariant (`tests/buffer/test_checkpoint.py`): a complete checkpoint (see `unreadable_file`) has all of this state
    from the same step, even if a process was killed while it wrote one.
    """

    def __init__(self, lengths: VarianceTrackerCallback, admission: AdmissionPolicy, rollouts: Rollouts) -> None:
        self.checkpoint: str | None = None  # the last one that this run saved, or was resumed from
        self._is_finished = False
        self._lengths = lengths
        self._admission = admission
        self._rollouts = rollouts
        self._main = rollouts.main
        self._schedule = rollouts.args.schedule

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs where a run resumes. Stops a finished one, for which TRL 1.16 would train one more step."""
        self._is_finished = self.checkpoint is not None and state.global_step >= state.max_steps
        if self._is_finished:
            control.should_training_stop = True
            logger.warning(
                f"{self.checkpoint} is from a finished run (step {state.global_step} of {state.max_steps}), so "
                "there is nothing to train. Raise `max_steps` or `num_train_epochs` to continue."
            )
        elif self.checkpoint is not None and state.is_world_process_zero:
            tqdm.write(f"Resuming from {self.checkpoint}: step {state.global_step} of {state.max_steps}")

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_finished:
            control.should_save = control.should_evaluate = False
        if control.should_epoch_stop and not control.should_training_stop:
            self._rollouts.feed.end_pass()

    @contextmanager
    def saving(self, output_dir: str, state: TrainerState, batch: Any) -> Iterator[None]:
        """
        Inside this context, TRL and transformers write a checkpoint, after our files. An existing one of the same step
        is incomplete until they are done. `batch` has the micro-batches of this process of which the last step trained
        on some, if there are. Must be called on every process.
        """
        directory = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._main.run(lambda: self._write(directory, batch is not None))
        if batch is not None:
            save_batch(directory, batch, self._main.index)
        yield
        self.checkpoint = str(directory)

    def _write(self, directory: Path, has_batch: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory / TRAINER_STATE, *directory.glob(BATCH_FILE.format("*"))):
            path.unlink(missing_ok=True)
        self._lengths.save(directory)
        state = {"schedule": self._schedule, **self._admission.state_dict()}
        (directory / ADMISSION_FILE).write_text(json.dumps(state, indent=2))
        save_rollouts(self._rollouts, directory, has_batch)

    def load(self, directory: Path, sampler: Any, step: int, skips: bool) -> Any:
        """
        Restores the state of a checkpoint after `step` optimizer steps, and advances the training data's sampler.
        `skips` tells whether the run skips the prompts that it has trained on in this epoch. Must be called on every
        process. Returns the rest of a batch, see [`load_rollouts`].
        """
        state = self._main.broadcast(lambda: self._read(directory))
        if state is not None:
            saved = state.pop("schedule", self._schedule)
            try:
                self._admission.load_state_dict(state)
            except StateMismatchError:
                changed = "`num_generations` or `max_num_generations`" if saved == self._schedule else "`schedule`"
                logger.warning(f"{changed} was another one before {directory}: the state of its budget is dropped.")
        batch = load_rollouts(self._rollouts, directory, step, skips)
        skip_passes(sampler, self._rollouts.feed.num_passes)
        return batch

    def _read(self, directory: Path) -> dict[str, Any] | None:
        self._lengths.load(directory)
        if not _is_there(directory / ADMISSION_FILE):
            return None
        state: dict[str, Any] = json.loads((directory / ADMISSION_FILE).read_text())
        return state


def _is_there(path: Path) -> bool:
    if not path.exists():
        logger.warning(f"{path.parent} has no {path.name}. Statistics of response lengths start empty.")
    return path.exists()


class RunLogCallback(TrainerCallback):
    """
    Writes a run's settings and log entries to `output_dir/rollouts/log.jsonl`, for `trl-darts report`. The trainer
    adds one with `save_rollout_trace=True`.

    A resumed run appends to the same file. Of two entries for one step, the later one counts.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            settings = {name: getattr(args, name) for name in SETTINGS if hasattr(args, name)}
            model = kwargs["model"].config._name_or_path
            source = length_source(kwargs["model"].config, kwargs["processing_class"])
            run = {"name": args.run_name or args.output_dir, "model": model, "source": source, **settings}
            append_entry(Path(args.output_dir), {"run": run})

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            append_entry(Path(args.output_dir), {"step": state.global_step, **logs})
