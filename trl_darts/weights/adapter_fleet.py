"""
Syncs weights as LoRA adapters. Each version is an adapter of its own, which requests name.

```
gather ──▶ write v12 ──▶ each server: unload what nobody names ──▶ load RUN-v12 ──▶ new requests name RUN-v12
```

No server is paused: what has begun ends under the version that it began with, so each answer between two losses of a
server is of one policy. vLLM's prefix cache tells adapters apart.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch

from ..engines.addresses import is_this_machine
from ..engines.pool import Member, ServerPool
from ..engines.vllm_api import VLLMServer
from ..engines.vllm_server import VLLMServerEngine
from ..errors import ConfigurationError, WeightSyncError
from . import calls
from .adapter import Adapter
from .files import PREFIX, WeightDirectory
from .fleet import FleetVLLMClient, is_there
from .update import WeightUpdate


END_TIMEOUT_S = 3.0  # for unloading at the end of a run, which must not wait for a server that is gone
UNLOAD_POLL_S = 0.1

logger = logging.getLogger(__name__)


class AdapterUpdate(WeightUpdate):
    """Loads a version of an adapter on some servers. A server that fails leaves the update, as with whole weights."""

    async def __aenter__(self) -> AdapterUpdate:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            if self.before_resume is not None:
                await self.each(self.before_resume)
            self.updated = self.alive


class AdapterFleet(FleetVLLMClient):
    """
    Updates the servers of an engine to the trainer's adapter.

    A server that fails does not affect the others; it is lost until it answers again. The pool's `version` is the
    number of the last sync. The servers' own weights never change.
    """

    def __init__(self, engine: VLLMServerEngine, directory: WeightDirectory) -> None:
        super().__init__(engine, directory)
        self._files = directory

    def try_zeros(self, adapter: Adapter) -> None:
        """Loads an adapter without an effect on all servers, and unloads it. Raises if one of them can't load it."""
        path = self._files.write_adapter(0, adapter.zeros(), adapter.config)
        name = f"{self._files.name}-trial"

        async def try_on(member: Member) -> None:
            await calls.resume(member.server)  # a trainer that was killed may have left it paused
            await calls.check_plugin(member.server)
            _, ended = await of_runs(member.server)
            await calls.unload_adapters(member.server, ended)
            await load(member, name, self._files, path)
            try:
                await calls.check_layers(member.server)
            finally:
                await calls.unload_adapters(member.server, [name])

        async def try_all() -> None:
            await asyncio.gather(*map(try_on, (await self._engine.pool()).members.values()))

        try:
            self._engine.call(try_all())
        finally:
            self._files.keep_only([])

    def update_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        """Updates all servers to a new version."""
        version = self._engine.call(self._next_version())
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._files.write_adapter(version, tensors, config)
        self._files.keep_only({version} | self._engine.call(self._load_version(version)))

    def unload_all(self) -> None:
        """Unloads all versions, unless a rollout does not end soon. The next sync loads the next one."""

        async def unload() -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._engine.idle(), END_TIMEOUT_S)
                await unload_run(await self._engine.pool())

        self._engine.call(unload())

    async def _load_version(self, version: int) -> set[int]:
        """Loads a version on all servers. Returns the older versions that one of them still has."""
        pool, older = await self._engine.pool(), set()

        async def load_on(member: Member) -> None:
            older.update(await load_version(pool, member, version, self._files))

        async with self._update(is_there) as update:
            await update.each(load_on)
        return older

    def _begin(self, pool: ServerPool, members: dict[str, Member]) -> WeightUpdate:
        return AdapterUpdate(members, pool.version, pool.report_adapter)


async def load(member: Member, name: str, files: WeightDirectory, path: Path) -> None:
    """Loads an adapter on a server, which reads its file or gets it over HTTP."""
    server = member.server
    is_read = files.can_be_read_by(server.base_url)
    await calls.load_adapter(server, name, str(path) if is_read else await calls.upload_adapter(server, name, path))


async def of_runs(server: VLLMServer) -> tuple[list[str], list[str]]:
    """
    Returns the adapters of running and of ended runs on a server. A run has ended if no request names its adapter and
    its file is gone, which only a server of this machine tells.
    """
    loaded, used = await asyncio.gather(calls.adapters(server), calls.adapters_in_use(server))
    is_here = is_this_machine(urlsplit(server.base_url).hostname or "")
    own = {name: path for name, path in loaded.items() if name.startswith(PREFIX)}
    ended = [name for name, path in own.items() if is_here and name not in used and not Path(path).exists()]
    return [name for name in own if name not in ended], ended


async def check_own(server: VLLMServer) -> None:
    """Raises if other runs have adapters on a server, whose model whole weights would replace."""
    if not await calls.adapters(server):
        return
    running, _ = await of_runs(server)
    if running:
        raise ConfigurationError(
            f"The vLLM server at {server.base_url} has the LoRA adapter {running[0]!r} of another run, and the whole "
            "weights of this run would replace its model. Use separate servers, or restart it if no run uses it."
        )


async def load_version(pool: ServerPool, member: Member, version: int, files: WeightDirectory) -> set[int]:
    """
    Loads a version on a server unless it has it. Older ones are unloaded before, but not those that requests name, or
    could name while a rollout runs. Returns these.
    """
    server, path = member.server, files.path(version)
    if path is None:
        raise WeightSyncError(f"The adapter of version {version} has no file.")
    loaded, used = await asyncio.gather(calls.adapters(server), calls.adapters_in_use(server))
    names = [member.model_name(other) for other in range(version + 1)]
    kept = pool.versions_on(server.base_url) | {other for other in range(version) if names[other] in used}
    idle = [name for other, name in enumerate(names[:-1]) if name in loaded and other not in kept]
    await calls.unload_adapters(server, filter(None, idle))
    name = names[version]
    if name is not None and name not in loaded:
        await load(member, name, files, path)
    return kept


async def refresh_adapter(pool: ServerPool, member: Member, files: WeightDirectory) -> bool:
    """Loads the last version on a server that has reconnected or is new. Returns whether the server has it."""
    await calls.resume(member.server)  # a trainer that was killed may have left it paused
    if pool.version:
        await calls.check_plugin(member.server)
        await load_version(pool, member, pool.version, files)
    return True


async def unload_run(pool: ServerPool) -> None:
    """
    Unloads the run's adapters from all servers that answer within `END_TIMEOUT_S`. Raises nothing. A later run
    unloads what stays, see [`of_runs`].
    """

    async def unload_from(server: VLLMServer) -> None:
        prefix = f"{pool.adapter}-v"
        while own := [name for name in await calls.adapters(server) if name.startswith(prefix)]:
            used = await calls.adapters_in_use(server)  # by requests that were just aborted
            await calls.unload_adapters(server, [name for name in own if name not in used])
            await asyncio.sleep(UNLOAD_POLL_S)

    async def unload() -> None:
        async with pool.updating:  # a server that has reconnected may be loading one
            servers = [member.server for member in pool.members.values()]
            results = await asyncio.gather(*map(unload_from, servers), return_exceptions=True)
        for error in filter(None, results):
            logger.debug("At the end of a run: %s", error)

    try:
        await asyncio.wait_for(unload(), END_TIMEOUT_S)
    except TimeoutError:
        logger.debug("At the end of a run, a server did not unload its adapters within %g s.", END_TIMEOUT_S)
