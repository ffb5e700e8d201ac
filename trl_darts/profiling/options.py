"""What the user asks for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProfileOptions:
    """
    What is to be measured. Nothing is checked here.

    Args:
        urls (`tuple[str, ...]`):
            The servers. All serve the same model, in the same way.
        batch_sizes (`tuple[int, ...]`, *optional*):
            By default powers of two up to `max_batch_size`.
        max_batch_size (`int`, *optional*):
            By default as many sequences as a server decodes at once.
        context_lengths (`tuple[int, ...]`, *optional*):
            Tokens of each prompt. By default 128 to 32,768 by factors of 4, as far as the model goes.
        max_context_tokens (`int`, *optional*):
            Tokens of a batch's prompts together. By default 131,072, or 90 % of the KV cache if that is smaller.
        repeats (`int`, *optional*, defaults to `3`):
            Measurements of each point.
        hardware (`str`, *optional*):
            What the servers run on, for the file. By default what they say.
        api_key (`str`, *optional*):
            Key of the servers.
        seed (`int`, *optional*, defaults to `0`):
            Of prompts and order.
    """

    urls: tuple[str, ...]
    batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int | None = None
    context_lengths: tuple[int, ...] | None = None
    max_context_tokens: int | None = None
    repeats: int = 3
    hardware: str | None = None
    api_key: str | None = field(default=None, repr=False)
    seed: int = 0
