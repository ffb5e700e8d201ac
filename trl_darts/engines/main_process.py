"""Runs functions on the main process, and sends the result or the exception to the others."""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..errors import GenerationError
from .mailbox import POLL_S, Mailbox


T = TypeVar("T")

DONE = b"done"
RECEIVED = (0, "received")  # rollouts are counted from 1
RECEIVED_TIMEOUT_S = 5.0


class MainProcess:
    """
    Runs functions on the main process while the others wait without a collective: a rollout may take longer than the
    process group's timeout. All methods except `fail` must be called on every process.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._mailbox: Mailbox | None = None

    @property
    def index(self) -> int:
        """Rank of this process."""
        return self._accelerator.process_index

    @property
    def num_processes(self) -> int:
        return self._accelerator.num_processes

    @property
    def is_here(self) -> bool:
        """Whether this is the main process."""
        return self._accelerator.is_main_process

    @property
    def mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox.open(self.index, self.num_processes)
        return self._mailbox

    def run(self, compute: Callable[[], Any], meanwhile: Callable[[], None] | None = None) -> Any:
        """
        Runs a function on the main process and returns its value there, and `None` on the others, which repeatedly
        call `meanwhile` until it is done. Its exception is raised on every process.
        """
        if self.num_processes == 1:
            return compute()
        mailbox = self.mailbox  # opened before `compute`, because all processes must open it together
        if self.is_here:
            try:
                value = compute()
            except Exception as error:
                self.fail(error)
                raise
            mailbox.announce(DONE)
            return value
        announcement = mailbox.await_announcement(meanwhile)
        if announcement != DONE:
            mailbox.post(0, RECEIVED)
            raise pickle.loads(announcement)
        return None

    def broadcast(self, compute: Callable[[], T], meanwhile: Callable[[], None] | None = None) -> T:
        """Like `run`, but returns the value on every process."""
        box: list[Any] = [self.run(compute, meanwhile)]
        if self.num_processes > 1:
            broadcast_object_list(box, from_process=0)
        return box[0]

    def scatter(self, compute: Callable[[], Sequence[T]], meanwhile: Callable[[], None] | None = None) -> T:
        """Like `run`, but returns one value of the function's on each process, by its rank."""
        values = self.run(compute, meanwhile)
        if self.num_processes == 1:
            own: T = values[0]
            return own
        box: list[Any] = [None]
        torch.distributed.scatter_object_list(box, values, src=0)
        received: T = box[0]
        return received

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, by their rank, on the main process, and nothing on the others."""
        if self.num_processes == 1:
            return [value]
        values: list[Any] | None = [None] * self.num_processes if self.is_here else None
        torch.distributed.gather_object(value, values, dst=0)
        return values or []

    def fail(self, error: Exception) -> None:
        """
        Raises an error on the other processes, which wait for the main process. Called on the main process. Returns
        once they have received the error, or after a timeout, because the store ends with this process.
        """
        self.mailbox.announce(pickle.dumps(portable(error)))
        deadline, waiting = time.monotonic() + RECEIVED_TIMEOUT_S, self.num_processes - 1
        while waiting and time.monotonic() < deadline:
            waiting -= self.mailbox.receive().count(RECEIVED)
            time.sleep(POLL_S)


def portable(error: BaseException) -> BaseException:
    """Returns an error that another process can unpickle, with its message."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return GenerationError(f"{type(error).__name__}: {error}")
