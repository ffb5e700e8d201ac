"""How many tokens a server's model knows."""

import re

from .vllm_api import CompletionRequest, ServerPrompt, ServerRefusedError, VLLMServer


async def vocabulary_size(server: VLLMServer, model: str) -> int | None:
    """
    Asks a server. No endpoint tells, but the refusal of a token beyond the vocabulary does, without any decoding.

    Args:
        server ([`VLLMServer`]):
            The server.
        model (`str`):
            Name that it serves the model under.

    Returns:
        `int`: Tokens in the vocabulary; `None` if the server takes any token.

    Raises:
        [`ServerRefusedError`]: If it refuses for another reason.
    """
    options = {"model": model, "max_tokens": 1, "logit_bias": {str(10**9): 0.0}}
    try:
        await server.complete(CompletionRequest.of("vocabulary", ServerPrompt([0]), [], options), timeout_s=60.0)
    except ServerRefusedError as refusal:
        if match := re.search(r"Vocabulary size: (\d+)", str(refusal)):
            return int(match[1])
        raise
    return None
