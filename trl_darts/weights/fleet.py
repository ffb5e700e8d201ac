"""Several vLLM servers behind the one client that TRL's `VLLMGeneration` talks to: who has which weights."""

from __future__ import annotations

import itertools
import logging
import math
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch

from ..errors import ConfigurationError, GenerationError, TRLDARTSError, WeightSyncError
from ..scheduling.policies import check_choice
from ..waiting import said_meanwhile
from . import WEIGHT_SYNCS
from .client import SyncedVLLMClient
from .files import WeightDirectory, is_this_machine
from .update import NamedParams, WeightUpdate, whole


Metadata = list[tuple[str, str, list[int]]]

CHUNK_BYTES = 1 << 30
GROUP_PORT = 51216  # TRL's default

logger = logging.getLogger(__name__)


def make_client(
    base_urls: Sequence[str],
    weight_sync: str = "auto",
    device: torch.device | str | int = "cpu",
    group_port: int = GROUP_PORT,
    connection_timeout: float = 0.0,
    sync_dir: str | Path | None = None,
    api_key: str | None = None,
) -> FleetVLLMClient:
    """
    The client for one or several servers. Waits until they answer; `init_communicator` checks that they fit.

    `device` is that of the trainer's main process. Each server's NCCL group has the next free port from `group_port`
    on.
    """
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    weight_sync = resolve_weight_sync(weight_sync, device, sync_dir)
    if not base_urls or len(set(base_urls)) < len(base_urls):
        raise ConfigurationError(f"`base_urls` ({list(base_urls)}) must be one or several different addresses.")
    clients = [
        SyncedVLLMClient(url.rstrip("/"), group_port + index, connection_timeout, api_key)
        for index, url in enumerate(base_urls)
    ]
    return FleetVLLMClient(clients, WeightDirectory(sync_dir) if weight_sync == "filesystem" else None)


def resolve_weight_sync(weight_sync: str, device: torch.device, sync_dir: str | Path | None = None) -> str:
    """What a setting of `weight_sync` means on a device: `"nccl"` or `"filesystem"`. Refuses what can't work."""
    check_choice("weight_sync", weight_sync, WEIGHT_SYNCS)
    if weight_sync == "auto":
        weight_sync = "nccl" if device.type == "cuda" else "filesystem"
    if weight_sync == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            f"`weight_sync` ('nccl') needs a CUDA device, and the trainer runs on {str(device)!r}. Use 'filesystem'."
        )
    if weight_sync == "nccl" and sync_dir is not None:
        raise ConfigurationError(
            f"`weight_sync_dir` ({str(sync_dir)!r}) is for `weight_sync='filesystem'`, and this training's weights go "
            "over NCCL. Change one of them."
        )
    return weight_sync


