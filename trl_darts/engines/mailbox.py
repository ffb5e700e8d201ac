"""
Messages between processes without collectives, so that no process blocks while another one decodes or waits for a
server.

The store has no authentication, and messages are pickles, which can run code. Each message is therefore signed with a
key that only the run's processes have, and its signature is checked before it is unpickled.
"""

import hmac
import os
import pickle
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..errors import GenerationError


# A wait is renewed this often. If the store's process dies, the wait fails at once.
WAIT_S = 60.0
POLL_S = 0.005
KEY_BYTES = SIGNATURE_BYTES = 32  # of SHA-256


class Mailbox:
    """Signed messages in a key-value store on the main process."""

    def __init__(self, store: Any, process_index: int, num_processes: int, key: bytes) -> None:
        self._store = store
        self._key = key
        self._num_processes = num_processes
        self.process_index = process_index
        self._num_read = 0
        self._num_announced = 0
        self._num_exchanges = 0

    @classmethod
    def open(cls, process_index: int, num_processes: int) -> "Mailbox":
        """Opens this process's mailbox. Must be called on every process."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        box: list[Any] = [None, None]
        store = None
        if process_index == 0:
            store = TCPStore(host, 0, num_processes, is_master=True, wait_for_workers=False)
            box = [store.port, secrets.token_bytes(KEY_BYTES)]
        broadcast_object_list(box, from_process=0)
        port, key = box
        if store is None:
            store = TCPStore(host, port, num_processes, is_master=False, wait_for_workers=False)
        return cls(store, process_index, num_processes, key)

    def next_exchange(self) -> int:
        """Returns a number that tells the messages of a rollout from others. Called on every process."""
        self._num_exchanges += 1
        return self._num_exchanges

    def post(self, receiver: int, message: Any) -> None:
        """Sends a message; returns at once."""
        number = self._store.add(f"inbox/{receiver}", 1)
        self._set(f"inbox/{receiver}/{number}", pickle.dumps(message))

    def receive(self) -> list[Any]:
        """Returns the messages received since the last call, in the order in which they were sent."""
        inbox = f"inbox/{self.process_index}"
        messages = []
        for number in range(self._num_read + 1, self._store.add(inbox, 0) + 1):
            messages.append(pickle.loads(self._get(f"{inbox}/{number}")))
            self._store.delete_key(f"{inbox}/{number}")
        self._num_read += len(messages)
        return messages

    def announce(self, message: bytes) -> None:
        """Sends a message to `await_announcement` on all other processes; returns at once."""
        self._num_announced += 1
        self._set(f"announcement/{self._num_announced}", message)

    def await_announcement(self, meanwhile: Callable[[], None] | None = None) -> bytes:
        """Waits for the next announcement without a timeout, and calls `meanwhile` every 5 ms until then."""
        self._num_announced += 1
        name = f"announcement/{self._num_announced}"
        while meanwhile is not None and not self._store.check([name]):
            meanwhile()
            time.sleep(POLL_S)
        self._wait(name)
        message = self._get(name)
        # The last reader deletes the message, because the main process does not know when all have read it.
        if self._store.add(f"{name}/read", 1) == self._num_processes - 1:
            self._store.delete_key(name)
            self._store.delete_key(f"{name}/read")
        return message

    def _set(self, name: str, message: bytes) -> None:
        self._store.set(name, self._sign(name, message) + message)

    def _get(self, name: str) -> bytes:
        signed = self._store.get(name)
        signature, message = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(name, message)):
            raise GenerationError(
                f"The message {name!r} has no valid signature of a process of this run: someone else writes to its "
                "key-value store. Keep the ports of the main process in a private network."
            )
        return message

    def _sign(self, name: str, message: bytes) -> bytes:
        """Signs a message with its name, so that it is invalid under another name."""
        return hmac.digest(self._key, name.encode() + b"\0" + message, "sha256")

    def _wait(self, name: str) -> None:
        while True:
            try:
                return self._store.wait([name], timedelta(seconds=WAIT_S))
            except torch.distributed.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise
