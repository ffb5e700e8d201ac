"""
Checks vLLM servers before the model is loaded, so that errors are raised within seconds.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from transformers import PretrainedConfig

from ..errors import ConfigurationError, TRLDARTSError, did_you_mean
from .failures import FAILURES, describe
from .sampling import user_seed
from .server_abilities import max_num_seqs, option_names, sampling_of, try_options, vocabulary_size
from .vllm_api import LOAD_ADAPTER, ServerBusyError, ServerRefusedError, VLLMServer
from .waiting import INTERVAL_S, Waiting


RETRY_INTERVAL_S = 1.0


class ServerUnreachableError(TRLDARTSError, ConnectionError):
    """Raised when no vLLM server answers at an address."""


SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
IMAGE_ENDPOINTS = ("/v1/chat/completions/render", "/inference/v1/generate")
# Sampling options that vLLM rejects per request with speculative decoding.
NOT_WITH_DRAFTS = ("min_p", "logit_bias", "trace_decode_token_ids")


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """What a run whose weights are LoRA adapters needs of its servers."""

    rank: int = 1
    num_versions: int = 1  # that are loaded at once


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The LoRA adapters that a server can load while it runs, or that several can."""

    max_rank: int = 0
    num_slots: int = 0
    missing: str = ""  # why it can't, and the remedy

    def problem(self, needs: AdapterNeeds) -> str | None:
        """Returns why a run's adapters can't be loaded, with the remedy."""
        if self.missing:
            return self.missing
        if self.max_rank < needs.rank:
            return (
                f"the adapter has rank {needs.rank}, and `--max-lora-rank` is {self.max_rank}. Restart the servers "
                f"with `trl-darts serve --lora-rank {needs.rank}`"
            )
        if self.num_slots < needs.num_versions:
            return (
                f"up to {needs.num_versions} versions are in use at once, and `--max-loras` is {self.num_slots}. "
                f"Restart the servers with `--max-loras {needs.num_versions}`, or lower `max_staleness`"
            )
        return None

    @staticmethod
    def common(rooms: Iterable["AdapterRoom"]) -> "AdapterRoom":
        """Returns what all of several servers can load."""
        rooms = list(rooms)
        if missing := [room for room in rooms if room.missing]:
            return missing[0]
        return AdapterRoom(min(room.max_rank for room in rooms), min(room.num_slots for room in rooms))


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of the run for each server."""

    max_completion_length: int
    model_config: PretrainedConfig | None  # `None` if the server may serve any model
    processed_logprobs: bool  # whether log-probs must be those of the sampling distribution
    weight_transfer: str | None  # required backend of the weight-transfer engine
    timeout_s: float  # to wait for a server that is starting
    images: bool = False  # whether prompts have images
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of the completion requests
    sleep_mode: bool = False  # whether sleep mode is required
    continuous: bool = False  # whether weights change while requests run
    adapters: AdapterNeeds | None = None  # `None` if weights are whole, or are if need be


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties of a server, or those that several have in common."""

    model: str  # name of the served model
    max_model_len: int  # most tokens of prompt and completion together
    drafts: bool = False  # whether it uses speculative decoding
    max_num_seqs: int | None = None  # sequences decoded at once
    dtype: str | None = None  # of its weights, as torch writes it; `None` if unknown, or if servers differ
    adapters: AdapterRoom = AdapterRoom(missing="whether it loads LoRA adapters is not known")

    def check_like(self, url: str, others: "ServerFacts") -> None:
        """Raises [`ConfigurationError`] if the server at `url`, which has these facts, can't replace others."""
        for name in ("model", "dtype", "max_model_len"):
            value, needed = getattr(self, name), getattr(others, name)
            fits = value >= needed if name == "max_model_len" else needed is None or value == needed
            if not fits:
                raise ConfigurationError(
                    f"The vLLM server at {url} has `{name}` ({value!r}), and the others {needed!r}. Start it with the "
                    "same options."
                )


