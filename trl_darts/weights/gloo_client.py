"""The client for weights over gloo, and its half of the broadcast."""

from __future__ import annotations

import atexit
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch

from ..errors import ConfigurationError, WeightSyncError
from .client import INSTALL, Metadata, NamedParams, SyncedVLLMClient
from .gloo import SYNC_TIMEOUT_S, BroadcastGroup, joined_key, listen, local_address
from .rounds import call


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
        with ThreadPoolExecutor(1) as executor:
            self.communicator = self._form_group(executor)
        self._holders[self.group_port] = self
        atexit.register(self.close_communicator)

    def _form_group(self, executor: ThreadPoolExecutor) -> BroadcastGroup:
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
        reply = executor.submit(call, self, "/init_weight_transfer_engine", body, timeout_s=SYNC_TIMEOUT_S)
        joined = [joined_key(rank) for rank in range(1, world_size)]
        while not store.check(joined):  # joining a group that a worker never joins would block for the whole timeout
            if reply.done():
                reply.result()
            time.sleep(0.01)
        group = BroadcastGroup(store, 0, world_size, address)
        reply.result()
        return group

    def _broadcast(self, metadata: Metadata, named_params: NamedParams) -> None:
        if self.communicator is None:
            self.init_communicator()
        names, dtype_names, shapes = (list(field) for field in zip(*metadata, strict=True))
        body = {"update_info": {"names": names, "dtype_names": dtype_names, "shapes": shapes}}
        with ThreadPoolExecutor(1) as executor:
            reply = executor.submit(call, self, "/update_weights", body, timeout_s=SYNC_TIMEOUT_S)
            try:
                for announced, (name, tensor) in zip(metadata, named_params, strict=True):
                    _check_announced(announced, name, tensor)
                    self._send(tensor, reply)
            except BaseException:
                self.close_communicator()  # the server must not wait for the rest, nor we for the server
                raise
            reply.result()

    def _send(self, tensor: torch.Tensor, reply: Future[dict[str, Any]]) -> None:
        try:
            self.communicator.broadcast(tensor.detach().cpu().contiguous())
        except RuntimeError as error:
            self.close_communicator()
            raise (reply.exception() or WeightSyncError(f"The broadcast broke: {error}")) from error

    def close_communicator(self) -> None:
        """Leave the group. Safe to call twice."""
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None
            self._holders.pop(self.group_port, None)
            atexit.unregister(self.close_communicator)


def _check_announced(announced: tuple[str, str, list[int]], name: str, tensor: torch.Tensor) -> None:
    found = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
    if found != (announced[0], announced[1], list(announced[2])):
        raise WeightSyncError(f"The tensor {found} is not the one that was announced in its place, {announced}.")
