"""Reads what a server reports about itself: its limits, its clock, and a description for the file."""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ...engines.server_abilities import max_num_seqs, vocabulary_size
from ...engines.vllm_api import CompletionRequest, ServerPrompt, ServerRefusedError, VLLMServer
from ...errors import ConfigurationError


CACHE_INFO = "vllm:cache_config_info"
CLOCK_METRICS = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"),
    *("vllm:inter_token_latency_seconds_sum", "vllm:generation_tokens_total"),
)
FALLBACK_VOCABULARY = 128  # if a server's error names no size; real vocabularies are larger
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProfiledServer:
    """A server. Fields after `kv_cache_tokens`, except vLLM's version, need its development endpoints."""

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
    The engine's own counters, in the order of `CLOCK_METRICS`. The engine times a token when it is generated.

    A client sees tokens later, delayed by the server's front end and by itself. If either is held up, tokens arrive in
    bursts, and a window that begins after a burst looks much shorter than it was.
    """

    num_running: float
    num_waiting: float
    num_preemptions: float
    seconds: float  # between tokens, summed over all sequences since the server started
    tokens: float

    def seconds_per_token_since(self, before: EngineClock) -> float:
        """Returns the mean over all sequences and tokens since an earlier reading; NaN if there were no tokens."""
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
    """Returns the samples of the named metrics in the text of `/metrics`."""
    lines = [line for line in text.splitlines() if line.startswith(names)]  # a few of a thousand
    found = defaultdict(list)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            found[sample.name].append(sample)
    return found


async def describe_server(server: VLLMServer) -> ProfiledServer:
    """
    Describes a server, and waits until it is idle. Raises [`ConfigurationError`] if it can't be reached, is no vLLM
    server, rejects the key, or has other requests.
    """
    url = urlsplit(server.base_url)
    try:
        models = await server.get("/v1/models")
        if models is None:
            raise ValueError("it has no `/v1/models`, and an address ends before `/v1`")
        served = models["data"][0]
        described = ProfiledServer(
            url=url._replace(netloc=url.netloc.rpartition("@")[2]).geturl(),  # without credentials
            model=str(served["id"]),
            max_model_len=int(served["max_model_len"]),
            vocab_size=await _vocab_size(server, str(served["id"])),
            kv_cache_tokens=kv_cache_tokens(await server.get_text("/metrics")),
            vllm_version=(await server.get("/version") or {}).get("version"),
        )
        # Slow: vLLM collects data about its machine.
        info = await server.get("/server_info?config_format=json", timeout_s=120.0)
    except (aiohttp.ClientError, ServerRefusedError, TimeoutError, ValueError, TypeError, LookupError) as error:
        raise _unreachable(server.base_url, error) from error
    await _check_idle(server, described.model)
    return with_server_info(described, info or {})


def kv_cache_tokens(metrics: str) -> int | None:
    """Returns the tokens that fit into the KV caches behind one address, `None` if `/metrics` does not have them."""
    try:
        engines = [sample.labels for sample in samples(metrics, (CACHE_INFO,))[CACHE_INFO]]
        if engines and engines[0].get("kv_cache_size_tokens", "None") != "None":
            return sum(int(engine["kv_cache_size_tokens"]) for engine in engines)
        # Each engine (data parallel) reports the blocks of all together.
        return int(engines[0]["num_gpu_blocks"]) * int(engines[0]["block_size"])
    except (ValueError, LookupError):
        return None


def with_server_info(server: ProfiledServer, info: Mapping[str, Any]) -> ProfiledServer:
    """Adds what `/server_info` reports, an empty mapping if the server does not have it."""
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
    """Names the GPUs of the server's machine, or its CPU."""
    gpus = re.findall(r"^GPU.*?:\s*(.+?)\s*(?:\(UUID.*)?$", system_env.get("nvidia_gpu_models") or "", re.MULTILINE)
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    fields = dict(re.findall(r"^(CPU\(s\)|Model name):\s*(.+?)\s*$", system_env.get("cpu_info") or "", re.MULTILINE))
    return f"{fields.get('CPU(s)', '?')} CPUs, {fields['Model name']}" if "Model name" in fields else None


def check_alike(servers: Sequence[ProfiledServer]) -> None:
    """Refuses servers that differ in model, precision or layout: each kind needs a profile of its own."""
    for name in ("model", "dtype", "tensor_parallel_size", "data_parallel_size"):
        values = [getattr(server, name) for server in servers]
        if len(set(values)) > 1:
            found = ", ".join(f"{server.url} has {value!r}" for server, value in zip(servers, values, strict=True))
            raise ConfigurationError(
                f"`url` must name servers with the same `{name}`, and {found}. Profile them separately."
            )


def metadata_of(servers: Sequence[ProfiledServer], hardware: str | None = None) -> dict[str, Any]:
    """Describes what is measured, for the file."""
    first = asdict(servers[0])
    del first["url"], first["vocab_size"]
    return first | {
        "hardware": hardware or _joined(server.hardware for server in servers),
        "vllm_version": _joined(server.vllm_version for server in servers),
        "servers": [server.url for server in servers],
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _joined(values: Iterable[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(value for value in values if value)) or None


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
        # The counters are updated by steps, and after an abort there is none until the server decodes again.
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
