"""
Ends training early after Ctrl-C or SIGTERM, which cluster schedulers send some time before they kill. SIGTERM saves a
checkpoint and exits with 143.

transformers' `enable_jit_checkpoint` does not suffice: each process decides by its own timer, at different steps, a
rollout that waits for servers does not end, and the script continues as if the training had finished.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..errors import TRLDARTSError
from ..scheduling.ledger import Ledger
from ..telemetry.progress import close_bar
from .resume import where_it_stopped


logger = get_logger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
STEP_S = 15.0  # Kubernetes, SLURM and torchrun kill after 30 s by default; the other half is for the checkpoint
REPEAT_S = 2.0  # signals within this time count as one: SLURM signals every process, and torchrun forwards signals


class Preempted(TRLDARTSError, RuntimeError):
    """Raised on every process when SIGTERM ends the training within a step."""


class Preemption(TrainerCallback):
    """
    Stops the training after SIGTERM: after the optimizer step, if that takes at most `STEP_S`. A rollout on servers
    ends at once. All processes stop at the same step, even if only some of them received the signal.
    """

    def __init__(self, accelerator: Accelerator, uses_servers: bool) -> None:
        self.stops = False  # equal on all processes
        self._accelerator = accelerator
        self._uses_servers = uses_servers
        self._received_at: float | None = None  # on this process

    @contextmanager
    def exits(self, trainer: Any) -> Iterator[None]:
        """Inside this context, SIGTERM saves a checkpoint and exits this process."""
        with self.handled():
            try:
                yield
            except Preempted:
                save_last_step(trainer)
                self._exit(trainer)
            if self.stops:
                self._exit(trainer)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles SIGTERM inside the context, unless there is another handler already (`enable_jit_checkpoint`)."""
        self.stops, self._received_at = False, None
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _exit(self, trainer: Any) -> None:
        """
        Exits the process, together with all others: when one exits, torchrun kills the others, and the main process
        may still be saving.
        """
        trainer._engine.cancel()
        close_bar(trainer.callback_handler.callbacks)
        if self._accelerator.is_main_process:
            trainer._engine.wait_for_aborts()
            stopped = where_it_stopped(trainer.args, trainer.state, trainer._state_callback.checkpoint)
            print(f"SIGTERM: {stopped}", file=sys.stderr, flush=True)  # noqa: T201  (no log level hides it)
        self._accelerator.wait_for_everyone()
        sys.exit(EXIT_CODE)

    def _receive(self, *_: Any) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
        elif now - self._received_at > REPEAT_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _is_late(self) -> bool:
        return self._received_at is not None and time.monotonic() - self._received_at > STEP_S

    def watching(self, progress: Callable[[Ledger], None]) -> Callable[[Ledger], None]:
        """Wraps a rollout's `on_progress` on the main process so that SIGTERM ends the rollout."""

        def step(ledger: Ledger) -> None:
            waits = self._uses_servers and self._received_at is not None
            # Several processes that decode locally stop together after the rollout.
            if waits or (self._is_late and self._accelerator.num_processes == 1):
                raise Preempted("SIGTERM ended the rollout.")
            progress(ledger)

        return step

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._any(self._is_late):
            raise Preempted("SIGTERM ended the optimizer step.")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stops = self._any(self._received_at is not None)
        if self.stops:
            control.should_save = args.save_strategy != SaveStrategy.NO
            control.should_training_stop, control.should_evaluate = True, False

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stops:  # saved and stopped after the last step already
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stops = self.stops or self._any(self._received_at is not None)

    def _any(self, here: bool) -> bool:
        """Whether the condition holds on any process. Must be called on every process."""
        local = torch.tensor(int(here), device=self._accelerator.device)
        count: Any = self._accelerator.reduce(local, reduction="sum")
        return bool(count.item())


def save_last_step(trainer: Any) -> None:
    """Saves a checkpoint of the last complete optimizer step, unless it exists. Must be called on every process."""
    step, saved = trainer.state.global_step, trainer._state_callback.checkpoint
    is_saved = saved is not None and Path(saved).name == f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if step and not is_saved and trainer.args.save_strategy != SaveStrategy.NO:
        trainer._save_checkpoint(trainer.model, None)


def explained(interrupt: KeyboardInterrupt, trainer: Any) -> KeyboardInterrupt:
    """Returns Ctrl-C's exception with instructions to resume, and without the frames below `train`."""
    logger.debug("Interrupted here:", exc_info=True)
    close_bar(trainer.callback_handler.callbacks)
    if trainer.is_world_process_zero():
        interrupt.args = (where_it_stopped(trainer.args, trainer.state, trainer._state_callback.checkpoint),)
    return interrupt.with_traceback(None)
