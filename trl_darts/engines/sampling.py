"""Sampling options of completion requests, and those with which a completion can't be continued in another request."""

from collections.abc import Mapping
from typing import Any


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
