"""Several vLLM servers behind the one client that TRL's `VLLMGeneration` talks to."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import torch

from ..errors import ConfigurationError, GenerationError, TRLDARTSError, WeightSyncError
from .client import Metadata, NamedParams, NCCLVLLMClient, SyncedVLLMClient, finish_update, start_update, whole
from .filesystem import FilesystemVLLMClient, load_everywhere
from .rounds import UpdateRound


CHUNK_BYTES = 1 << 30

logger = logging.getLogger(__name__)


class FleetVLLMClient:
    """
    Keeps several servers at the same weights.

    Parameters are materialised once, in chunks of 1 GiB, and each chunk goes to all servers: with gloo to all at once,
    with NCCL to one after the other, because a packed NCCL broadcast runs its iterator to the end, and two
    communicators at work on one device can deadlock. So a sync over NCCL takes as many times longer as there are
    servers. With `"filesystem"` the weights are written once, and all servers load them at once.

    A server that fails does not keep the others from the new weights, but the sync raises. Servers in `excluded` are
    left alone; [`refresh`] brings one to the weights of the last sync.

    Args:
        clients (`Sequence[SyncedVLLMClient]`):
            One per server, all of one class. Each communicator has a port of its own.
        chunk_bytes (`int`, *optional*):
            Memory for parameters that are on their way.
    """

    def __init__(self, clients: Sequence[SyncedVLLMClient], chunk_bytes: int = CHUNK_BYTES) -> None:
        if not clients or len({type(client) for client in clients}) > 1:
            raise ConfigurationError(
                f"`clients` ({[type(client).__name__ for client in clients]}) must be at least one, all of one class."
            )
        self.clients = list(clients)
        self.chunk_bytes = chunk_bytes
        self.version = 0
        self.excluded: set[str] = set()  # base URLs of servers that are known to be down
        self._device: torch.device | str | int = "cpu"

    @property
    def base_url(self) -> str:
        """Address of the first server."""
        return self.clients[0].base_url

    @property
    def model(self) -> str:
        """Name that the first server serves its model under."""
        return self.clients[0].model

    @property
    def base_urls(self) -> list[str]:
        """Addresses of the servers."""
        return [client.base_url for client in self.clients]

    def get_server_info(self) -> dict[str, Any]:
        """The first server's configuration."""
        return self.clients[0].get_server_info()

    @property
    def active(self) -> list[SyncedVLLMClient]:
        """Clients of the servers that are not excluded."""
        return [client for client in self.clients if client.base_url not in self.excluded]

    @property
    def behind(self) -> list[str]:
        """Base URLs of the servers that have not got the weights of the last sync."""
        return [client.base_url for client in self.clients if client.version != self.version]

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Form one group per server; see the clients' own."""
        self._device = device
        for client in self.clients:
            client.init_communicator(device)

    def close_communicator(self) -> None:
        """Leave every group."""
        for client in self.clients:
            client.close_communicator()

    def add(self, base_url: str) -> None:
        """Take in one more server. It has none of the weights; see [`refresh`]."""
        client = self.clients[0].beside(base_url, 1 + max(client.group_port for client in self.clients))
        client.init_communicator(self._device)
        self.clients.append(client)

    def rejoin(self, base_url: str) -> bool:
        """Form the group with a server that has come back anew, so that it takes part in the next sync."""
        client = self._client(base_url)
        try:
            self._reconnect(client)
        except (TRLDARTSError, requests.RequestException) as error:
            logger.warning("The vLLM server at %s can't be given weights: %s", base_url, error)
            return False
        return True

    def remove(self, base_url: str) -> None:
        """Leave a server to itself."""
        client = self._client(base_url)
        self.clients.remove(client)
        client.disconnect()

    def _reconnect(self, client: SyncedVLLMClient) -> None:
        client.disconnect()
        client.init_communicator(self._device)

    def _client(self, base_url: str) -> SyncedVLLMClient:
        (client,) = (client for client in self.clients if client.base_url == base_url)
        return client

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of every server that has the weights of the last sync."""
        for client in self.active:
            if client.version == self.version:
                client.reset_prefix_cache()

    def update_named_params(self, metadata: Metadata, named_params: NamedParams) -> None:
        """
        Bring all servers to new weights; arguments as [`SyncedVLLMClient.update_named_params`].

        Raises:
            [`WeightSyncError`]: If a server does not have them. All others do, and their `version` says so.
        """
        version = self.version + 1
        try:
            with whole(named_params, len(metadata)) as params:
                self._sync(version, metadata, params)
        finally:
            self.version = version  # also where only some have them: a version is never used twice
            for client in self.clients:
                client._updating_weights = False

    def refresh(self, base_url: str, metadata: Metadata, named_params: NamedParams | None) -> bool:
        """
        Bring one server to the weights of the last sync, for example one that was restarted.

        Args:
            base_url (`str`):
                Which.
            metadata (`list[tuple[str, str, list[int]]]`):
                As of [`SyncedVLLMClient.update_named_params`].
            named_params (`Iterator[tuple[str, torch.Tensor]]`, *optional*):
                The tensors of the last sync. Not needed with `"filesystem"`, where they are on disk.

        Returns:
            `bool`: Whether it has them: `False` without tensors where they are needed.

        Raises:
            [`WeightSyncError`]: If it does not take them.
        """
        client = self._client(base_url)
        if isinstance(client, FilesystemVLLMClient):
            if self.version > 0:
                path = client.directory.root / f"v{self.version}"
                with UpdateRound([client], self.version) as update:
                    update.each(lambda client: client.load(path))
        elif named_params is None:
            return False
        else:
            self._reconnect(client)
            with whole(named_params, len(metadata)) as params:
                client.version = self.version - 1  # the update counts on
                client._sync(metadata, params)
        client.version = self.version
        return True

    def _sync(self, version: int, metadata: Metadata, named_params: NamedParams) -> None:
        clients = self.active
        if isinstance(self.clients[0], FilesystemVLLMClient):  # also for those that come back later
            load_everywhere(clients, self.clients[0].directory, version, named_params)
            return
        if not clients:
            raise WeightSyncError(f"None of the vLLM servers is there: {', '.join(self.base_urls)}.")
        in_turn = isinstance(clients[0], NCCLVLLMClient)
        with UpdateRound(clients, version, concurrent=not in_turn) as update:
            update.each(start_update)
            for names, tensors in self._chunks(metadata, named_params, on_cpu=not in_turn):
                update.each(lambda client: client.update_named_params(names, iter(tensors)))  # noqa: B023
            update.each(finish_update)

    def _chunks(
        self, metadata: Metadata, named_params: NamedParams, on_cpu: bool
    ) -> Iterator[tuple[Metadata, list[tuple[str, torch.Tensor]]]]:
        start = num_bytes = 0
        tensors: list[tuple[str, torch.Tensor]] = []
        for end, (name, tensor) in enumerate(named_params, 1):
            tensors.append((name, tensor.cpu() if on_cpu else tensor))
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= self.chunk_bytes or end == len(metadata):
                yield metadata[start:end], tensors
                start, num_bytes, tensors = end, 0, []

    def generate(self, prompts: list, features: list | None = None, **kwargs: Any) -> dict[str, list | None]:
        """TRL's blocking generation, each server with an equal share of the prompts. Arguments are TRL's."""
        share = -(-len(prompts) // len(self.clients))
        starts = range(0, len(prompts), max(share, 1))

        def part(client: SyncedVLLMClient, start: int) -> dict[str, list | None]:
            end = start + share
            return client.generate(prompts[start:end], None if features is None else features[start:end], **kwargs)

        with ThreadPoolExecutor(len(self.clients)) as executor:
            parts = list(executor.map(part, self.clients, starts))
        return {
            key: None if value is None else list(itertools.chain.from_iterable(part[key] for part in parts))
            for key, value in parts[0].items()
        }

    def image_features(self, images: list, **kwargs: Any) -> list[dict | None]:
        """
        Image features for [`~FleetVLLMClient.generate`]. They don't depend on weights: the first server that answers
        makes them.
        """
        words = []
        for client in self.active:
            try:
                return client.image_features(images, **kwargs)
            except requests.RequestException as error:
                words.append(f"{client.base_url}: {type(error).__name__}: {error}")
        raise GenerationError(f"No vLLM server processed the images. {'; '.join(words)}")
