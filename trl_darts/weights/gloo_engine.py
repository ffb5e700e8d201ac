"""vLLM's weight-transfer engine for servers without CUDA, registered as `"gloo"` by `plugin`. Runs in the workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .gloo import SYNC_TIMEOUT_S, BroadcastGroup
from .reload import finish_reload, initialize_layerwise_reload, restore_unfinished_layers


logger = logging.getLogger("vllm.trl_darts")


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """
    Where the trainer waits.

    Args:
        master_address (`str`):
            Its address.
        master_port (`int`):
            Port of its store.
        rank_offset (`int`):
            Rank of the first worker.
        world_size (`int`):
            Workers and trainer.
        timeout_s (`float`, *optional*):
            See [`BroadcastGroup`].
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float = SYNC_TIMEOUT_S


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Names, dtypes (`"bfloat16"`) and shapes of the tensors, in the order in which they are broadcast."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """
    Receives checkpoint-format tensors by gloo broadcast, one by one, and loads them layer by layer.

    Loading in place, without the layerwise reload, would leave the packed copies that CPU layers multiply with as they
    were. If an update fails, the layers that it did not complete get their last weights back, so the server stays up,
    and the trainer is let go, so that it does not wait for the rest.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group. An earlier group, of a trainer that is gone, is left."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = BroadcastGroup.join(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Make the layers wait for new tensors."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive tensors and load them. Unlike the base class's, it does not ask for an accelerator."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        except Exception:
            logger.exception("A weight update failed. Layers that it did not complete keep their last weights.")
            self.shutdown()
            restore_unfinished_layers(self.model, self.vllm_config)
            raise

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load what the trainer broadcasts, as it arrives; see [`GlooUpdateInfo`]."""
        tensors = self._receive(update_info)
        self.model.load_weights(tensors)
        for _ in tensors:  # a model that takes only part of them must not leave the trainer alone
            pass

    def _receive(self, update_info: GlooUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self.group is None:
            raise RuntimeError("There is no group with the trainer. Call `/init_weight_transfer_engine` first.")
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))  # its own memory: layers keep it until complete
            self.group.broadcast(tensor)
            yield name, tensor.to(self.device)

    def finish_weight_update(self) -> None:
        """Put the new weights into place."""
        finish_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.close()
            self.group = None
