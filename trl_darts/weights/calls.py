"""What a weight update asks of a vLLM server, and what an answer means. The transport is [`VLLMServer`]'s."""

import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ..engines.vllm_api import ServerRefusedError, VLLMServer
from ..errors import ConfigurationError, WeightSyncError
from ..waiting import said_meanwhile


T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0  # resume and the like, which an engine that is not busy answers within milliseconds
PAUSE_TIMEOUT_S = 15.0  # a frozen server is found here, before the others wait for it in the middle of an update
ABANDON_TIMEOUT_S = 5.0  # the server may be gone
LOAD_TIMEOUT_S = 1800.0  # a large model from a slow disk
# Requests that someone else runs on the server (nobody, as a rule) freeze and go on under the new weights, their
# cached keys and values computed anew. "abort" would take their results, "wait" would wait for the longest.
PAUSE = "/pause?mode=keep"
INCOMPLETE = "-incomplete"  # the version of a server whose update failed

logger = logging.getLogger(__name__)


async def ask(
    server: VLLMServer, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
) -> dict[str, Any]:
    """Posts, and returns the server's JSON. Without an answer, or with an error, a [`WeightSyncError`]."""
    return await _named(server, path, server.post(path, body, timeout_s), timeout_s)


async def look_up(server: VLLMServer, path: str) -> Any:
    """Gets JSON, with the same errors; `None` where the server does not have it."""
    return await _named(server, path, server.get(path, CONTROL_TIMEOUT_S), CONTROL_TIMEOUT_S)


async def _named(server: VLLMServer, path: str, answer: Awaitable[T], timeout_s: float) -> T:
    """An answer, or an error with the server's own message. One that takes long is said."""
    path = path.partition("?")[0]
    try:
        async with said_meanwhile(f"Waiting for {server.base_url} to answer `{path}`", timeout_s):
            return await answer
    except ServerRefusedError as error:
        if error.status == 404:
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} has no `{path}`. Restart it with `VLLM_SERVER_DEV_MODE=1` in "
                "its environment, which exposes the endpoints that weights are synchronized through."
            ) from error
        raise WeightSyncError(f"`{path}` of a vLLM server failed: {error}") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        late = f" within {timeout_s:g} s" if isinstance(error, TimeoutError) else ": the connection failed"
        raise WeightSyncError(f"The vLLM server at {server.base_url} did not answer `{path}`{late}.") from error


async def pause(server: VLLMServer) -> None:
    """Freezes running requests."""
    await ask(server, PAUSE, timeout_s=PAUSE_TIMEOUT_S)


async def resume(server: VLLMServer) -> None:
    await ask(server, "/resume")


async def start_update(server: VLLMServer, timeout_s: float) -> None:
    """Begins an update over NCCL, also where a trainer that is gone left one open."""
    try:
        await ask(server, "/start_weight_update", timeout_s=timeout_s)
    except WeightSyncError as error:
        if "already active" not in str(error):
            raise
        await finish_update(server, timeout_s)
        await ask(server, "/start_weight_update", timeout_s=timeout_s)


async def finish_update(server: VLLMServer, timeout_s: float) -> None:
    """Puts weights that came over NCCL into place."""
    await ask(server, "/finish_weight_update", timeout_s=timeout_s)


async def load(server: VLLMServer, path: Path) -> None:
    """Has a server load a checkpoint. On a CPU, the answer must be that of our plugin."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    try:
        answers = (await ask(server, "/collective_rpc", body, LOAD_TIMEOUT_S)).get("results", [])
    except WeightSyncError as error:
        raise WeightSyncError(
            f"{error} Make sure that the server sees {path} under the same path, or set `weight_sync_dir` to a "
            "directory that it sees."
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


async def commit(server: VLLMServer, version: int) -> None:
    """After an update: empties the prefix cache, stamps the version and reads it back."""
    if not (await ask(server, "/reset_prefix_cache?reset_running_requests=true")).get("success", True):
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} could not empty its prefix cache, so it holds keys and values of "
            "the old weights. A transfer of its KV cache may be under way."
        )
    if not await _stamp(server, f"v{version}"):
        return
    found = (await look_up(server, "/weight_info") or {}).get("weight_version")
    if found != f"v{version}":
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} shows the weight version {found!r} after an update to "
            f"'v{version}'. Another trainer may be using it: give each training its own servers."
        )


async def _stamp(server: VLLMServer, version: str) -> bool:
    """Gives a server's weights a version, and returns whether it has versions at all."""
    try:
        await ask(server, "/update_weight_version", {"new_version": version})
    except WeightSyncError as error:
        if isinstance(error.__cause__, ServerRefusedError) and error.__cause__.status == 404:
            return False
        raise
    return True


async def abandon(server: VLLMServer, version: int, is_open: bool) -> None:
    """
    After a failed update, of which one over NCCL may be open: leaves the server usable and its version telling. It may
    be gone: raises nothing.
    """
    steps: list[tuple[str, dict[str, Any]]] = [("/finish_weight_update", {})] if is_open else []
    steps += [("/update_weight_version", {"new_version": f"v{version}{INCOMPLETE}"}), ("/resume", {})]
    for path, body in steps:
        try:
            await ask(server, path, body, ABANDON_TIMEOUT_S)
        except WeightSyncError as error:
            logger.debug("While giving up an update: %s", error)
