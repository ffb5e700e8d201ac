"""The client for weights over gloo, and its half of the broadcast."""

from __future__ import annotations

import atexit
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, ClassVar

import torch

from ..errors import ConfigurationError, WeightSyncError
from .client import INSTALL, Metadata, NamedParams, SyncedVLLMClient
from .gloo import SYNC_TIMEOUT_S, BroadcastGroup, joined_key, listen, local_address
from .rounds import call


# The server takes each tensor as it comes, so one that is late has a server that stands still.
SEND_TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 10e6
REPLY_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 60.0
BACKEND_FLAG = """`--weight-transfer-config '{"backend": "gloo"}'`"""


class GlooVLLMClient(SyncedVLLMClient):
    """
    Broadcasts weights with gloo, to servers with the backend of our vLLM plugin. Needs no CUDA on either side.

    Overrides `init_communicator`, the broadcast and `close_communicator`. A group that broke is formed again on the
    next update, so a server that was restarted under its address takes part again.
    """

    communicator: BroadcastGroup | None
    # A second trainer of this process, as when a notebook's cell is run again, takes over its predecessor's port.
    _holders: ClassVar[dict[int, GlooVLLMClient]] = {}

    def init_communicator(self, device: torch.device | str | int = "cpu") -> None:
        """
        Form the group with the server's workers.

        Args:
            device (`torch.device`, `str` or `int`, *optional*):
                Unused: tensors pass through the CPU.

        Raises:
            [`ConfigurationError`]: If the server has no gloo backend. Names the setting.
            [`WeightSyncError`]: If the group can't be formed.
        """
        config = self.get_server_info()["weight_transfer_config"]
        if config is None or config["backend"] != "gloo":
            found = (
                "no weight-transfer engine" if config is None else f"the weight-transfer backend {config['backend']!r}"
            )
            raise ConfigurationError(
                f"`weight_sync` ('gloo') does not fit the vLLM server at {self.base_url}: it has {found}. Restart it "
                f"with {BACKEND_FLAG}; the backend comes with {INSTALL}."
            )
        self.close_communicator()
        self.communicator = self._form_group()
        self._holders[self.group_port] = self
        atexit.register(self.close_communicator)

    def _form_group(self) -> BroadcastGroup:
        address = local_address(self.host)
        world_size = self.get_world_size() + 1
        if self.group_port in self._holders:
            self._holders[self.group_port].close_communicator()
        try:
            store = listen(address, self.group_port)
        except RuntimeError as error:
            raise WeightSyncError(
                f"`vllm_group_port` ({self.group_port}) can't be used for the weight group with the server at "
                f"{self.base_url}: {error}. Choose a free port; each training needs its own."
            ) from error
        info = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "timeout_s": SYNC_TIMEOUT_S,
        }
        body = {"init_info": info}
        reply = self._ask("/init_weight_transfer_engine", body)
        joined = [joined_key(rank) for rank in range(1, world_size)]
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not store.check(joined):  # joining a group that a worker never joins would block for the whole timeout
            if reply.done():
                reply.result()
            if time.monotonic() > deadline:
                raise WeightSyncError(f"The vLLM server at {self.base_url} did not join in {JOIN_TIMEOUT_S:g} s.")
            time.sleep(0.01)
        group = BroadcastGroup(store, 0, world_size, address)
        reply.result()
        return group

    def _broadcast(self, metadata: Metadata, named_params: NamedParams) -> None:
        if self.communicator is None:
            self.init_communicator()
        names, dtype_names, shapes = (list(field) for field in zip(*metadata, strict=True))
        body = {"update_info": {"names": names, "dtype_names": dtype_names, "shapes": shapes}}
        reply = self._ask("/update_weights", body)
        try:
            for announced, (name, tensor) in zip(metadata, named_params, strict=True):
                _check_announced(announced, name, tensor)
                self._send(tensor, reply)
        except BaseException:
            self.close_communicator()  # the server must not wait for the rest
            _last_words(reply)  # it puts its layers back before anything else is asked of it
            raise
        reply.result()

    def _ask(self, path: str, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """The answer to come. Its thread is left behind if the server never answers."""
        reply: Future[dict[str, Any]] = Future()

        def ask() -> None:
            try:
                reply.set_result(call(self, path, body, timeout_s=SYNC_TIMEOUT_S))
            except BaseException as error:
                reply.set_exception(error)

        threading.Thread(target=ask, name=f"trl_darts-{path}", daemon=True).start()
        return reply

    def _send(self, tensor: torch.Tensor, reply: Future[dict[str, Any]]) -> None:
        tensor = tensor.detach().cpu().contiguous()
        try:
            self.communicator.broadcast(tensor, SEND_TIMEOUT_S + tensor.nbytes / SLOWEST_BYTES_PER_S)
        except RuntimeError as error:
            self.close_communicator()
            words = _last_words(reply)
            raise (words or WeightSyncError(f"The broadcast to {self.base_url} broke: {error}")) from error

    def close_communicator(self) -> None:
        """Leave the group. Safe to call twice."""
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None
            self._holders.pop(self.group_port, None)
            atexit.unregister(self.close_communicator)


def _last_words(reply: Future[dict[str, Any]]) -> BaseException | None:
    """What the server says once the broadcast broke; nothing if it stands still."""
    try:
        return reply.exception(REPLY_TIMEOUT_S)
    except FutureTimeoutError:
        return None


def _check_announced(announced: tuple[str, str, list[int]], name: str, tensor: torch.Tensor) -> None:
    found = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
    if found != (announced[0], announced[1], list(announced[2])):
        raise WeightSyncError(f"The tensor {found} is not the one that was announced in its place, {announced}.")
