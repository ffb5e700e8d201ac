"""What the user asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ...errors import ConfigurationError


@dataclass(frozen=True)
class ProfileOptions:
    """
    What is to be measured.

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

    Raises:
        [`ConfigurationError`]: If an address is none or is named twice, or a number is too small.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        for url, times in Counter(self.urls).items():
            if not _is_address(url):
                raise ConfigurationError(f"`url` ({url!r}) must be an address such as 'http://localhost:8000'.")
            if times > 1:
                raise ConfigurationError(f"`url` ({url!r}) must be named once. Leave one out.")
        for name in ("batch_sizes", "max_batch_size", "context_lengths", "max_context_tokens", "repeats"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            if value == () or any(number < 1 for number in numbers):
                raise ConfigurationError(f"`{name}` ({', '.join(map(str, numbers))}) must be at least 1.")
        if self.seed < 0:
            raise ConfigurationError(f"`seed` ({self.seed}) must not be negative.")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, or a port that is no number
        return False
