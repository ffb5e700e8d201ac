"""Checkpoints for `weight_sync="filesystem"`: each version appears in the directory at once and complete."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file


SHARD_BYTES = 2 << 30  # memory that is needed beside the model while writing


class WeightDirectory:
    """
    Holds the newest version that was written, `<sync_dir>/trl_darts-<id>/v<version>`, and removes what it made.

    Args:
        sync_dir (`str` or `Path`, *optional*):
            A directory that the servers see under the same path. Defaults to a new temporary directory.
        shard_bytes (`int`, *optional*):
            Size from which a file is closed and the next one begun.
    """

    def __init__(self, sync_dir: str | Path | None = None, shard_bytes: int = SHARD_BYTES) -> None:
        self.is_temporary = sync_dir is None
        token = uuid.uuid4().hex[:12]  # two trainings may share a directory
        parent = Path(sync_dir) if sync_dir is not None else Path(tempfile.gettempdir()) / f"trl_darts_weights_{token}"
        self._parent = parent.absolute()
        self.root = self._parent / f"trl_darts-{token}"
        self.shard_bytes = shard_bytes

    def write(self, version: int, named_params: Iterator[tuple[str, torch.Tensor]]) -> Path:
        """
        Write a version, one shard in memory at a time.

        Args:
            version (`int`):
                Its number.
            named_params (`Iterator[tuple[str, torch.Tensor]]`):
                The tensors, under the names of a checkpoint.

        Returns:
            `Path`: The directory with the `.safetensors` files.
        """
        target = self.root / f"v{version}"
        partial = self.root / f".v{version}.partial"
        for leftover in (partial, target):  # of an attempt that failed
            shutil.rmtree(leftover, ignore_errors=True)
        if self.is_temporary:
            self._parent.mkdir(mode=0o700, exist_ok=True)
        partial.mkdir(parents=True)
        shard: dict[str, torch.Tensor] = {}
        num_bytes = num_shards = 0
        for name, tensor in named_params:
            shard[name] = (
                tensor.detach().to("cpu", copy=True).contiguous()
            )  # a copy: the next step changes the original
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= self.shard_bytes:
                save_file(shard, partial / f"model-{num_shards:05d}.safetensors")
                shard, num_bytes, num_shards = {}, 0, num_shards + 1
        if shard:
            save_file(shard, partial / f"model-{num_shards:05d}.safetensors")
        os.rename(partial, target)
        return target

    def forget_before(self, version: int) -> None:
        """Remove every version but this one. It stays, because vLLM remembers its path as the model's."""
        for path in self.root.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._parent if self.is_temporary else self.root, ignore_errors=True)
