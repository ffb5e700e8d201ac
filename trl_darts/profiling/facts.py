"""What a server says of itself: enough to plan the measurement, and to say later what was measured."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from ..engines.vllm_api import ServerRefusedError, VLLMServer
from ..engines.vocabulary import vocabulary_size
from ..errors import ConfigurationError
from .clock import read_clock


CACHE_INFO = "vllm:cache_config_info"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FALLBACK_VOCABULARY = 128  # of a server whose refusal names no size; real ones are larger
IDLE_TIMEOUT_S = 10.0
FAILURES = (aiohttp.ClientError, ServerRefusedError, asyncio.TimeoutError, ValueError)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """
    One server.

    Args:
        url (`str`):
            Its address, without credentials.
        model (`str`):
            The name that requests must carry.
        max_model_len (`int`):
            Tokens of prompt and completion together.
        vocab_size (`int`):
            Tokens that the model knows.
        kv_cache_tokens (`int`, *optional*):
            Tokens that its KV cache holds.
        max_num_seqs (`int`, *optional*):
            Sequences that it decodes at once. Unknown without the development endpoints, like what follows.
        tensor_parallel_size (`int`, *optional*):
            GPUs that share one copy of the model.
        data_parallel_size (`int`, *optional*):
            Copies of the model behind this address.
        dtype (`str`, *optional*):
            Such as `"bfloat16"`.
        vllm_version (`str`, *optional*):
            Such as `"0.31.0"`.
        hardware (`str`, *optional*):
            Such as `"8 x NVIDIA H100 80GB HBM3"`: the machine's GPUs, or its CPU.
    """

    url: str
    model: str
    max_model_len: int
    vocab_size: int
    kv_cache_tokens: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    dtype: str | None = None
    vllm_version: str | None = None
    hardware: str | None = None


async def learn(server: VLLMServer) -> ServerFacts:
    """
    Asks a server what it is, and whether it is idle.

    Args:
        server ([`VLLMServer`]):
            The server.

    Returns:
        [`ServerFacts`]: What it said.

    Raises:
        [`ConfigurationError`]: If it can't be reached, is no vLLM server, refuses the key, or has other requests.
    """
    try:
        models = await server.get("/v1/models")
        if models is None:
            raise ValueError("it has no `/v1/models`, and an address ends before `/v1`")
        served = models["data"][0]
        name, max_model_len = str(served["id"]), int(served["max_model_len"])
        version = (await server.get("/version") or {}).get("version")
        metrics = await server.get_text("/metrics")
        info = await server.get("/server_info?config_format=json", timeout_s=120.0) or {}  # it looks at its machine
    except (*FAILURES, TypeError, KeyError, IndexError) as error:
        raise _unreachable(server.base_url, error) from error
    await _check_idle(server)
    facts = ServerFacts(
        url=without_credentials(server.base_url),
        model=name,
        max_model_len=max_model_len,
        vocab_size=await _vocab_size(server, name),
        kv_cache_tokens=kv_cache_tokens(metrics),
        vllm_version=version,
    )
    facts = with_server_info(facts, info)
    if facts.hardware is None and urlsplit(server.base_url).hostname in LOOPBACK:
        facts = replace(facts, hardware=await asyncio.to_thread(_local_gpus))
    return facts


def without_credentials(url: str) -> str:
    """The address without a user's name and password: it goes into a file."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def with_server_info(facts: ServerFacts, info: Mapping[str, Any]) -> ServerFacts:
    """
    Facts with those of `/server_info`.

    Args:
        facts ([`ServerFacts`]):
            What is known.
        info (`Mapping[str, Any]`):
            The JSON; empty where the server does not have the endpoint. Entries that are missing stay unknown.
    """
    config = info.get("vllm_config") or {}
    parallel = config.get("parallel_config") or {}
    replicas = parallel.get("data_parallel_size")
    seqs = (config.get("scheduler_config") or {}).get("max_num_seqs")  # of each copy
    dtype = (config.get("model_config") or {}).get("dtype")
    return replace(
        facts,
        max_num_seqs=seqs * (replicas or 1) if seqs else None,
        tensor_parallel_size=parallel.get("tensor_parallel_size"),
        data_parallel_size=replicas,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        hardware=hardware_of(info.get("system_env") or {}),
    )


def hardware_of(system_env: Mapping[str, Any]) -> str | None:
    """The GPUs of the server's machine, or its CPU, in a line. `None` if neither is told."""
    gpus = system_env.get("nvidia_gpu_models")
    if gpus and "GPU" in gpus:
        return _count(re.sub(r"\s*\(UUID.*?\)", "", line.partition(":")[2]).strip() for line in gpus.splitlines())
    fields = dict(re.findall(r"^(CPU\(s\)|Model name):\s*(.+?)\s*$", system_env.get("cpu_info") or "", re.MULTILINE))
    return f"{fields.get('CPU(s)', '?')} CPUs, {fields['Model name']}" if "Model name" in fields else None


def kv_cache_tokens(metrics: str) -> int | None:
    """Tokens that fit into the KV caches behind one address, from the text of `/metrics`. `None` if it is not told."""
    lines = [line for line in metrics.splitlines() if line.startswith(CACHE_INFO)]
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
        engines = [sample.labels for family in families for sample in family.samples]
        if not engines:
            return None
        if engines[0].get("kv_cache_size_tokens", "None") != "None":
            return sum(int(engine["kv_cache_size_tokens"]) for engine in engines)
        # Each engine (data parallel) reports the blocks of all together.
        return int(engines[0]["num_gpu_blocks"]) * int(engines[0]["block_size"])
    except (ValueError, KeyError):
        return None


async def _vocab_size(server: VLLMServer, model: str) -> int:
    try:
        return await vocabulary_size(server, model) or FALLBACK_VOCABULARY
    except ServerRefusedError as refusal:
        if "401" in str(refusal):
            raise _unreachable(server.base_url, refusal) from refusal
        return FALLBACK_VOCABULARY


async def _check_idle(server: VLLMServer) -> None:
    deadline = asyncio.get_running_loop().time() + IDLE_TIMEOUT_S
    while (load := (await read_clock(server)).load).num_running + load.num_waiting > 0:
        if asyncio.get_running_loop().time() > deadline:
            raise ConfigurationError(
                f"`url` ({server.base_url!r}) must be the address of an idle server, and it has {load.num_running} "
                f"requests running and {load.num_waiting} waiting. Wait until they are done, or end what sends them."
            )
        await asyncio.sleep(0.5)


def _unreachable(url: str, error: Exception) -> ConfigurationError:
    words = str(error) or type(error).__name__
    if "401" in words:
        remedy = "Set VLLM_API_KEY to the server's key."
    elif isinstance(error, aiohttp.ClientError | asyncio.TimeoutError):
        remedy = "Start one with `trl-darts serve MODEL`, or correct the address."
    else:
        words, remedy = f"what answers is none ({type(error).__name__}: {words})", "Correct the address."
    return ConfigurationError(f"`url` ({url!r}) must be the address of a running vLLM server: {words}. {remedy}")


def _local_gpus() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return _count(line.strip() for line in output.splitlines())


def _count(names: Iterable[str]) -> str | None:
    found = [name for name in names if name]
    return ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found)) or None
