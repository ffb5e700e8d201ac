"""What a vLLM server can do: how many sequences, which options, which seeds, which tokens."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .vllm_api import CompletionRequest, ServerPrompt, ServerRefusedError, VLLMServer


TRY_TIMEOUT_S = 5.0


def max_num_seqs(vllm_config: Mapping[str, Any]) -> int | None:
    """Returns the number of sequences that a server decodes at once, over all copies of the model, if known."""
    per_copy = (vllm_config.get("scheduler_config") or {}).get("max_num_seqs")
    copies = (vllm_config.get("parallel_config") or {}).get("data_parallel_size")
    return per_copy * (copies or 1) if per_copy else None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a server draws random numbers."""

    seed: int | None  # of its engines; `None` if unknown
    num_engines: int = 1  # more than one with data parallelism
    takes_seeds: bool = True  # whether requests can have seeds

    def repeats(self, others: Iterable["Sampling"]) -> bool:
        """Whether candidates of a prompt could be equal on its engines, or on it and on others."""
        return self.seed is None or self.num_engines > 1 or any(other.seed == self.seed for other in others)


async def sampling_of(server: VLLMServer, vllm_config: Mapping[str, Any]) -> Sampling:
    """
    Returns how a server samples. On a CPU, a seeded request that is preempted or prefilled in parts kills the engine,
    unless our plugin prevents it.
    """
    seed = (vllm_config.get("model_config") or {}).get("seed")
    num_engines = (vllm_config.get("parallel_config") or {}).get("data_parallel_size") or 1
    on_cpu = (vllm_config.get("device_config") or {}).get("device") == "cpu"
    return Sampling(seed, num_engines, not on_cpu or await server.spares_generators())


async def vocabulary_size(server: VLLMServer, model: str) -> int | None:
    """
    Returns the vocabulary size of a server's model, `None` if the server accepts any token. No endpoint has it, but
    the error for a token beyond the vocabulary does, without any decoding.
    """
    options = {"model": model, "max_tokens": 1, "logit_bias": {str(10**9): 0.0}}
    try:
        await server.complete(CompletionRequest.of("vocabulary", ServerPrompt([0]), [], options), timeout_s=60.0)
    except ServerRefusedError as refusal:
        if match := re.search(r"Vocabulary size: (\d+)", str(refusal)):
            return int(match[1])
        raise
    return None


async def option_names(server: VLLMServer, images: bool) -> set[str]:
    """
    Returns the names of the options that a server knows, also for prompts with images if there are any. It ignores
    other names without a message. Empty if it does not show its API.
    """
    schemas = ((await server.get("/openapi.json") or {}).get("components") or {}).get("schemas") or {}
    names = set((schemas.get("CompletionRequest") or {}).get("properties") or ())
    if images:
        generate = (schemas.get("GenerateRequest") or {}).get("properties") or {}
        names &= {"model", *((generate.get("sampling_params") or {}).get("properties") or names)}
    return names


async def try_options(server: VLLMServer, options: Mapping[str, Any], images: bool) -> None:
    """
    Has a server complete one token. Raises [`ServerRefusedError`] with its message if it refuses the options, which it
    does at once, or `TimeoutError` if it only waits to decode: it may be busy, or paused since a trainer was killed.
    """
    least, most = options.get("min_tokens", 0), options.get("max_tokens", 16)
    if type(least) is type(most) is int and most > 1:  # else the server says what is wrong
        options = {**options, "max_tokens": 1, "min_tokens": min(least, 1 if least <= most else 2)}
    requests = [CompletionRequest.of("options", ServerPrompt([0]), [], options)]
    if images:
        requests.append(CompletionRequest.of("image-options", ServerPrompt([0], {}), [], options))
        requests[1].body["features"] = None
    for request in requests:
        await server.complete(request, TRY_TIMEOUT_S)
