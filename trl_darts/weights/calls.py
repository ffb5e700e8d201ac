"""The HTTP calls of a weight update and their errors, on top of [`VLLMServer`]."""

import logging
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ..engines.vllm_api import LOAD_ADAPTER, UPLOADS, ServerRefusedError, VLLMServer
from ..engines.waiting import log_while_waiting
from ..errors import ConfigurationError, WeightSyncError
from . import ADAPTER


T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0  # for resume and similar calls, which an idle engine answers within milliseconds
PAUSE_TIMEOUT_S = 15.0  # detects a frozen server before the others wait for it in the middle of an update
ABANDON_TIMEOUT_S = 5.0  # the server may be gone
LOAD_TIMEOUT_S = 1800.0  # a large model from a slow disk
UPLOAD_TIMEOUT_S = 300.0
# Requests of other clients (usually none) are paused, and continue under the new weights with recomputed keys and
# values. "abort" would lose their results, "wait" would wait for the longest.
PAUSE = "/pause?mode=keep"
INCOMPLETE = "-incomplete"  # the version of a server whose update failed

logger = logging.getLogger(__name__)


async def ask(
    server: VLLMServer, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
) -> dict[str, Any]:
    """Posts, and returns the server's JSON. Raises [`WeightSyncError`] if the server fails or does not answer."""
    return await _named(server, path, server.post(path, body, timeout_s), timeout_s)


async def look_up(server: VLLMServer, path: str) -> Any:
    """Gets JSON, with the same errors. Returns `None` if the server does not have the path."""
    return await _named(server, path, server.get(path, CONTROL_TIMEOUT_S), CONTROL_TIMEOUT_S)


async def _named(server: VLLMServer, path: str, answer: Awaitable[T], timeout_s: float) -> T:
    """Awaits an answer and logs long waits. Errors name the server, the path and the server's message."""
    path = path.partition("?")[0]
    try:
        async with log_while_waiting(f"Waiting for {server.base_url} to answer `{path}`", timeout_s):
            return await answer
    except ServerRefusedError as error:
        if error.status == 404:
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} has no `{path}`. Restart it with `VLLM_SERVER_DEV_MODE=1` in "
                "its environment, which exposes the endpoints for weight synchronization."
            ) from error
        raise WeightSyncError(f"`{path}` of a vLLM server failed: {error}") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        late = f" within {timeout_s:g} s" if isinstance(error, TimeoutError) else ": the connection failed"
        raise WeightSyncError(f"The vLLM server at {server.base_url} did not answer `{path}`{late}.") from error


async def pause(server: VLLMServer, keeps_kv: bool = False) -> None:
    """Freezes running requests. vLLM 0.31 clears their keys and values by default, although its docs say otherwise."""
    await ask(server, PAUSE + "&clear_cache=false" * keeps_kv, timeout_s=PAUSE_TIMEOUT_S)


async def resume(server: VLLMServer) -> None:
    await ask(server, "/resume")


async def start_update(server: VLLMServer, timeout_s: float) -> None:
    """Starts an update over NCCL, after finishing one that an earlier trainer left open."""
    try:
        await ask(server, "/start_weight_update", timeout_s=timeout_s)
    except WeightSyncError as error:
        if "already active" not in str(error):
            raise
        await finish_update(server, timeout_s)
        await ask(server, "/start_weight_update", timeout_s=timeout_s)


async def finish_update(server: VLLMServer, timeout_s: float) -> None:
    """Finishes an update over NCCL, which makes the new weights active."""
    await ask(server, "/finish_weight_update", timeout_s=timeout_s)


