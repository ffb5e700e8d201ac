"""Writes weights to files. Each version appears atomically in a directory, which is removed at the end of the run."""

import fcntl
import json
import os
import shutil
import socket
import tempfile
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..engines.addresses import is_this_machine
from ..errors import ConfigurationError, WeightSyncError
from . import ADAPTER, ADAPTER_CONFIG


SHARD_BYTES = 1 << 29  # additional memory needed while writing
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "trl_darts-"


class WeightDirectory:
    """
    Holds the newest written version, `<parent>/trl_darts-<id>/v<version>`, and removes it at the end. Of adapters, it
    holds all versions that servers have.

    Without `sync_dir`, the parent is shared memory, or the temporary directory if a version would take more than half
    of the free memory. Directories of killed runs are removed by the next run on the same machine.
    """

    def __init__(self, sync_dir: str | Path | None = None, shard_bytes: int = SHARD_BYTES) -> None:
        self.is_local = sync_dir is None
        self.shard_bytes = shard_bytes
        name = PREFIX + uuid.uuid4().hex[:12]  # two runs may share a parent
        if sync_dir is None:
            parents = [Path(tempfile.gettempdir())]
            if os.access(SHARED_MEMORY, os.W_OK):
                parents.insert(0, SHARED_MEMORY)
        else:
            parents = [Path(sync_dir).absolute()]
        self.roots = [parent / name for parent in parents]  # the last one is used if the others have no room
        self._locks: list[IO[str]] = []
        # Called when the interpreter exits, at the latest.
        self.close = weakref.finalize(self, _remove, self.roots, self._locks)

    @property
    def name(self) -> str:
        """A name that no other run has."""
        return self.roots[-1].name

    def can_be_read_by(self, url: str) -> bool:
        """Whether a server can read the directory, unless the shared one is not what it should be."""
        return not self.is_local or is_this_machine(urlsplit(url).hostname or "")

    def check_server(self, url: str) -> None:
        """Raises [`ConfigurationError`] if a server is on another machine and can't read a local directory."""
        if not self.can_be_read_by(url):
            raise ConfigurationError(
                f"The vLLM server at {url} is on another machine and can't read this machine's local files. Set "
                "`weight_sync='filesystem'`, and `weight_sync_dir` to a directory that both can access under one path."
            )

    def _begin(self) -> None:
        """Creates and locks the directories on the first write."""
        for root in self.roots:
            _remove_abandoned(root.parent)
            # Servers may belong to another user, who can read a directory only if it was given.
            root.mkdir(mode=0o700 if self.is_local else 0o777, parents=not self.is_local)
            lock = (root / "lock").open("w")
            self._locks.append(lock)
            with suppress(OSError):  # a shared file system may have no locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when this process ends
                lock.write(socket.gethostname())
                lock.flush()

    def path(self, version: int) -> Path | None:
        """Returns the directory of a version, `None` if it does not exist."""
        return next((root / f"v{version}" for root in self.roots if (root / f"v{version}").is_dir()), None)

    def write(self, version: int, named_params: Iterable[tuple[str, torch.Tensor]], num_bytes: int) -> Path:
        """Writes a version of `num_bytes`, one shard in memory at a time, and returns its directory."""

        def fill(path: Path) -> None:
            for index, shard in enumerate(self._shards(named_params)):
                save_file(shard, path / f"model-{index:05d}.safetensors")

        return self._publish(version, fill, num_bytes)

    def write_adapter(self, version: int, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a version of a LoRA adapter, and returns its directory."""

        def fill(path: Path) -> None:
            text = json.dumps(config)
            save_file(tensors, path / ADAPTER, {ADAPTER_CONFIG: text})  # also inside, for servers that get the file
            (path / ADAPTER_CONFIG).write_text(text)

        return self._publish(version, fill, sum(tensor.nbytes for tensor in tensors.values()))

    def _publish(self, version: int, fill: Callable[[Path], None], num_bytes: int) -> Path:
        """Fills the directory of a version, which appears at once."""
        root = self.roots[-1]
        try:
            if not self._locks:
                self._begin()
            root = next((root for root in self.roots[:-1] if 2 * num_bytes <= _free_bytes(root)), root)
            partial = root / f".v{version}.partial"
            partial.mkdir()
            fill(partial)
            partial.rename(root / f"v{version}")
        except BaseException as error:
            shutil.rmtree(root / f".v{version}.partial", ignore_errors=True)
            if not isinstance(error, (OSError, SafetensorError)):
                raise
            raise WeightSyncError(
                f"The weights could not be written to {root.parent}: {error}. Free some space, or set "
                "`weight_sync_dir` to another directory that the servers can read."
            ) from error
        return root / f"v{version}"

    def _shards(self, named_params: Iterable[tuple[str, torch.Tensor]]) -> Iterable[dict[str, torch.Tensor]]:
        shard: dict[str, torch.Tensor] = {}
        num_bytes = 0
        for name, tensor in named_params:
            # A copy, because the caller may change the original, and safetensors rejects tensors that share memory.
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            num_bytes += tensor.nbytes
            if num_bytes >= self.shard_bytes:
                yield shard
                shard, num_bytes = {}, 0
        if shard:
            yield shard

    def keep_only(self, versions: Collection[int]) -> None:
        """Removes every other version. The newest one stays for servers that reconnect."""
        names = {f"v{version}" for version in versions}
        for root in self.roots:
            for path in root.glob("v*"):
                if path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)


def _free_bytes(root: Path) -> int:
    """Returns the free bytes of a shared-memory directory, whose nominal size may exceed the available memory."""
    return min(shutil.disk_usage(root).free, int(psutil.virtual_memory().available))


def _remove_abandoned(parent: Path) -> None:
    """
    Removes directories of killed runs, which would occupy their space forever. Only those of this machine: a shared
    file system may not show the locks of others.
    """
    for path in parent.glob(f"{PREFIX}*/lock"):
        with suppress(OSError), path.open("a+") as lock:  # raised if it is in use or belongs to another user
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.seek(0)
            if lock.read() == socket.gethostname():
                shutil.rmtree(path.parent, ignore_errors=True)


def _remove(roots: list[Path], locks: list[IO[str]]) -> None:
    for root in roots:
        shutil.rmtree(root, ignore_errors=True)
    for lock in locks:
        lock.close()
