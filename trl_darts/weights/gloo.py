"""
The group over which the trainer (rank 0) broadcasts tensors to the workers of one server (ranks 1 to N).

It stands beside the default process group of either side, and needs none.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore


SYNC_TIMEOUT_S = 1800.0  # ZeRO-3 gathers of a large model between two broadcasts take minutes


def local_address(peer: str) -> str:
    """
    The IP address of this machine on the way to `peer`, so that gloo binds the interface that the two share.

    Args:
        peer (`str`):
            Host name or address. It is not contacted.
    """
    family, address = _resolve(peer)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        return sock.getsockname()[0]


def is_local(host: str) -> bool:
    """Whether `host` is this machine."""
    family, address = _resolve(host)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def _resolve(host: str) -> tuple[int, tuple[Any, ...]]:
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(
        found, key=lambda info: info[0] != socket.AF_INET
    )  # servers listen on IPv4 at least
    return family, address


def listen(address: str, port: int, timeout_s: float = SYNC_TIMEOUT_S) -> TCPStore:
    """The trainer's side of the rendezvous. Raises `RuntimeError` if the port is taken; `0` takes any."""
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), use_libuv=True
    )


class BroadcastGroup:
    """
    A member of the group.

    Args:
        store (`TCPStore`):
            The rendezvous, see [`listen`].
        rank (`int`):
            0 is the trainer.
        world_size (`int`):
            Number of members.
        address (`str`):
            This machine's address on the way to the others, see [`local_address`].
        timeout_s (`float`, *optional*):
            Seconds that a member waits for the others, in the rendezvous and in each broadcast.
    """

    def __init__(
        self, store: TCPStore, rank: int, world_size: int, address: str, timeout_s: float = SYNC_TIMEOUT_S
    ) -> None:
        self._store: TCPStore | None = store  # the trainer serves it as long as this lives
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)

    @classmethod
    def join(cls, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> BroadcastGroup:
        """A worker's side: connect to the trainer's store at `host` and tell that we are here."""
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), use_libuv=True)
        store.set(joined_key(rank), "here")
        return cls(store, rank, world_size, local_address(host), timeout_s)

    def broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """
        Send `tensor` (rank 0), or receive into it. Returns when it is done.

        Args:
            tensor (`torch.Tensor`):
                Contiguous, on the CPU.
            timeout_s (`float`, *optional*):
                Seconds, instead of the group's.

        Raises:
            `RuntimeError`: If a member is gone, or too late.
        """
        if self._group is None:
            raise RuntimeError("the group is closed")
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        # As bytes, because gloo does not know every dtype.
        self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def close(self) -> None:
        """Leave. The other members' pending and later broadcasts fail."""
        self._group = self._store = None


def joined_key(rank: int) -> str:
    """Key of the store that is set once the worker of this rank is there."""
    return f"joined/{rank}"
