"""What a server says of itself: enough to plan the measurement, to time it, and to say later what was measured."""

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


RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
SECONDS, TOKENS = "vllm:inter_token_latency_seconds_sum", "vllm:generation_tokens_total"
CACHE_INFO = "vllm:cache_config_info"

FALLBACK_VOCABULARY = 128  # of a server whose refusal names no size; real ones are larger
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server. Without the development endpoints, what follows `kv_cache_tokens` but vLLM's version is unknown."""

    url: str  # without credentials
    model: str  # the name that requests must carry
    max_model_len: int  # tokens of prompt and completion together
    vocab_size: int
    kv_cache_tokens: int | None = None
    max_num_seqs: int | None = None  # that all engines behind the address decode at once
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    dtype: str | None = None
    vllm_version: str | None = None
    weight_version: str | None = None  # "default" before any training
    hardware: str | None = None  # such as "8 x NVIDIA H100 80GB HBM3"


@dataclass(frozen=True, slots=True)
class Reading:
    """
    The clock of a server's engine, which stamps each token when it is there.

    What a client sees is later by the time that the server's front end and the client itself take. Where one of them
    is held up, tokens come in heaps: a window that begins after a heap looks much shorter than it was.
    """

    num_running: float
    num_waiting: float
    num_preemptions: float
    seconds: float  # between tokens, of all sequences together since the server started
    tokens: float

    def seconds_per_token_since(self, before: Reading) -> float:
        """Mean over all sequences and tokens since an earlier reading; NaN if there were none."""
        tokens = self.tokens - before.tokens
        return (self.seconds - before.seconds) / tokens if tokens > 0 else math.nan


async def read_clock(server: VLLMServer) -> Reading:
    """Looks at a server's clock. The engines of one server (data parallel) are added up."""
    names = (RUNNING, WAITING, PREEMPTIONS, SECONDS, TOKENS)
    try:
        found = samples(await server.get_text("/metrics"), names)
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"The server's metrics have no {', '.join(f'`{name}`' for name in missing)}.")
    except ValueError as error:
        raise ConfigurationError(
            f"`url` ({server.base_url!r}) must be a server with statistics, by which it is measured: {error} Start it "
            "without `--disable-log-stats`, with vLLM 0.22 or newer."
        ) from error
    return Reading(*(sum(sample.value for sample in found[name]) for name in names))


async def learn(server: VLLMServer) -> ServerFacts:
    """
    Asks a server what it is, and whether it is idle. Raises [`ConfigurationError`] if it can't be reached, is no vLLM
    server, refuses the key, or has other requests.
    """
    try:
        models = await server.get("/v1/models")
        if models is None:
            raise ValueError("it has no `/v1/models`, and an address ends before `/v1`")
        served = models["data"][0]
        facts = ServerFacts(
            url=without_credentials(server.base_url),
            model=str(served["id"]),
            max_model_len=int(served["max_model_len"]),
            vocab_size=await _vocab_size(server, str(served["id"])),
            kv_cache_tokens=kv_cache_tokens(await server.get_text("/metrics")),
            vllm_version=(await server.get("/version") or {}).get("version"),
            weight_version=await server.weight_version(),
        )
        info = await server.get("/server_info?config_format=json", timeout_s=120.0)  # it looks at its machine
    except (aiohttp.ClientError, ServerRefusedError, TimeoutError, ValueError, TypeError, LookupError) as error:
        raise _unreachable(server.base_url, error) from error
    await _check_idle(server, facts.model)
    return with_server_info(facts, info or {})


def samples(text: str, names: tuple[str, ...]) -> dict[str, list[Sample]]:
    """The samples of the text of `/metrics` that have one of the names."""
    lines = [line for line in text.splitlines() if line.startswith(names)]  # of a thousand
    found = defaultdict(list)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            found[sample.name].append(sample)
    return found


def kv_cache_tokens(metrics: str) -> int | None:
    """Tokens that fit into the KV caches behind one address, from the text of `/metrics`. `None` if it is not told."""
    try:
        engines = [sample.labels for sample in samples(metrics, (CACHE_INFO,))[CACHE_INFO]]
        if engines and engines[0].get("kv_cache_size_tokens", "None") != "None":
            return sum(int(engine["kv_cache_size_tokens"]) for engine in engines)
        # Each engine (data parallel) reports the blocks of all together.
        return int(engines[0]["num_gpu_blocks"]) * int(engines[0]["block_size"])
    except (ValueError, LookupError):
        return None


def with_server_info(facts: ServerFacts, info: Mapping[str, Any]) -> ServerFacts:
    """Facts with those of `/server_info`, whose JSON is empty where the server does not have it."""
    config = info.get("vllm_config") or {}
    parallel = config.get("parallel_config") or {}
    dtype = (config.get("model_config") or {}).get("dtype")
    return replace(
        facts,
        max_num_seqs=max_num_seqs(config),
        tensor_parallel_size=parallel.get("tensor_parallel_size"),
        data_parallel_size=parallel.get("data_parallel_size"),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        hardware=hardware_of(info.get("system_env") or {}),
    )


def hardware_of(system_env: Mapping[str, Any]) -> str | None:
    """The GPUs of the server's machine, or its CPU, in a line. `None` if neither is told."""
    gpus = re.findall(r"^GPU.*?:\s*(.+?)\s*(?:\(UUID.*)?$", system_env.get("nvidia_gpu_models") or "", re.MULTILINE)
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    fields = dict(re.findall(r"^(CPU\(s\)|Model name):\s*(.+?)\s*$", system_env.get("cpu_info") or "", re.MULTILINE))
    return f"{fields.get('CPU(s)', '?')} CPUs, {fields['Model name']}" if "Model name" in fields else None


def without_credentials(url: str) -> str:
    """The address without a user's name and password: it goes into a file."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


async def _vocab_size(server: VLLMServer, model: str) -> int:
    try:
        return await vocabulary_size(server, model) or FALLBACK_VOCABULARY
    except ServerRefusedError as refusal:
        if _wants_key(server.base_url, refusal):
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
        # The numbers are those of its last step. After an abort there may be none until it decodes again.
        with suppress(aiohttp.ClientError, ServerRefusedError, TimeoutError):
            one_token = CompletionRequest.of("idle", ServerPrompt([0]), [], {"model": model, "max_tokens": 1})
            await server.complete(one_token, timeout_s=IDLE_TIMEOUT_S)
        await asyncio.sleep(0.5)


def _wants_key(url: str, error: Exception) -> bool:
    # The error has no status of its own. Numbers elsewhere in the message are ports, sizes, or the server's text.
    return isinstance(error, ServerRefusedError) and str(error).startswith(f"{url} answered 401:")


def _unreachable(url: str, error: Exception) -> ConfigurationError:
    reason = str(error) or type(error).__name__
    if _wants_key(url, error):
        remedy = "Set VLLM_API_KEY to the server's key."
    elif isinstance(error, aiohttp.ClientError | TimeoutError):
        remedy = "Start one with `trl-darts serve MODEL`, or correct the address."
    else:
        reason = f"what answers is none ({type(error).__name__}: {reason})"
        remedy = "Correct the address."
    return ConfigurationError(f"`url` ({url!r}) must be the address of a running vLLM server: {reason}. {remedy}")
