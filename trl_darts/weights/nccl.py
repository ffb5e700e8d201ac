"""
Sends weights over NCCL. The trainer forms one group per server, so that a failure affects only one server.

NCCL has no timeout: a call blocks forever if its peer is gone. Each blocking call therefore runs in its own thread,
next to the HTTP call to the server. If one of them fails or takes too long, the group's communicator is aborted, which
ends the blocked call.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch

from ..engines.vllm_api import VLLMServer
from ..engines.waiting import log_while_waiting
from ..errors import ConfigurationError, WeightSyncError
from ..trl_compat import is_vllm_available
from .calls import ask, look_up
from .parameters import Metadata, NamedParams, cast, num_bytes


# Size of a broadcast: the buffer size of vLLM, equal in all its versions. Two buffers are alive at once.
CHUNK_BYTES = 1 << 30
# Most seconds for a group to form, or for a chunk to arrive. The trainer's other processes wait in a collective, whose
# watchdog ends them after 600 s or later, so that a long `vllm_server_timeout` must not count here.
GROUP_TIMEOUT_S = 120.0
DIAL_BACK_S = 20.0  # a server that can reach the trainer connects within a second
GRACE_S = 1.0  # lets the HTTP call, whose message is more useful, time out first
GROUP_PORT = 51216  # TRL's default


@dataclass(frozen=True)
class WeightChunk:
    """Tensors packed into one buffer, as vLLM reads them. The buffer is complete after the event."""

    metadata: Metadata
    buffer: torch.Tensor  # (bytes,)
    filled: Any  # a `torch.cuda.Event`


def weight_chunks(metadata: Metadata, named_params: NamedParams, device: torch.device) -> Iterator[WeightChunk]:
    """
    Packs parameters into buffers on the current stream. Each tensor is copied immediately, because gathered parameters
    are freed and merged adapters are unmerged in place.
    """
    for part in _parts(metadata):
        sizes = [num_bytes([entry]) for entry in part]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        tensors = cast(part, islice(named_params, len(part)))
        for room, (_, tensor) in zip(buffer.split(sizes), tensors, strict=True):
            room.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        filled = torch.cuda.Event()
        filled.record()
        yield WeightChunk(part, buffer, filled)


def _parts(metadata: Metadata) -> Iterator[Metadata]:
    """Splits the parameters into buffers at vLLM's limit, and where a tensor would be misaligned for its dtype."""
    part: Metadata = []
    size = 0
    for entry in metadata:
        more = num_bytes([entry])
        if part and (size + more > CHUNK_BYTES or size % getattr(torch, entry[1]).itemsize):
            yield part
            part, size = [], 0
        part.append(entry)
        size += more
    if part:
        yield part


class WeightGroup:
    """The trainer's end of one server's group. Blocking calls run in threads."""

    def __init__(self, communicator: Any, timeout_s: float) -> None:
        self._communicator = communicator  # vLLM's `PyNcclCommunicator`
        self._timeout_s = timeout_s
        # One stream per group: on a shared stream, all broadcasts would wait for a lost server.
        self._stream: Any = torch.cuda.Stream(communicator.device)

    @classmethod
    async def form(cls, server: VLLMServer, device: torch.device, first_port: int, timeout_s: float) -> "WeightGroup":
        """Forms the group: listens on the first free port, and has the server's workers join."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        size = 1 + (await look_up(server, "/get_world_size"))["world_size"]
        listener = listen(first_port)
        address, port = listener.getsockname()
        info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        if _init_says_packed():
            info["packed"] = True
        path, body = "/init_weight_transfer_engine", {"init_info": info}
        answer = asyncio.ensure_future(ask(server, path, body, timeout_s))
        communicator: Any = object.__new__(PyNcclCommunicator)  # can be aborted while `__init__` runs
        try:
            await _dialled_back(server, listener, answer)
        except BaseException:
            answer.cancel()
            listener.close()
            raise
        await _beside(
            answer,
            lambda: _join(communicator, listener, (address, port), size, device, timeout_s),
            lambda: _abort(communicator),
            f"Waiting for {server.base_url} to join the weight group on port {port}",
            timeout_s,
        )
        return cls(communicator, timeout_s)

    async def send(self, server: VLLMServer, chunk: WeightChunk) -> None:
        """Sends a chunk and waits until the server has loaded it. After a failure, the group can't be used again."""
        names, dtypes, shapes = (list(values) for values in zip(*chunk.metadata, strict=True))
        info: dict[str, Any] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        if not _init_says_packed():
            info["packed"] = True
        answer = asyncio.ensure_future(ask(server, "/update_weights", {"update_info": info}, self._timeout_s))
        what = f"Waiting for {server.base_url} to receive new weights over NCCL"
        await _beside(answer, lambda: self._broadcast(chunk), self.destroy, what, self._timeout_s)

    def _broadcast(self, chunk: WeightChunk) -> None:
        if self._communicator.disabled:  # it would return without sending
            raise WeightSyncError("The NCCL group was aborted.")
        with torch.accelerator.device_index(self._communicator.device.index):
            self._stream.wait_event(chunk.filled)
            self._communicator.broadcast(chunk.buffer, src=0, stream=self._stream)
            self._stream.synchronize()  # the buffer must not be freed before

    def destroy(self) -> None:
        """Leaves the group, which ends all blocked calls."""
        _abort(self._communicator)