async def check_server(server: VLLMServer, needs: Requirements) -> ServerFacts:
    """Waits until a server is healthy, checks it and returns its properties. Raises [`ConfigurationError`]."""
    await _wait_until_healthy(server, needs.timeout_s)
    check = await Preflight.of(server, needs)
    async for problem in check.problems():
        raise ConfigurationError(problem)
    return check.facts


async def _wait_until_healthy(server: VLLMServer, timeout_s: float) -> None:
    waiting = Waiting(timeout_s)
    while True:
        try:
            await server.get("/health", timeout_s=max(RETRY_INTERVAL_S, min(timeout_s, INTERVAL_S)))
            return
        except FAILURES as error:
            reason = describe(error, "`/health`")
            if _is_of_another(error):
                is_http = isinstance(error, ServerRefusedError)
                raise _no_vllm(server.base_url, reason if is_http else "it does not speak HTTP") from error
            if waiting.seconds >= timeout_s:
                raise ServerUnreachableError(
                    f"The vLLM server can't be reached at {server.base_url} after `vllm_server_timeout` "
                    f"({timeout_s:g} s): {reason}. Make sure that it is running, and that `vllm_server_base_url` is "
                    "its address."
                ) from error
        waiting.log(f"Waiting for the vLLM server at {server.base_url}: {reason}")
        await asyncio.sleep(RETRY_INTERVAL_S)


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


