"""Replaces TRL's client of one vLLM server in `VLLMGeneration`, for several servers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..engines.failures import describe
from ..engines.pool import Member, ServerPool, State
from ..engines.vllm_server import VLLMServerEngine
from ..errors import ConfigurationError, TRLDARTSError, WeightSyncError
from ..scheduling.rules import one_of
from . import WEIGHT_SYNCS, calls
from .client import BlockingVLLMClient, image_features
from .files import WeightDirectory
from .nccl import GROUP_PORT, GROUP_TIMEOUT_S, WeightChunk, WeightGroup, weight_chunks
from .parameters import Metadata, NamedParams, as_served, cast, num_bytes, whole
from .update import WeightUpdate


T = TypeVar("T")


def resolve_weight_sync(weight_sync: str, device: torch.device, sync_dir: str | Path | None = None) -> str:
    """
    Resolves `weight_sync` for a device to `"nccl"`, `"filesystem"` or `"adapter"`. What "auto" returns is for merged
    weights: whether the adapter alone is sent is known with the model. Raises for settings that can't work.
    """
    one_of(WEIGHT_SYNCS).check("weight_sync", weight_sync)
    if weight_sync == "auto":
        weight_sync = "nccl" if device.type == "cuda" else "filesystem"
    if weight_sync == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            f"`weight_sync` ('nccl') needs a CUDA device, and the trainer runs on {str(device)!r}. Use 'filesystem'."
        )
    if weight_sync == "nccl" and sync_dir is not None:
        raise ConfigurationError(
            f"`weight_sync_dir` ({str(sync_dir)!r}) must be unset with `weight_sync='nccl'`. Leave it out, or set "
            "`weight_sync='filesystem'`."
        )
    return weight_sync


def is_there(member: Member) -> bool:
    """Whether a server takes part in a sync. Servers that reconnected do."""
    return member.state is not State.DOWN


class FleetVLLMClient:
    """
    Updates the servers of an engine to the trainer's weights.

    Parameters are gathered once. With a `directory`, they are written once, and all servers load them in parallel.
    Over NCCL, each server has its own group: a chunk of 1 GiB is sent to all servers in parallel while the next one is
    gathered. Matrices are sent in `dtype`, that of the servers, if it is smaller.

    A server that fails does not affect the others; it is lost until it answers again. The pool's `version` is the
    number of the last sync, and each server reports its own as `"v<version>"`.
    """

    def __init__(
        self,
        engine: VLLMServerEngine,
        directory: WeightDirectory | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group_port: int = GROUP_PORT,
        timeout_s: float = 240.0,
    ) -> None:
        self.num_bytes = 0  # of the last sync: sent to all servers in total, or written
        self._engine = engine
        self._directory = directory
        self._dtype = dtype
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._group_port = group_port
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}

    @property
    def base_urls(self) -> list[str]:
        return list(self._engine.base_urls)

    def get_server_info(self) -> dict[str, Any]:
        """Returns the first server's configuration, for TRL."""
        return BlockingVLLMClient(self._engine, self.base_urls[0]).get_server_info()

    def init_communicator(self) -> None:
        """Forms one NCCL group per server, or checks that each can read the files."""
        if self._directory is None:
            self._engine.call(self._form_groups())
            return
        for url in self.base_urls:
            self._directory.check_server(url)

    def leave(self, url: str) -> None:
        """Leaves a server's group."""
        if (group := self._groups.pop(url, None)) is not None:
            group.destroy()

    async def _form_groups(self) -> None:
        members = (await self._engine.pool()).members
        await asyncio.gather(*(self._form_group(url, member) for url, member in members.items()))

    async def _form_group(self, url: str, member: Member) -> None:
        await asyncio.to_thread(self.leave, url)
        timeout_s = min(self._timeout_s, GROUP_TIMEOUT_S)
        self._groups[url] = await WeightGroup.form(member.server, self._device, self._group_port, timeout_s)

    # Weights

    def update_named_params(self, metadata: Metadata, named_params: NamedParams) -> None:
        """
        Updates all servers to new weights. `metadata` has the name, dtype (`"bfloat16"`) and shape of each tensor, in
        the order of `named_params`, which is always exhausted.
        """
        metadata = as_served(metadata, self._dtype)
        version = self._engine.call(self._next_version())
        self.num_bytes = 0
        with whole(named_params, len(metadata)) as params:
            if self._directory is None:
                self._broadcast(metadata, params, is_there)
                return
            self.num_bytes = num_bytes(metadata)
            path = self._directory.write(version, cast(metadata, params), self.num_bytes)
        self._engine.call(self._load(path))
        self._directory.keep_only([version])

    def catch_up(self, metadata: Metadata, named_params: NamedParams) -> None:
        """Sends the last sync's weights, which the trainer must still have, to waiting servers over NCCL."""
        with whole(named_params, len(metadata)) as params:
            self._broadcast(as_served(metadata, self._dtype), params, lambda member: member.waits)

    def reset_prefix_cache(self) -> None:
        """Does nothing. TRL calls it after an update, and each update has already reset the cache."""

    async def _next_version(self) -> int:
        await self._engine.idle()
        pool = await self._engine.pool()
        pool.version += 1  # even if some servers fail: a version is never reused
        return pool.version

    async def _load(self, path: Path) -> None:
        async with self._update(is_there) as update:
            await update.each(lambda member: calls.load(member.server, path))

    def _broadcast(self, metadata: Metadata, params: NamedParams, takes_part: Callable[[Member], bool]) -> None:
        """Sends one chunk while the main thread gathers the next, together with the other processes."""
        call, sending = self._engine.call, None
        with self._entered(self._update(takes_part)) as update:
            call(update.open(self._timeout_s))
            try:
                for chunk in weight_chunks(metadata, params, self._device):
                    if sending is not None:
                        self._engine.wait(sending)
                    self.num_bytes += num_bytes(chunk.metadata) * len(update.alive)
                    sending = self._engine.submit(update.each(partial(self._send, chunk)))
                if sending is not None:
                    self._engine.wait(sending)
            finally:
                if sending is not None:
                    sending.cancel()
            call(update.close(self._timeout_s))

    async def _send(self, chunk: WeightChunk, member: Member) -> None:
        await self._groups[member.server.base_url].send(member.server, chunk)

    @contextmanager
    def _entered(self, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enters an async context from the main thread, and always leaves it."""
        value = self._engine.call(context.__aenter__())
        try:
            yield value
        except BaseException:
            error = WeightSyncError("A weight update was interrupted.")  # the loop's thread must not get Ctrl-C
            self._engine.call(context.__aexit__(WeightSyncError, error, None))
            raise
        self._engine.call(context.__aexit__(None, None, None))

    @asynccontextmanager
    async def _update(self, takes_part: Callable[[Member], bool]) -> AsyncIterator[WeightUpdate]:
        """Runs one update. Servers that have the new weights afterwards join the pool, the others are lost."""
        pool = await self._engine.pool()
        async with pool.updating:
            for url in self._groups.keys() - pool.members.keys():  # removed by a list
                await asyncio.to_thread(self.leave, url)
            urls = [url for url, member in pool.members.items() if takes_part(member)]
            ready = await asyncio.gather(*(self._prepare(pool, url) for url in urls))
            members = {url: pool.members[url] for url, is_ready in zip(urls, ready, strict=True) if is_ready}
            update = self._begin(pool, members)
            try:
                async with update:
                    yield update
            finally:
                await asyncio.gather(*(self._rejoin(pool, url, update) for url in members))

    def _begin(self, pool: ServerPool, members: dict[str, Member]) -> WeightUpdate:
        return WeightUpdate(members, pool.version, pool.report_update, pool.keeps_kv)

    async def _prepare(self, pool: ServerPool, url: str) -> bool:
        """Forms a new group with a server that reconnected, and wakes up a sleeping one. Returns success."""
        member = pool.members[url]
        try:
            if self._directory is None and (member.state is State.RETURNED or url not in self._groups):
                await self._form_group(url, member)
            if pool.takes_turns and member.tail:
                await member.server.wake_up(only_weights=True)
        except Exception as error:
            pool.lose(url, _reason(error))
            return False
        return True

    async def _rejoin(self, pool: ServerPool, url: str, update: WeightUpdate) -> None:
        member = pool.members[url]
        failure = update.failures.get(url)
        if pool.takes_turns and member.tail:
            try:
                await member.server.sleep()
                member.asleep = True
            except Exception as error:
                failure = failure or error
        if failure is None and url in update.updated:
            pool.join(url)
        else:
            pool.lose(url, "a weight update was interrupted" if failure is None else _reason(failure))

    # Generation with TRL, for a user's `rollout_func`

    def generate(
        self, prompts: list[Any], features: list[Any] | None = None, **kwargs: Any
    ) -> dict[str, list[Any] | None]:
        """Generates as TRL's client does, with an equal share of the prompts on each server."""
        clients = [self._client(url) for url in self._urls_up]
        share = -(-len(prompts) // len(clients))
        starts = range(0, len(prompts), max(share, 1))

        def part(client: BlockingVLLMClient, start: int) -> dict[str, Any]:
            end = start + share
            return client.generate(prompts[start:end], None if features is None else features[start:end], **kwargs)

        with ThreadPoolExecutor(len(clients)) as executor:
            parts = list(executor.map(part, clients, starts))
        return {
            key: None if value is None else list(itertools.chain.from_iterable(part[key] for part in parts))
            for key, value in parts[0].items()
        }

    def image_features(self, images: list[Any]) -> list[dict[str, Any] | None]:
        """Returns image features for [`~FleetVLLMClient.generate`]."""
        return image_features(self._engine, self._urls_up, images)

    def _client(self, url: str) -> BlockingVLLMClient:
        client = BlockingVLLMClient(self._engine, url)
        member = self._engine.members[url]
        client.model = member.model_name(member.version) or client.model
        return client

    @property
    def _urls_up(self) -> list[str]:
        return [url for url, state in self._engine.states().items() if state is State.UP] or self.base_urls


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, TRLDARTSError) else describe(error, "it in time")