def listen(first_port: int) -> socket.socket:
    """
    Listens on the first free port from `first_port` on, at the address that vLLM detects for this machine. Other runs
    on this machine may use the same range.
    """
    from vllm.utils.network_utils import get_ip

    address = get_ip()
    for port in range(first_port, 1 << 16):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"The trainer can't listen at {address}:{port} for the servers' NCCL groups: {error.strerror}. "
                    "Set `VLLM_HOST_IP` in its environment to its own address in the servers' network, and "
                    "`vllm_group_port` to a port that it may open."
                ) from error
    raise ConfigurationError(
        f"`vllm_group_port` ({first_port}) must have a free port at or above it, up to 65535. Lower it."
    )


async def _dialled_back(server: VLLMServer, listener: socket.socket, answer: "asyncio.Future[Any]") -> None:
    """Waits until the server connects. Without this check, an unreachable trainer is noticed after five minutes."""
    loop, dialled = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, dialled.set)
    connection = asyncio.ensure_future(dialled.wait())
    try:
        await asyncio.wait({connection, answer}, timeout=DIAL_BACK_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(listener)
        connection.cancel()
    if answer.done():
        answer.result()  # raises if the server rejected the call
    if not dialled.is_set():
        address, port = listener.getsockname()
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} did not reach the trainer at {address}:{port} within "
            f"{DIAL_BACK_S:g} s, so it can't join the NCCL group for weights. Set `VLLM_HOST_IP` in the trainer's "
            "environment to its address in the servers' network, set `NCCL_SOCKET_IFNAME` on both sides to the "
            f"interface, and open port {port} in the firewall (see `vllm_group_port`)."
        )


def _join(
    communicator: Any,
    listener: socket.socket,
    address: tuple[str, int],
    size: int,
    device: torch.device,
    timeout_s: float,
) -> None:
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(
        *address, rank=0, world_size=size, store_timeout=int(timeout_s), listen_socket=listener
    )
    try:
        communicator.__init__(group, device)
    except RuntimeError as error:  # NCCL's own
        raise WeightSyncError(
            f"NCCL did not form the group for weights: {error}. If the trainer and a server share a GPU, which NCCL "
            "refuses, set `weight_sync='filesystem'`. Otherwise, `NCCL_DEBUG=WARN` on both sides shows why."
        ) from error
    if communicator.disabled:
        raise ConfigurationError(
            "`weight_sync` ('nccl') needs NCCL, and vLLM found no NCCL library in the trainer's environment. Install "
            "it (`pip install nvidia-nccl-cu12`), set `VLLM_NCCL_SO_PATH`, or set `weight_sync='filesystem'`."
        )


def _abort(communicator: Any) -> None:
    if hasattr(communicator, "comm"):
        communicator.destroy()
    communicator.group = None  # closes the socket that the server waits on


async def _beside(
    answer: "asyncio.Future[Any]", block: Callable[[], None], abort: Callable[[], None], what: str, timeout_s: float
) -> None:
    """
    Waits for a server's answer and for the blocking NCCL call that belongs to it. If one fails or times out, the other
    is ended.
    """
    try:
        async with log_while_waiting(what, timeout_s), asyncio.timeout(timeout_s + GRACE_S):
            await asyncio.gather(answer, _in_thread(block))
    except BaseException as error:
        answer.cancel()
        await asyncio.to_thread(abort)
        if isinstance(error, TimeoutError):
            raise WeightSyncError(f"NCCL did not finish within {timeout_s:g} s. {what}.") from error
        raise


def _in_thread(function: Callable[[], None]) -> "asyncio.Future[None]":
    """Runs a call that may never return in a daemon thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            function()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, failure)

    threading.Thread(target=run, name="trl_darts-nccl", daemon=True).start()
    return future


@cache
def _init_says_packed() -> bool:
    """Whether `packed` is an argument of the group (since vLLM 0.28) and not of each update."""
    return bool(is_vllm_available(min_version="0.28.0"))
