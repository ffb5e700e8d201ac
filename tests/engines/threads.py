"""
Several processes inside one: a thread for each, with a connection of its own to a real key-value store.

The connections are made once: every now and then one takes five seconds.
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
    """The store of the main process."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@cache
def connection(number: int) -> torch.distributed.TCPStore:
    """A connection to it."""
    return torch.distributed.TCPStore("127.0.0.1", store().port, is_master=False, wait_for_workers=False)


def open_mailboxes(count: int) -> list[Mailbox]:
    """New mailboxes that see each other and nobody else, each over a connection of its own."""
    space = f"space{next(_spaces)}"
    stores = [torch.distributed.PrefixStore(space, connection(index)) for index in range(count)]
    return [Mailbox(own, index, count, key=b"of this training") for index, own in enumerate(stores)]


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions in threads of their own. Returns what they return, or raises the first error."""
    results, errors = in_threads(*functions)
    if errors:
        raise next(iter(errors.values()))
    return results


def in_threads(*functions: Callable[[], Any]) -> tuple[list[Any], dict[int, BaseException]]:
    """What each of the functions returned or raised."""
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
