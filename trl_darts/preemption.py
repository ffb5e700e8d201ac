"""
SIGTERM, which schedulers send some time before they kill: a checkpoint is saved, and the process exits with 143.

transformers' `enable_jit_checkpoint` does not do it: each process decides by a timer of its own, at different steps, a
rollout that waits for servers is not ended, and the script goes on as if the training had finished.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from .errors import TRLDARTSError
from .scheduling.ledger import Ledger


EXIT_CODE = 128 + signal.SIGTERM
# Kubernetes, SLURM and torchrun leave 30 s unless they are told otherwise. The other half is for the checkpoint.
STEP_S = 15.0
# SLURM signals every process, and torchrun forwards what it gets: within this time, two signals are one.
REPEAT_S = 2.0


class Preempted(TRLDARTSError, RuntimeError):
    """SIGTERM ends the training within a step. Raised on every process at once."""


class Preemption(TrainerCallback):
    """
    What SIGTERM asked for, and where the training stops for it: after the optimizer step, if that takes at most
    `STEP_S`. A rollout that waits for servers ends at once. All processes stop at the same place, also where only some
    of them got the signal.
    """

    def __init__(self, accelerator: Accelerator, uses_servers: bool) -> None:
        self.stops = False  # the same on every process
        self._accelerator = accelerator
        self._uses_servers = uses_servers
        self._received_at: float | None = None  # on this process

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Inside, SIGTERM is handled here, unless there is another handler already (`enable_jit_checkpoint`)."""
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
        """A rollout's `on_progress` that ends it. Called on the main process."""

        def step(ledger: Ledger) -> None:
            waits = self._uses_servers and self._received_at is not None
            # Several processes that decode by themselves agree after the rollout.
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
        if self.stops:  # what an epoch's end does was done at its last step
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stops = self.stops or self._any(self._received_at is not None)

    def _any(self, here: bool) -> bool:
        """Whether it holds on any process. Called on every process at once."""
        own = torch.tensor(int(here), device=self._accelerator.device)
        votes: Any = self._accelerator.reduce(own, reduction="sum")
        return bool(votes.item())