async def load(server: VLLMServer, path: Path) -> None:
    """Has a server load a checkpoint. A CPU server must have our plugin, whose answer is not empty."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    try:
        answers = (await ask(server, "/collective_rpc", body, LOAD_TIMEOUT_S)).get("results", [])
    except WeightSyncError as error:
        raise WeightSyncError(
            f"{error} Make sure that the server can read {path} under the same path, or set `weight_sync_dir` to a "
            "directory that it can read."
        ) from error
    if not all(answers) and await _is_on_cpu(server):
        raise ConfigurationError(
            f"The vLLM server at {server.base_url} runs on a CPU without trl_darts, so a model with tied embeddings "
            "keeps its old LM head, and log-probs are wrong. Run `pip install trl-darts` in the server's environment, "
            "and restart it."
        )


async def _is_on_cpu(server: VLLMServer) -> bool:
    info = await look_up(server, "/server_info?config_format=json")
    return bool(info["vllm_config"]["device_config"]["device"] == "cpu")


async def load_adapter(server: VLLMServer, name: str, path: str) -> None:
    """Has a server load an adapter. Requests continue meanwhile."""
    try:
        await _named(server, LOAD_ADAPTER, server.load_adapter(name, path, LOAD_TIMEOUT_S), LOAD_TIMEOUT_S)
    except WeightSyncError as error:
        if not (isinstance(error.__cause__, ServerRefusedError) and error.__cause__.status == 404):
            raise
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} finds no adapter in {path}. Make sure that it can read that "
            "directory under the same path, or set `weight_sync_dir` to one that it can read."
        ) from error


async def upload_adapter(server: VLLMServer, name: str, path: Path) -> str:
    """Sends an adapter to a server that can't read its file. Returns the directory on the server."""
    sent = server.upload_adapter(name, path / ADAPTER, UPLOAD_TIMEOUT_S)
    found = await _named(server, UPLOADS + name, sent, UPLOAD_TIMEOUT_S)
    if found is None:
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} is on another machine and can't read this machine's local files. "
            "Start it with `trl-darts serve --lora-rank`, which takes adapters over HTTP if it has a key, or set "
            "`weight_sync_dir` to a directory that both can access under one path."
        )
    return found


async def check_plugin(server: VLLMServer) -> None:
    """Raises if a server can't tell what must be known of its adapters."""
    try:
        await adapters_in_use(server)
    except WeightSyncError as error:
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} has no trl_darts, or an older one, and only it tells whether all "
            "layers of an adapter are used. Run `pip install -U trl-darts` in its environment, and restart it."
        ) from error


async def check_layers(server: VLLMServer) -> None:
    """Raises if a server does not use all layers of its adapters."""
    unused = sorted(await _named(server, "/collective_rpc", server.unused_layers(), CONTROL_TIMEOUT_S))
    if unused:
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} does not use {len(unused)} of the adapter's layers, such as "
            f"{unused[0]}. Leave them out with `target_modules` or `exclude_modules`."
        )


async def unload_adapters(server: VLLMServer, names: Iterable[str]) -> None:
    """Unloads adapters. A failure costs a slot, which the next sync tries to free again."""
    for name in names:
        try:
            await server.unload_adapter(name)
        except (ServerRefusedError, aiohttp.ClientError, TimeoutError) as error:
            logger.debug("%s did not unload %s: %s", server.base_url, name, error)


async def adapters_in_use(server: VLLMServer) -> set[str]:
    """Returns the adapters that a server's requests decode with, also those which it has not noticed the end of."""
    return await _named(server, "/collective_rpc", server.adapters_in_use(), CONTROL_TIMEOUT_S)


async def adapters(server: VLLMServer) -> dict[str, str]:
    """Returns the names of the adapters that a server has loaded, with their directories."""
    return await _named(server, "/v1/models", server.adapters(), CONTROL_TIMEOUT_S)


async def reset_caches(server: VLLMServer) -> None:
    """Empties the prefix cache, also of running requests, and the one of a KV connector if the server has one."""
    path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    if not (await ask(server, path)).get("success", True):
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} could not empty its prefix cache, so it holds keys and values of "
            "the old weights. A transfer of its KV cache may be in progress."
        )


async def set_version(server: VLLMServer, version: int) -> None:
    """Sets the version of a server's weights, and reads it back."""
    if not await _stamp(server, f"v{version}"):
        return
    found = (await look_up(server, "/weight_info") or {}).get("weight_version")
    if found != f"v{version}":
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} shows the weight version {found!r} after an update to "
            f"'v{version}'. Another trainer may be using it. Use separate servers for each run."
        )


async def _stamp(server: VLLMServer, version: str) -> bool:
    """Sets the version of a server's weights. Returns whether the server supports versions."""
    try:
        await ask(server, "/update_weight_version", {"new_version": version})
    except WeightSyncError as error:
        if isinstance(error.__cause__, ServerRefusedError) and error.__cause__.status == 404:
            return False
        raise
    return True


async def abandon(server: VLLMServer, version: int, is_open: bool) -> None:
    """
    Cleans up after a failed update: finishes an open NCCL update, marks the version as incomplete and resumes the
    server. Raises nothing, because the server may be gone.
    """
    steps: list[tuple[str, dict[str, Any]]] = [("/finish_weight_update", {})] if is_open else []
    steps += [("/update_weight_version", {"new_version": f"v{version}{INCOMPLETE}"}), ("/resume", {})]
    for path, body in steps:
        try:
            await ask(server, path, body, ABANDON_TIMEOUT_S)
        except WeightSyncError as error:
            logger.debug("While abandoning an update: %s", error)
