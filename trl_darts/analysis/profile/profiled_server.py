"""What a server reports about itself: enough to plan a measurement, to time it, and to describe it in the file."""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ...engines.vllm_api import (
    CompletionRequest,
    ServerPrompt,
    ServerRefusedError,
    VLLMServer,
    max_num_seqs,
    vocabulary_size,
)
from ...errors import ConfigurationError


CACHE_INFO = "vllm:cache_config_info"
CLOCK_METRICS = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"),
    *("vllm:inter_token_latency_seconds_sum", "vllm:generation_tokens_total"),
)
FALLBACK_VOCABULARY = 128  # where a server's refusal names no size; real vocabularies are larger
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProfiledServer:
    """One server. What follows `kv_cache_tokens`, except vLLM's version, needs the development endpoints."""

    url: str  # without credentials
    model: str  # the name that requests must carry
    max_model_len: int  # tokens of prompt and completion together
    vocab_size: int
    kv_cache_tokens: int | None = None
    max_num_seqs: int | None = None  # of all engines behind the address together
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    dtype: str | None = None
    vllm_version: str | None = None
    hardware: str | None = None  # such as "8 x NVIDIA H100 80GB HBM3"


@dataclass(frozen=True, slots=True)
class EngineClock:
    """
    The engine's own counters, in the order of `CLOCK_METRICS`; the engine stamps a token when it exists.

    A client sees tokens later, by the delay of the server's front end and its own. Where one of them is held up,
    tokens arrive in bursts, and a window that begins after a burst looks much shorter than it was.
    """

    num_running: float
    num_waiting: float
    num_preemptions: float
    seconds: float  # between tokens, summed over all sequences since the server started
    tokens: float

    def seconds_per_token_since(self, before: EngineClock) -> float:
        """Mean over all sequences and tokens since an earlier reading; NaN if there were no tokens."""
        tokens = self.tokens - before.tokens
        return (self.seconds - before.seconds) / tokens if tokens > 0 else math.nan


async def read_clock(server: VLLMServer) -> EngineClock:
    """Reads a server's counters, summed over its engines (data parallel)."""
    try:
        found = samples(await server.get_text("/metrics"), CLOCK_METRICS)
        if missing := [name for name in CLOCK_METRICS if name not in found]:
            raise ValueError(f"The server's metrics have no {', '.join(f'`{name}`' for name in missing)}.")
    except ValueError as error:
        raise ConfigurationError(
            f"`url` ({server.base_url!r}) must be a server with statistics, by which it is measured: {error} Start it "
            "without `--disable-log-stats`, with vLLM 0.22 or newer."
        ) from error
    return EngineClock(*(sum(sample.value for sample in found[name]) for name in CLOCK_METRICS))


def samples(text: str, names: tuple[str, ...]) -> dict[str, list[Sample]]:
    """The samples with one of the names in the text of `/metrics`."""
    lines = [line for line in text.splitlines() if line.startswith(names)]  # a few of a thousand
    found = defaultdict(list)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            found[sample.name].append(sample)
    return found


async def describe_server(server: VLLMServer) -> ProfiledServer:
    """
    Asks a server what it is, and whether it is idle. Raises [`ConfigurationError`] if it can't be reached, is no vLLM
    server, refuses the key, or has other requests.
    """
    try:
        models = await server.get("/v1/models")
        if models is None:
            raise ValueError("it has no `/v1/models`, and an address ends before `/v1`")
        served = models["data"][0]
        described = ProfiledServer(
            url=without_credentials(server.base_url),
            model=str(served["id"]),
            max_model_len=int(served["max_model_len"]),
            vocab_size=await _vocab_size(server, str(served["id"])),
            kv_cache_tokens=kv_cache_tokens(await server.get_text("/metrics")),
            vllm_version=(await server.get("/version") or {}).get("version"),
        )
        info = await server.get("/server_info?config_format=json", timeout_s=120.0)  # collects the machine's data
    except (aiohttp.ClientError, ServerRefusedError, TimeoutError, ValueError, TypeError, LookupError) as error:
        raise _unreachable(server.base_url, error) from error
    await _check_idle(server, described.model)
    return with_server_info(described, info or {})


