"""Finds sampling options with which a completion can't be continued in another request from its tokens."""

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