@dataclass(frozen=True, slots=True)
class Preflight:
    """The check of one healthy server."""

    server: VLLMServer
    needs: Requirements
    config: Mapping[str, Any]  # as vLLM shows it
    facts: ServerFacts

    @property
    def name(self) -> str:
        return f"The vLLM server at {self.server.base_url}"

    @classmethod
    async def of(cls, server: VLLMServer, needs: Requirements) -> "Preflight":
        """Reads a server's properties. Raises [`ConfigurationError`] if it has none of a vLLM server."""
        info = await server.get("/server_info?config_format=json")
        if info is None:
            if await server.get("/version") is None:
                raise _no_vllm(server.base_url, "it has no `/version`")
            raise ConfigurationError(
                f"The vLLM server at {server.base_url} does not expose its development endpoints, which are needed to "
                "synchronize weights and abort requests. Restart it with `VLLM_SERVER_DEV_MODE=1` in its environment."
            )
        try:
            config = info["vllm_config"]
            served = (await server.get("/v1/models"))["data"][0]
            drafts, dtype = config.get("speculative_config") is not None, config["model_config"].get("dtype")
            facts = ServerFacts(served["id"], served["max_model_len"], drafts, max_num_seqs(config), dtype)
        except (KeyError, IndexError, TypeError) as error:
            raise _no_vllm(server.base_url, f"its answer has no {error}") from error
        return cls(server, needs, config, replace(facts, adapters=await adapter_room(server, config)))

    async def problems(self) -> AsyncIterator[str]:
        """Yields what keeps the server from serving the run, each with its remedy, the quickest to find first."""
        for check in (
            self._settings,
            self._features,
            self._model,
            self._image_endpoints,
            self._seed,
            self._counts,
            self._sampling,
        ):
            async for problem in check():
                yield problem

    async def _settings(self) -> AsyncIterator[str]:
        if self.facts.max_model_len <= self.needs.max_completion_length:
            yield (
                f"{self.name} has `max_model_len` ({self.facts.max_model_len}), which must be greater than "
                f"`max_completion_length` ({self.needs.max_completion_length}): prompt and completion together must "
                "fit. Restart it with a larger `--max-model-len`, or lower `max_completion_length`."
            )
        num_apis = (self.config.get("parallel_config") or {}).get("_api_process_count", 1)
        if num_apis > 1:
            yield (
                f"{self.name} has `--api-server-count` ({num_apis}), which must be 1: an API process can't "
                "abort the requests of another one. Restart it with `--api-server-count 1`; the default is one per "
                "data-parallel rank."
            )
        mode = self.config["model_config"]["logprobs_mode"]
        if self.needs.processed_logprobs and mode != "processed_logprobs":
            yield (
                f"{self.name} runs with `--logprobs-mode {mode}`: its log-probs are those before temperature and "
                "sampling options, which biases the importance sampling correction. Restart it with `--logprobs-mode "
                "processed_logprobs`, or set `vllm_importance_sampling_correction=False`."
            )

    async def _features(self) -> AsyncIterator[str]:
        if self.needs.sleep_mode and not self.config["model_config"].get("enable_sleep_mode"):
            yield (
                f"{self.name} has no sleep mode, which `vllm_tail_shares_gpus` (True) requires, because "
                "servers on the same GPUs take turns. Restart it with `--enable-sleep-mode` (not on a CPU), or use "
                "separate GPUs for the tail servers, and set it to `False`."
            )
        backend = (self.config.get("weight_transfer_config") or {}).get("backend")
        if self.needs.weight_transfer is not None and backend != self.needs.weight_transfer:
            found = "no weight-transfer engine" if backend is None else f"the weight-transfer backend {backend!r}"
            flag = f"""--weight-transfer-config '{{"backend": "{self.needs.weight_transfer}"}}'"""
            yield (
                f"{self.name} has {found}, and this run needs {self.needs.weight_transfer!r}. Restart it with "
                f"`{flag}`, or set `weight_sync`."
            )
        if self.needs.adapters is not None and (why := self.facts.adapters.problem(self.needs.adapters)) is not None:
            yield f"`weight_sync` ('adapter') needs servers that load LoRA adapters: {why}."
        refused = [name for name in NOT_WITH_DRAFTS if self.needs.sampling.get(name)] if self.facts.drafts else []
        if refused:
            yield (
                f"{self.name} uses speculative decoding, which vLLM does not support with `{refused[0]}` "
                f"({self.needs.sampling[refused[0]]!r}). Leave it out, or restart the server without `--speculative`."
            )

    async def _image_endpoints(self) -> AsyncIterator[str]:
        paths = (
            (await self.server.get("/openapi.json") or {}).get("paths", {}) if self.needs.images else IMAGE_ENDPOINTS
        )
        if missing := [path for path in IMAGE_ENDPOINTS if path not in paths]:
            yield (
                f"{self.name} does not serve {' and '.join(map(repr, missing))}, which prompts "
                "with images need. Restart it with `--enable-scale-out` (vLLM 0.30 or newer)."
            )

    async def _seed(self) -> AsyncIterator[str]:
        seed = user_seed(self.needs.sampling)
        if seed is not None and not (await sampling_of(self.server, self.config)).takes_seeds:
            yield (
                f"`generation_kwargs['seed']` ({seed!r}) would end the vLLM server at {self.server.base_url}: on a "
                "CPU, vLLM can't rewind the random numbers of a request that is preempted or prefilled in parts, and "
                "the server has no trl_darts, or an older one, which prevents that. Run `pip install -U trl-darts` "
                "in its environment and restart it, or leave the seed out."
            )

    async def _counts(self) -> AsyncIterator[str]:
        """Checks what continuous rollouts need, to know which weights sampled which token."""
        if not self.needs.continuous or self.needs.adapters is not None:  # with which requests keep their weights
            return
        copies = (self.config.get("parallel_config") or {}).get("data_parallel_size") or 1
        if copies > 1:
            yield (
                f"{self.name} has `--data-parallel-size` ({copies}), of which only the "
                "first tells which weights sampled which token. With `rollout_ahead='continuous'`, start one server "
                "per copy."
            )
        try:
            await self.server.num_outputs()
        except ServerRefusedError:
            yield (
                f"{self.name} has no trl_darts, which `rollout_ahead` ('continuous') needs to know which weights "
                "sampled which token. Run `pip install trl-darts` in the server's environment, and restart it."
            )

    async def _model(self) -> AsyncIterator[str]:
        """
        Compares the sizes of the vocabularies, and the models' shapes if the served one is a local directory.
        Otherwise, the first weight sync fails.
        """
        if self.needs.model_config is None:
            return
        trained, served = self.needs.model_config.get_text_config(), self.config["model_config"]["model"]
        found = None
        with suppress(ServerRefusedError):
            found = await vocabulary_size(self.server, self.facts.model)
        if found not in (None, trained.vocab_size):
            yield (
                f"{self.name} serves {self.facts.model!r} with a vocabulary of {found} tokens, but the trainer's "
                f"model has {trained.vocab_size}. Serve the model that you train."
            )
        path = Path(served) / "config.json"
        shape = json.loads(path.read_text()) if path.is_file() else {}  # not transformers: it may have code
        shape = shape.get("text_config", shape)
        different = [n for n in SHAPE if n in shape and shape[n] != getattr(trained, n, None)]
        if different:
            differences = ", ".join(f"`{n}` {shape[n]} instead of {getattr(trained, n, None)}" for n in different)
            yield (
                f"{self.name} serves another model ({served!r}) than the one trained: {differences}. Serve the model "
                "that you train."
            )

    async def _sampling(self) -> AsyncIterator[str]:
        sampling = self.needs.sampling
        if not sampling:
            return
        names = await option_names(self.server, self.needs.images)
        if names and (unknown := sorted(sampling.keys() - names)):
            yield (
                f"`generation_kwargs` has {unknown[0]!r} ({sampling[unknown[0]]!r}), which is no option of the vLLM "
                f"server at {self.server.base_url}, and which it would ignore."
                f"{did_you_mean(unknown[0], names) or ' Leave it out.'}"
            )
        options = {**sampling, "model": self.facts.model}
        if self.needs.sleep_mode or (error := await self._refusal(options)) is None:  # it may be asleep
            return
        own = [name for name in options if name != "model"]
        named = [name for name in own if re.search(rf"\b{re.escape(name)}\b", str(error))]
        if not named:  # the one without which it takes the others
            without = {name: {other: options[other] for other in options if other != name} for name in own}
            named = [name for name in own if await self._refusal(without[name]) is None]
        given = ", ".join(f"`{name}` ({options[name]!r})" for name in named) or "`generation_kwargs`"
        yield (
            f"{self.name} refuses the sampling options of this run, and would refuse "
            f"each request: {str(error).rstrip('.')}. Correct {given}."
        )

    async def _refusal(self, options: Mapping[str, Any]) -> Exception | None:
        """Returns why the server refuses options, or `None` if it takes them."""
        try:
            await try_options(self.server, options, self.needs.images)
        except (ServerBusyError, aiohttp.ClientError, TimeoutError):  # not a matter of the options
            return None
        except TypeError as error:  # it can't be sent as JSON
            return error
        except ServerRefusedError as error:
            return None if error.status in (401, 403, 404) else error
        return None


async def adapter_room(server: VLLMServer, config: Mapping[str, Any]) -> AdapterRoom:
    """Returns which LoRA adapters a server can load while it runs."""
    name, lora = f"the vLLM server at {server.base_url}", config.get("lora_config")
    if lora is None:
        return AdapterRoom(
            missing=f"{name} has no `--enable-lora`. Restart it with `trl-darts serve --lora-rank RANK`"
        )
    if (copies := (config.get("parallel_config") or {}).get("data_parallel_size") or 1) > 1:
        reason = f"{name} has `--data-parallel-size` ({copies}), and only one of its engines would load an adapter"
        return AdapterRoom(missing=f"{reason}. Start one server per copy")
    paths = (await server.get("/openapi.json") or {}).get("paths")
    if paths is not None and LOAD_ADAPTER not in paths:
        reason = f"{name} does not load adapters while it runs"
        return AdapterRoom(missing=f"{reason}. Restart it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`")
    version = await server.weight_version()
    if version not in (None, "default"):
        reason = f"the base model of {name} was replaced by the weights {version!r} of a run"
        return AdapterRoom(missing=f"{reason}. Restart it")
    return AdapterRoom(lora["max_lora_rank"], lora["max_loras"])
