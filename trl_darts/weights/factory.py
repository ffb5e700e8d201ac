"""`make_client`: the client for a setting of `weight_sync`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..errors import ConfigurationError
from . import WEIGHT_SYNCS
from .client import NCCLVLLMClient, SyncedVLLMClient
from .directory import WeightDirectory
from .filesystem import FilesystemVLLMClient
from .fleet import FleetVLLMClient
from .gloo_client import GlooVLLMClient


GROUP_PORT = 51216  # TRL's default


def make_client(
    base_urls: Sequence[str],
    weight_sync: str = "auto",
    device: torch.device | str | int = "cpu",
    group_port: int = GROUP_PORT,
    connection_timeout: float = 0.0,
    sync_dir: str | Path | None = None,
    api_key: str | None = None,
) -> SyncedVLLMClient | FleetVLLMClient:
    """
    The client for one or several servers. Waits until they answer; `init_communicator` checks that they fit.

    Args:
        base_urls (`Sequence[str]`):
            Addresses of the servers.
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            `"nccl"`, `"gloo"` or `"filesystem"`. `"auto"` is NCCL on CUDA and gloo elsewhere.
        device (`torch.device`, `str` or `int`, *optional*, defaults to `"cpu"`):
            Device of the trainer's main process. An index is a CUDA device.
        group_port (`int`, *optional*, defaults to `51216`):
            Port of the first server's group; the next server has the next port.
        connection_timeout (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for each server to answer.
        sync_dir (`str` or `Path`, *optional*):
            Directory for `"filesystem"`, see [`WeightDirectory`].
        api_key (`str`, *optional*):
            Of the servers.

    Returns:
        [`SyncedVLLMClient`] or [`FleetVLLMClient`]: The latter for several servers.

    Raises:
        [`ConfigurationError`]: If a setting can't work.
        [`requests.ConnectionError`]: If a server does not answer in time.
    """
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    make = _maker(resolve_weight_sync(weight_sync, device, sync_dir), sync_dir)
    if not base_urls or len(set(base_urls)) < len(base_urls):
        raise ConfigurationError(f"`base_urls` ({list(base_urls)}) must be one or several different addresses.")
    clients = [
        make(
            base_url=url.rstrip("/"),
            group_port=group_port + index,
            connection_timeout=connection_timeout,
            api_key=api_key,
        )
        for index, url in enumerate(base_urls)
    ]
    return clients[0] if len(clients) == 1 else FleetVLLMClient(clients)


def resolve_weight_sync(weight_sync: str, device: torch.device, sync_dir: str | Path | None = None) -> str:
    """
    What a setting of `weight_sync` means on a device: `"nccl"`, `"gloo"` or `"filesystem"`.

    Raises:
        [`ConfigurationError`]: If the setting is unknown, or can't work on the device.
    """
    if weight_sync not in WEIGHT_SYNCS:
        raise ConfigurationError(
            f"`weight_sync` ({weight_sync!r}) must be one of {', '.join(map(repr, WEIGHT_SYNCS))}."
        )
    if weight_sync == "auto":
        weight_sync = "nccl" if device.type == "cuda" else "gloo"
    if weight_sync == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            f"`weight_sync` ('nccl') needs a CUDA device, and the trainer runs on {str(device)!r}. Use 'gloo', with a "
            "server that has the same backend, or 'filesystem'."
        )
    if sync_dir is not None and weight_sync != "filesystem":
        raise ConfigurationError(
            f"`weight_sync_dir` ({str(sync_dir)!r}) is for `weight_sync='filesystem'`, and `weight_sync` is "
            f"{weight_sync!r}. Change one of them."
        )
    return weight_sync


def _maker(weight_sync: str, sync_dir: str | Path | None) -> Callable[..., SyncedVLLMClient]:
    if weight_sync == "filesystem":
        directory = WeightDirectory(sync_dir)  # one for all servers
        return lambda **kwargs: FilesystemVLLMClient(directory=directory, **kwargs)
    return NCCLVLLMClient if weight_sync == "nccl" else GlooVLLMClient
