"""
Several processes inside one: a thread for each, with its own connection to a real key-value store. Connections are
made once, because some take five seconds.
"""

import itertools
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trl_darts.engines.mailbox import Mailbox


TIMEOUT_S = 20
_spaces = itertools.count()


@cache
def store() -> torch.distributed.TCPStore:
    """Returns the store of the main process."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@cache
def connection(number: int) -> torch.distributed.TCPStore:
    """Returns a connection to the store."""
    return torch.distributed.TCPStore("127.0.0.1", store().port, is_master=False, wait_for_workers=False)


def open_mailboxes(count: int) -> list[Mailbox]:
    """Opens new mailboxes for a group of processes, each over its own connection."""
    space = f"space{next(_spaces)}"
    stores = [torch.distributed.PrefixStore(space, connection(index)) for index in range(count)]
    return [Mailbox(own, index, count, key=b"of this training") for index, own in enumerate(stores)]


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions in separate threads. Returns their values, or raises the first error."""
    results, errors = in_threads(*functions)
    if errors:
        raise next(iter(errors.values()))
    return results


def in_threads(*functions: Callable[[], Any]) -> tuple[list[Any], dict[int, BaseException]]:
    """Runs functions in separate threads. Returns their values and their errors."""
    results: list[Any] = [None] * len(functions)
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    hanging = [index for index, thread in enumerate(threads) if thread.is_alive()]
    if hanging:
        raise AssertionError(f"threads {hanging} hang; the others raised {errors}")
    return results, errors
