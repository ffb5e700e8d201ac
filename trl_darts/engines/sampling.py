"""Which sampling options keep a completion from going on in another request, from its tokens."""

from collections.abc import Mapping
from typing import Any


# What a server counts, or matches, in the output of one request; prior tokens are part of the prompt there. The
# repetition penalty looks at prompt and output alike.
COUNTED = (
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
    """Those of the options that would begin anew there, with their values: without any, tokens can be carried."""
    return {name: options[name] for name in COUNTED if options.get(name)}
