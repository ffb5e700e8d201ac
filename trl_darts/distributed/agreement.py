"""One value on all processes, computed on the main one; the others wait for it outside of any collective."""

import pickle
import time
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..errors import GenerationError
from .mailbox import POLL_S, Mailbox


DONE = b"done"
HEARD = (0, "heard")  # rollouts are counted from 1
HEARING_S = 5.0


class Agreement:
    """
    Lets all processes go on with what the main process found.

    Args:
        accelerator (`Accelerator`):
            The trainer's.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._mailbox: Mailbox | None = None

    @property
    def mailbox(self) -> Mailbox:
        """This process's mailbox. Must first be asked for on every process at once."""
        if self._mailbox is None:
            self._mailbox = Mailbox.open(self._accelerator.process_index, self._accelerator.num_processes)
        return self._mailbox

    def __call__(self, compute: Callable[[], Any], meanwhile: Callable[[], None] | None = None) -> Any:
        """
        Computes on the main process. Called on every process at once. It may take as long as it likes.

        Args:
            compute (`Callable`):
                What to compute.
            meanwhile (`Callable`, *optional*):
                What the other processes do again and again while they wait.

        Returns:
            `Any`: The main process's value, on every process. Its error is raised on every process too, so that none
            waits for one that failed.
        """
        if self._accelerator.num_processes == 1:
            return compute()
        mailbox = self.mailbox
        box: list[Any] = [None]
        if self._accelerator.is_main_process:
            try:
                box[0] = compute()
            except Exception as error:
                self.break_off(error)
                raise
            mailbox.announce(DONE)
        elif (word := mailbox.await_announcement(meanwhile)) != DONE:
            mailbox.post(0, HEARD)
            raise pickle.loads(word)
        broadcast_object_list(box, from_process=0)
        return box[0]

    def break_off(self, error: Exception) -> None:
        """
        Raises an error on the processes that wait, or will wait, for the main process, which calls this. It gives them
        a moment to hear of it: the store ends with its process.
        """
        self.mailbox.announce(_pickled(error))
        deadline, waiting = time.monotonic() + HEARING_S, self._accelerator.num_processes - 1
        while waiting and time.monotonic() < deadline:
            waiting -= self.mailbox.receive().count(HEARD)
            time.sleep(POLL_S)


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:  # an error that holds a lock or a socket, or that is not made of its arguments
        return pickle.dumps(GenerationError(f"{type(error).__name__}: {error}"))