def kv_cache_tokens(metrics: str) -> int | None:
    """Tokens that fit into the KV caches behind one address, from the text of `/metrics`; `None` if it has none."""
    try:
        engines = [sample.labels for sample in samples(metrics, (CACHE_INFO,))[CACHE_INFO]]
        if engines and engines[0].get("kv_cache_size_tokens", "None") != "None":
            return sum(int(engine["kv_cache_size_tokens"]) for engine in engines)
        # Each engine (data parallel) reports the blocks of all together.
        return int(engines[0]["num_gpu_blocks"]) * int(engines[0]["block_size"])
    except (ValueError, LookupError):
        return None


def with_server_info(server: ProfiledServer, info: Mapping[str, Any]) -> ProfiledServer:
    """Adds what `/server_info` reports; its JSON is empty where the server does not have it."""
    config = info.get("vllm_config") or {}
    parallel = config.get("parallel_config") or {}
    dtype = (config.get("model_config") or {}).get("dtype")
    return replace(
        server,
        max_num_seqs=max_num_seqs(config),
        tensor_parallel_size=parallel.get("tensor_parallel_size"),
        data_parallel_size=parallel.get("data_parallel_size"),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        hardware=hardware_of(info.get("system_env") or {}),
    )


def hardware_of(system_env: Mapping[str, Any]) -> str | None:
    """The GPUs of the server's machine, or its CPU, in one line."""
    gpus = re.findall(r"^GPU.*?:\s*(.+?)\s*(?:\(UUID.*)?$", system_env.get("nvidia_gpu_models") or "", re.MULTILINE)
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    fields = dict(re.findall(r"^(CPU\(s\)|Model name):\s*(.+?)\s*$", system_env.get("cpu_info") or "", re.MULTILINE))
    return f"{fields.get('CPU(s)', '?')} CPUs, {fields['Model name']}" if "Model name" in fields else None


def without_credentials(url: str) -> str:
    """The address without user name and password: it goes into a file."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


async def _vocab_size(server: VLLMServer, model: str) -> int:
    try:
        return await vocabulary_size(server, model) or FALLBACK_VOCABULARY
    except ServerRefusedError as refusal:
        if refusal.status == 401:
            raise
        return FALLBACK_VOCABULARY


async def _check_idle(server: VLLMServer, model: str) -> None:
    deadline = asyncio.get_running_loop().time() + IDLE_TIMEOUT_S
    while (now := await read_clock(server)).num_running + now.num_waiting > 0:
        if asyncio.get_running_loop().time() > deadline:
            raise ConfigurationError(
                f"`url` ({server.base_url!r}) must be the address of an idle server, and it has {now.num_running:g} "
                f"requests running and {now.num_waiting:g} waiting. Wait until they are done, or end what sends them."
            )
        # The counters are those of the last step, and after an abort there is none until the server decodes again.
        with suppress(aiohttp.ClientError, ServerRefusedError, TimeoutError):
            one_token = CompletionRequest.of("idle", ServerPrompt([0]), [], {"model": model, "max_tokens": 1})
            await server.complete(one_token, timeout_s=IDLE_TIMEOUT_S)
        await asyncio.sleep(0.5)


def _unreachable(url: str, error: Exception) -> ConfigurationError:
    reason = str(error) or type(error).__name__
    if isinstance(error, ServerRefusedError) and error.status == 401:
        remedy = "Set VLLM_API_KEY to the server's key."
    elif isinstance(error, aiohttp.ClientError | TimeoutError):
        remedy = "Start one with `trl-darts serve MODEL`, or correct the address."
    else:
        reason = f"what answers is none ({type(error).__name__}: {reason})"
        remedy = "Correct the address."
    return ConfigurationError(f"`url` ({url!r}) must be the address of a running vLLM server: {reason}. {remedy}")