class FleetVLLMClient:
    """
    Keeps several servers at the same weights.

    Over NCCL, parameters are materialised once, in chunks of 1 GiB, and each chunk goes to one server after the other,
    because a packed NCCL broadcast runs its iterator to the end, and two communicators at work on one device can
    deadlock. So a sync takes as many times longer as there are servers. As files, weights are written once, and all
    servers load them at once.

    A server that fails does not keep the others from the new weights, but the sync raises. Servers in `excluded` are
    left alone; [`refresh`] brings one to the weights of the last sync. Without a `directory`, weights go over NCCL.
    """

    def __init__(
        self,
        clients: Sequence[SyncedVLLMClient],
        directory: WeightDirectory | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.clients = list(clients)
        self.directory = directory
        self.chunk_bytes = chunk_bytes
        self.version = 0  # of the last sync; it is shown by servers as `"v<version>"`
        self.excluded: set[str] = set()  # base URLs of servers that are known to be down
        self._device: torch.device | str | int = "cpu"

    @property
    def base_urls(self) -> list[str]:
        return [client.base_url for client in self.clients]

    @property
    def active(self) -> list[SyncedVLLMClient]:
        return [client for client in self.clients if client.base_url not in self.excluded]

    @property
    def behind(self) -> list[str]:
        """Base URLs of the servers that have not got the weights of the last sync."""
        return [client.base_url for client in self.clients if client.version != self.version]

    def get_server_info(self) -> dict[str, Any]:
        """The first server's configuration."""
        return self.clients[0].get_server_info()

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Form one NCCL group per server, or check that each can read what is written."""
        self._device = device
        for client in self.clients:
            self._connect(client)

    def close_communicator(self) -> None:
        """Leave every group, and remove what was written."""
        for client in self.clients:
            client.close_communicator()
        if self.directory is not None:
            self.directory.close()

    def _connect(self, client: SyncedVLLMClient) -> None:
        if self.directory is None:
            client.group_port = free_port(client.group_port)
            with said_meanwhile(f"Waiting for {client.base_url} to join the weight group on port {client.group_port}"):
                client.init_communicator(self._device)
            return
        client.call("/server_info", params={"config_format": "json"}, method="GET")  # it is there, in development mode
        if self.directory.is_local and not is_this_machine(str(client.host)):
            raise ConfigurationError(
                f"The vLLM server at {client.base_url} is on another machine and can't see what this one writes. Set "
                "`weight_sync='filesystem'` and `weight_sync_dir`, a directory that both see under the same path."
            )

    def add(self, base_url: str) -> None:
        """Connect to one more server. It has none of the weights; see [`refresh`]."""
        port = 1 + max(client.group_port for client in self.clients)
        client = SyncedVLLMClient(base_url, port, api_key=self.clients[0].api_key)
        self._connect(client)
        self.clients.append(client)

    def remove(self, base_url: str) -> None:
        """Leave a server to itself."""
        client = self._client(base_url)
        self.clients.remove(client)
        client.close_communicator()

    def rejoin(self, base_url: str) -> bool:
        """Form the group with a server that has come back anew, so that it takes part in the next sync."""
        try:
            self._reconnect(self._client(base_url))
        except (TRLDARTSError, requests.RequestException) as error:
            logger.warning("The vLLM server at %s can't be given weights: %s", base_url, error)
            return False
        return True

    def _reconnect(self, client: SyncedVLLMClient) -> None:
        client.close_communicator()
        self._connect(client)

    def _client(self, base_url: str) -> SyncedVLLMClient:
        return next(client for client in self.clients if client.base_url == base_url)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of every server that has the weights of the last sync."""
        for client in self.active:
            if client.version == self.version:
                client.call("/reset_prefix_cache")

    def update_named_params(self, metadata: Metadata, named_params: NamedParams) -> None:
        """
        Bring all servers to new weights. `metadata` has name, dtype (`"bfloat16"`) and shape of each tensor, in the
        order of `named_params`, which is always run to its end.
        """
        self.version += 1  # also where only some get them: a version is never used twice
        with whole(named_params, len(metadata)) as params:
            if self.directory is None:
                self._broadcast(self.active, metadata, params)
                return
            num_bytes = sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in metadata)
            path = self.directory.write(self.version, params, num_bytes)  # also for those that come back later
        try:
            self._load(self.active, path)
        finally:
            self.directory.keep_only(self.version)

    def refresh(self, base_url: str, metadata: Metadata, named_params: NamedParams | None) -> bool:
        """
        Bring one server to the weights of the last sync, for example one that was restarted. Returns whether it has
        them: over NCCL it needs the tensors again, and has them not without.
        """
        client = self._client(base_url)
        if self.version == 0:
            return True
        # One that was only slow still has them. What it shows is no proof by itself: an earlier run may have left it.
        if client.version == self.version and client.weight_version() == f"v{self.version}":
            client.resume()
            return True
        if self.directory is not None:
            path = self.directory.path(self.version)
            if path is None:  # it could not be written
                return False
            self._load([client], path)
        elif named_params is None:
            return False
        else:
            self._reconnect(client)
            with whole(named_params, len(metadata)) as params:
                self._broadcast([client], metadata, params)
        return True

    def _load(self, clients: list[SyncedVLLMClient], path: Path) -> None:
        with WeightUpdate(clients, self.version) as update:
            update.each(lambda client: client.load(path))

    def _broadcast(self, clients: list[SyncedVLLMClient], metadata: Metadata, named_params: NamedParams) -> None:
        if not clients:
            raise WeightSyncError(f"None of the vLLM servers is there: {', '.join(self.base_urls)}.")
        with WeightUpdate(clients, self.version) as update:
            update.each(SyncedVLLMClient.start_update)
            for names, tensors in self._chunks(metadata, named_params):
                update.in_turn(lambda client: _send(client, names, tensors))  # noqa: B023
            update.each(SyncedVLLMClient.finish_update)

    def _chunks(
        self, metadata: Metadata, named_params: NamedParams
    ) -> Iterator[tuple[Metadata, list[tuple[str, torch.Tensor]]]]:
        start = num_bytes = 0
        tensors: list[tuple[str, torch.Tensor]] = []
        for end, (name, tensor) in enumerate(named_params, 1):
            tensors.append((name, tensor))
            num_bytes += tensor.nbytes
            if num_bytes >= self.chunk_bytes or end == len(metadata):
                yield metadata[start:end], tensors
                start, num_bytes, tensors = end, 0, []

    def generate(
        self, prompts: list[Any], features: list[Any] | None = None, **kwargs: Any
    ) -> dict[str, list[Any] | None]:
        """TRL's blocking generation, each server with an equal share of the prompts. Arguments are TRL's."""
        share = -(-len(prompts) // len(self.clients))
        starts = range(0, len(prompts), max(share, 1))

        def part(client: SyncedVLLMClient, start: int) -> dict[str, Any]:
            end = start + share
            return client.generate(prompts[start:end], None if features is None else features[start:end], **kwargs)

        with ThreadPoolExecutor(len(self.clients)) as executor:
            parts = list(executor.map(part, self.clients, starts))
        return {
            key: None if value is None else list(itertools.chain.from_iterable(part[key] for part in parts))
            for key, value in parts[0].items()
        }

    def image_features(self, images: list[Any], **kwargs: Any) -> list[Any]:
        """
        Image features for [`~FleetVLLMClient.generate`]. They don't depend on weights: the first server that answers
        makes them.
        """
        failures = []
        for client in self.active:
            try:
                return client.image_features(images, **kwargs)
            except requests.RequestException as error:
                failures.append(f"{client.base_url}: {type(error).__name__}: {error}")
        raise GenerationError(f"No vLLM server processed the images. {'; '.join(failures)}")


def _send(client: SyncedVLLMClient, metadata: Metadata, tensors: list[tuple[str, torch.Tensor]]) -> None:
    with said_meanwhile(f"Waiting for {client.base_url} to take new weights over NCCL"):
        client.update_named_params(metadata, iter(tensors))


def free_port(first: int) -> int:
    """
    The first port from `first` on that nobody uses. Looked for when a group is formed, not before: another training on
    this machine may form its own while a model is loaded.
    """
    for port in range(first, 1 << 16):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigurationError(
        f"`vllm_group_port` ({first}) must be a port with a free one at or above it, up to 65535. Lower it."
    )
