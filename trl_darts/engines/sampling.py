"""Sampling options of completion requests, those with which a completion can't be continued in another, and seeds."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..errors import ConfigurationError


# Options that a server applies to the output of one request. In the next request, these tokens belong to the prompt.
# The repetition penalty applies to prompt and output, so it is not among them.
PER_REQUEST = (
    "stop",
    "bad_words",
    "presence_penalty",
    "frequency_penalty",
    "structured_outputs",
    "response_format",
    "thinking_token_budget",
    "repetition_detection",
)


def not_carried(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that would restart in another request. If there are none, it can continue a completion."""
    return {name: options[name] for name in PER_REQUEST if options.get(name)}


def request_body(model: str, options: Any, regex: str | None) -> dict[str, Any]:
    """
    Returns the fields of all completion requests: TRL's sampling options, which are attributes of the config and of
    TRL's generation, under the server's names. `regex` is a pattern for all completions.
    """
    body = {
        "model": model,
        "max_tokens": options.max_completion_length,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": 0.0 if options.min_p is None else options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "logprobs": 0,  # only of the sampled token
    }
    if regex is not None:
        body["structured_outputs"] = {"regex": regex}
    return body | (options.generation_kwargs or {})


@dataclass(frozen=True, slots=True)
class RolloutSeed:
    """Derives the seeds of one rollout's candidates. `rollout` is what no other rollout of the run has."""

    base: int
    rollout: tuple[int, ...] = ()
    always: bool = False  # whether requests have a seed wherever they run, and not only where engines sample alike

    def of(self, group_id: int, index: int, segment: int = 0) -> int:
        """Returns the seed of a candidate's request. A resumed candidate must not replay its random numbers."""
        words = repr((self.base, self.rollout, group_id, index, segment)).encode()
        # 62 bits: vLLM takes signed integers of 64 bits, of which -1 is no seed.
        return int.from_bytes(blake2b(words, digest_size=8).digest(), "big") >> 2


def user_seed(generation_kwargs: Mapping[str, Any] | None) -> int | None:
    """Returns the seed among a user's sampling options, if any. For vLLM, -1 is none."""
    seed = (generation_kwargs or {}).get("seed")
    if seed is not None and type(seed) is not int:
        raise ConfigurationError(
            f"`generation_kwargs['seed']` ({seed!r}) must be a whole number, from which each candidate's seed is "
            "derived. Correct it, or leave it out."
        )
    return None if seed == -1 else seed
