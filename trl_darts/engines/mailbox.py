"""
Messages between processes without a collective: no process stands still because another one is busy decoding, or waits
for a server.
"""

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore  # type: ignore[attr-defined]


# A wait is renewed this often. The connection of a store whose process is gone breaks at once, whatever this is.
WAIT_S = 60.0
POLL_S = 0.005


class Mailbox:
    """Messages in a key-value store that the main process holds."""

    def __init__(self, store: Any, process_index: int, num_processes: int) -> None:
        self._store = store
        self._num_processes = num_processes
        self.process_index = process_index
        self._num_read = 0
        self._num_announced = 0

    @classmethod
    def open(cls, process_index: int, num_processes: int) -> "Mailbox":
        """Opens this process's mailbox. Called on every process at once."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        box: list[Any] = [None]
        store = None
        if process_index == 0:
            store = TCPStore(host, 0, num_processes, is_master=True, wait_for_workers=False)
            box[0] = store.port
        broadcast_object_list(box, from_process=0)
        if store is None:
            store = TCPStore(host, box[0], num_processes, is_master=False, wait_for_workers=False)
        return cls(store, process_index, num_processes)

    def post(self, receiver: int, message: Any) -> None:
        """Sends a message; returns at once."""
        number = self._store.add(f"inbox/{receiver}", 1)
        self._store.set(f"inbox/{receiver}/{number}", pickle.dumps(message))

    def receive(self) -> list[Any]:
        """The messages that came since the last call, in the order in which they were sent."""
        inbox = f"inbox/{self.process_index}"
        messages = []
        for number in range(self._num_read + 1, self._store.add(inbox, 0) + 1):
            messages.append(pickle.loads(self._store.get(f"{inbox}/{number}")))
            self._store.delete_key(f"{inbox}/{number}")
        self._num_read += len(messages)
        return messages

    def announce(self, message: bytes) -> None:
        """Sends a message to all other processes, which wait for it, or will; returns at once."""
        self._num_announced += 1
        self._store.set(f"announcement/{self._num_announced}", message)

    def await_announcement(self, meanwhile: Callable[[], None] | None = None) -> bytes:
        """Waits for the next announcement, however long it takes. `meanwhile` is called every 5 ms until then."""
        self._num_announced += 1
        key = f"announcement/{self._num_announced}"
        while meanwhile is not None and not self._store.check([key]):
            meanwhile()
            time.sleep(POLL_S)
        self._wait(key)
        message = self._store.get(key)
        # The last reader deletes it. The main process can't tell: it does not wait for the others, not even in a
        # broadcast over NCCL.
        if self._store.add(f"{key}/read", 1) == self._num_processes - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/read")
        return message

    def _wait(self, key: str) -> None:
        while True:
            try:
                return self._store.wait([key], timedelta(seconds=WAIT_S))
            except torch.distributed.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise
