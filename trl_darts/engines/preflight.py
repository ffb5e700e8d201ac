"""
Checks vLLM servers before the model is loaded, so that errors are raised within seconds.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_fixed
from transformers import PretrainedConfig

from ..errors import ConfigurationError, TRLDARTSError, did_you_mean
from .pool import FAILURES, describe
from .seeds import user_seed
from .vllm_api import (
    ServerBusyError,
    ServerRefusedError,
    VLLMServer,
    max_num_seqs,
    option_names,
    sampling_of,
    try_options,
    vocabulary_size,
)
from .waiting import INTERVAL_S, Waiting


RETRY_INTERVAL_S = 1.0


class ServerUnreachableError(TRLDARTSError, ConnectionError):
    """Raised when no vLLM server answers at an address."""


IMAGE_ENDPOINTS = ("/v1/chat/completions/render", "/inference/v1/generate")
# Sampling options that vLLM rejects per request with speculative decoding.
NOT_WITH_DRAFTS = ("min_p", "logit_bias", "trace_decode_token_ids")


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of the run for each server."""

    max_completion_length: int
    model_config: PretrainedConfig
    processed_logprobs: bool  # whether log-probs must be those of the sampling distribution
    weight_transfer: str | None  # required backend of the weight-transfer engine
    timeout_s: float  # to wait for a server that is starting
    images: bool = False  # whether prompts have images
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of the completion requests
    sleep_mode: bool = False  # whether sleep mode is required
    continuous: bool = False  # whether weights change while requests run


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties of a server."""

    model: str  # name of the served model
    max_model_len: int  # most tokens of prompt and completion together
    drafts: bool = False  # whether it uses speculative decoding
    max_num_seqs: int | None = None  # sequences decoded at once
    dtype: str | None = None  # of its weights, as torch writes it; `None` if unknown, or if servers differ


async def check_server(server: VLLMServer, needs: Requirements) -> ServerFacts:
    """Waits until a server is healthy, checks it and returns its properties."""
    await _wait_until_healthy(server, needs.timeout_s)
    info = await server.get("/server_info?config_format=json")
    if info is None:
        if await server.get("/version") is None:
            raise _no_vllm(server.base_url, "it has no `/version`")
        raise ConfigurationError(
            f"The vLLM server at {server.base_url} does not expose its development endpoints, which are needed to "
            "synchronize weights and abort requests. Restart it with `VLLM_SERVER_DEV_MODE=1` in its environment."
        )
    served = (await server.get("/v1/models"))["data"][0]
    drafts = info["vllm_config"].get("speculative_config") is not None
    slots = max_num_seqs(info["vllm_config"])
    dtype = info["vllm_config"]["model_config"].get("dtype")
    facts = ServerFacts(served["id"], served["max_model_len"], drafts, slots, dtype)
    _check_settings(server.base_url, info["vllm_config"], facts, needs)
    await _check_vocabulary(server, facts, needs.model_config)
    if needs.images:
        await _check_image_endpoints(server)
    if user_seed(needs.sampling) is not None:
        await _check_seed(server, info["vllm_config"], needs)
    if needs.continuous:
        await _check_counts(server, info["vllm_config"])
    _check_architecture(server.base_url, info["vllm_config"]["model_config"]["model"], needs.model_config)
    if needs.sampling:
        await _check_sampling(server, facts, needs)
    return facts


async def _wait_until_healthy(server: VLLMServer, timeout_s: float) -> None:
    waiting = Waiting(timeout_s)

    def say(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        waiting.log(f"Waiting for the vLLM server at {server.base_url}: {describe(error, '`/health`')}")

    try:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, FAILURES) and not _is_of_another(error)),
            wait=wait_fixed(RETRY_INTERVAL_S),
            stop=stop_after_delay(timeout_s),
            before_sleep=say,
            reraise=True,
        ):
            with attempt:
                await server.get("/health", timeout_s=max(RETRY_INTERVAL_S, min(timeout_s, INTERVAL_S)))
    except FAILURES as error:
        if _is_of_another(error):
            is_http = isinstance(error, ServerRefusedError)
            raise _no_vllm(server.base_url, str(error) if is_http else "it does not speak HTTP") from error
        raise ServerUnreachableError(
            f"The vLLM server can't be reached at {server.base_url} after `vllm_server_timeout` ({timeout_s:g} s): "
            f"{describe(error, '`/health`')}. Make sure that it is running, and that `vllm_server_base_url` is its "
            "address."
        ) from error


def _is_of_another(error: BaseException) -> bool:
    """Whether something other than a vLLM server answered. A vLLM server that starts or is broken answers 5xx."""
    if isinstance(error, ServerRefusedError):
        return error.status is not None and error.status < 500 and error.status not in (408, 429)
    return isinstance(error, aiohttp.ClientResponseError)


def _no_vllm(url: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"`vllm_server_base_url` must be the address of vLLM servers, and {url} is not one: {reason}. Correct the "
        "address, or start a server with `trl-darts serve`."
    )


def _check_settings(url: str, config: Any, facts: ServerFacts, needs: Requirements) -> None:
    if facts.max_model_len <= needs.max_completion_length:
        raise ConfigurationError(
            f"The vLLM server at {url} has `max_model_len` ({facts.max_model_len}), which must be greater than "
            f"`max_completion_length` ({needs.max_completion_length}): prompt and completion together must fit. "
            "Restart it with a larger `--max-model-len`, or lower `max_completion_length`."
        )
    num_apis = (config.get("parallel_config") or {}).get("_api_process_count", 1)
    if num_apis > 1:
        raise ConfigurationError(
            f"The vLLM server at {url} has `--api-server-count` ({num_apis}), which must be 1: an API process can't "
            "abort the requests of another one. Restart it with `--api-server-count 1`; the default is one per "
            "data-parallel rank."
        )
    mode = config["model_config"]["logprobs_mode"]
    if needs.processed_logprobs and mode != "processed_logprobs":
        raise ConfigurationError(
            f"The vLLM server at {url} runs with `--logprobs-mode {mode}`: its log-probs are those before temperature "
            "and sampling options, which biases the importance sampling correction. Restart it with `--logprobs-mode "
            "processed_logprobs`, or set `vllm_importance_sampling_correction=False`."
        )
    if needs.sleep_mode and not config["model_config"].get("enable_sleep_mode"):
        raise ConfigurationError(
            f"The vLLM server at {url} has no sleep mode, which `vllm_tail_shares_gpus` (True) requires, because "
            "servers on the same GPUs take turns. Restart it with `--enable-sleep-mode` (not on a CPU), or use "
            "separate GPUs for the tail servers, and set it to `False`."
        )
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if needs.weight_transfer is not None and backend != needs.weight_transfer:
        found = "no weight-transfer engine" if backend is None else f"the weight-transfer backend {backend!r}"
        flag = f"""--weight-transfer-config '{{"backend": "{needs.weight_transfer}"}}'"""
        raise ConfigurationError(
            f"The vLLM server at {url} has {found}, and this run needs {needs.weight_transfer!r}. Restart it with "
            f"`{flag}`, or set `weight_sync`."
        )
    refused = [name for name in NOT_WITH_DRAFTS if needs.sampling.get(name)] if facts.drafts else []
    if refused:
        raise ConfigurationError(
            f"The vLLM server at {url} uses speculative decoding, which vLLM does not support with `{refused[0]}` "
            f"({needs.sampling[refused[0]]!r}). Leave it out, or restart the server without `--speculative`."
        )


async def _check_vocabulary(server: VLLMServer, facts: ServerFacts, config: PretrainedConfig) -> None:
    expected = config.get_text_config().vocab_size
    try:
        found = await vocabulary_size(server, facts.model)
    except ServerRefusedError:
        found = None
    if found is not None and found != expected:
        raise ConfigurationError(
            f"The vLLM server at {server.base_url} serves {facts.model!r} with a vocabulary of {found} tokens, but "
            f"the trainer's model has {expected}. Serve the model that you train."
        )


def _check_architecture(url: str, served_model: str, config: PretrainedConfig) -> None:
    """Compares the models' shapes if the served one is a local directory. Otherwise, the first weight sync fails."""
    names = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
    path = Path(served_model) / "config.json"
    if not path.is_file():
        return
    served = json.loads(path.read_text())  # not with transformers, because the directory may contain code
    served = served.get("text_config", served)
    trained = config.get_text_config()
    different = [n for n in names if n in served and served[n] != getattr(trained, n, None)]
    if different:
        differences = ", ".join(f"`{n}` {served[n]} instead of {getattr(trained, n, None)}" for n in different)
        raise ConfigurationError(
            f"The vLLM server at {url} serves another model ({served_model!r}) than the one trained: {differences}. "
            "Serve the model that you train."
        )


async def _check_counts(server: VLLMServer, config: Any) -> None:
    copies = (config.get("parallel_config") or {}).get("data_parallel_size") or 1
    if copies > 1:
        raise ConfigurationError(
            f"The vLLM server at {server.base_url} has `--data-parallel-size` ({copies}), of which only the first "
            "tells which weights sampled which token. With `rollout_ahead='continuous'`, start one server per copy."
        )
    try:
        await server.num_outputs()
    except ServerRefusedError as error:
        raise ConfigurationError(
            f"The vLLM server at {server.base_url} has no trl_darts, which `rollout_ahead` ('continuous') needs to "
            "know which weights sampled which token. Run `pip install trl-darts` in the server's environment, and "
            "restart it."
        ) from error


async def _check_seed(server: VLLMServer, config: Any, needs: Requirements) -> None:
    if not (await sampling_of(server, config)).takes_seeds:
        raise ConfigurationError(
            f"`generation_kwargs['seed']` ({needs.sampling['seed']}) would end the vLLM server at {server.base_url}: "
            "on a CPU, vLLM can't rewind the random numbers of a request that is preempted or prefilled in parts, and "
            "the server has no trl_darts, or an older one, which prevents that. Run `pip install -U trl-darts` in its "
            "environment and restart it, or leave the seed out."
        )


async def _check_sampling(server: VLLMServer, facts: ServerFacts, needs: Requirements) -> None:
    names = await option_names(server, needs.images)
    if names and (unknown := sorted(needs.sampling.keys() - names)):
        raise ConfigurationError(
            f"`generation_kwargs` has {unknown[0]!r} ({needs.sampling[unknown[0]]!r}), which is no option of the vLLM "
            f"server at {server.base_url}, and which it would ignore."
            f"{did_you_mean(unknown[0], names) or ' Leave it out.'}"
        )
    options = {**needs.sampling, "model": facts.model}
    if needs.sleep_mode or (error := await _refusal(server, options, needs.images)) is None:  # it may be asleep
        return
    own = [name for name in options if name != "model"]
    named = [name for name in own if re.search(rf"\b{re.escape(name)}\b", str(error))]
    if not named:  # the one without which it takes the others
        without = {name: {other: options[other] for other in options if other != name} for name in own}
        named = [name for name in own if await _refusal(server, without[name], needs.images) is None]
    given = ", ".join(f"`{name}` ({options[name]!r})" for name in named) or "`generation_kwargs`"
    raise ConfigurationError(
        f"The vLLM server at {server.base_url} refuses the sampling options of this run, and would refuse each "
        f"request: {str(error).rstrip('.')}. Correct {given}."
    ) from error


async def _refusal(server: VLLMServer, options: Mapping[str, Any], images: bool) -> Exception | None:
    """Returns why a server refuses options, or `None` if it takes them."""
    try:
        await try_options(server, options, images)
    except (ServerBusyError, aiohttp.ClientError, TimeoutError):  # not a matter of the options
        return None
    except TypeError as error:  # it can't be sent as JSON
        return error
    except ServerRefusedError as error:
        return None if error.status in (401, 403, 404) else error
    return None


async def _check_image_endpoints(server: VLLMServer) -> None:
    paths = (await server.get("/openapi.json") or {}).get("paths", {})
    if missing := [path for path in IMAGE_ENDPOINTS if path not in paths]:
        raise ConfigurationError(
            f"The vLLM server at {server.base_url} does not serve {' and '.join(map(repr, missing))}, which prompts "
            "with images need. Restart it with `--enable-scale-out` (vLLM 0.30 or newer)."
        )
