"""One weight update: servers are paused, brought to the new weights, and resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from ..errors import WeightSyncError
from .client import SyncedVLLMClient


NamedParams = Iterator[tuple[str, torch.Tensor]]


class WeightUpdate:
    """
    One update of some servers, as a context.

    - A server is paused before its weights change and resumed afterwards, whether the update succeeded or not.
    - A server that fails leaves the update; the others go on and end with the complete new weights.
    - A server that ends the update without a failure has the new weights under their version, an empty prefix cache,
      and `version` set.
    - If a server failed, leaving raises a [`WeightSyncError`] that names each and has its message.
    """

    def __init__(self, clients: Sequence[SyncedVLLMClient], version: int) -> None:
        self.clients = list(clients)
        self.version = version
        self.failures: dict[SyncedVLLMClient, Exception] = {}

    @property
    def alive(self) -> list[SyncedVLLMClient]:
        return [client for client in self.clients if client not in self.failures]

    def each(self, action: Callable[[SyncedVLLMClient], Any]) -> None:
        """Act on all servers that are still in the update, at once."""
        self._at_once(action, self.alive)

    def in_turn(self, action: Callable[[SyncedVLLMClient], Any]) -> None:
        """The same, one after the other in this thread: the current CUDA device is a thread's own."""
        for client in self.alive:
            self._attempt(action, client)

    def _at_once(self, action: Callable[[SyncedVLLMClient], Any], clients: list[SyncedVLLMClient]) -> None:
        with ThreadPoolExecutor(max(1, len(clients))) as executor:
            list(executor.map(self._attempt, itertools.repeat(action), clients))

    def _attempt(self, action: Callable[[SyncedVLLMClient], Any], client: SyncedVLLMClient) -> None:
        try:
            action(client)
        except Exception as error:
            self.failures[client] = error

    def __enter__(self) -> WeightUpdate:
        try:
            self.each(SyncedVLLMClient.pause)
        except BaseException:  # Ctrl-C: the context is not left, because it was not entered
            self._abandon(self.clients)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        updated: list[SyncedVLLMClient] = []
        try:
            if error is None:
                self.each(lambda client: client.commit(self.version))
                self.each(SyncedVLLMClient.resume)
                updated = self.alive
        finally:  # also after Ctrl-C in the middle of it: no server stays paused
            for client in updated:
                client.version = self.version
            self._abandon([client for client in self.clients if client not in updated])
        if error is None and self.failures:
            raise self._summary() from next(iter(self.failures.values()))

    def _abandon(self, clients: list[SyncedVLLMClient]) -> None:
        self._at_once(lambda client: client.abandon(self.version), clients)

    def _summary(self) -> WeightSyncError:
        failures = {client.base_url: str(self.failures[client]) for client in self.clients if client in self.failures}
        lines = [f"- {url}: {message}" for url, message in failures.items()]
        servers = "the vLLM server" if len(lines) == 1 else f"{len(lines)} vLLM servers"
        return WeightSyncError("\n".join([f"The weights could not be brought to {servers}:", *lines]), failures)


@contextmanager
def whole(named_params: NamedParams, num_params: int) -> Iterator[NamedParams]:
    """
    The first `num_params` items; what is behind them runs when the context is left, also after an error.

    TRL's iterator gathers sharded parameters with the other processes, which wait for each item to be asked for, and
    unmerges LoRA adapters *in place* once it is asked for one more than there are: tensors that were not sent by then
    are sent without their adapter. (TRL 1.16 does that to the last packed buffer of each sync over NCCL.)
    """
    try:
        yield itertools.islice(named_params, num_params)
    except Exception:
        for _ in named_params:
            pass
        raise
    surplus = [name for name, _ in named_params]
    if surplus:
        raise WeightSyncError(f"{len(surplus)} tensors were not announced, and not sent: {', '.join(surplus[:5])}.")
