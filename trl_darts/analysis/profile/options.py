"""What the user asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ...errors import ConfigurationError


@dataclass(frozen=True)
class ProfileOptions:
    """What is to be measured. Raises [`ConfigurationError`] if an address is none, or a number is too small."""

    urls: tuple[str, ...]  # of servers of the same model, in the same precision, divided in the same way
    batch_sizes: tuple[int, ...] | None = None  # powers of two up to `max_batch_size`
    max_batch_size: int | None = None  # as many sequences as a server decodes at once
    context_lengths: tuple[int, ...] | None = None  # 128 to 32,768 by factors of 4, as far as the model goes
    max_context_tokens: int | None = None  # of a batch's prompts: 131,072, or 90 % of the KV cache if that is smaller
    repeats: int = 3  # measurements of each point
    hardware: str | None = None  # what the servers run on, for the file: what they say
    api_key: str | None = field(default=None, repr=False)
    seed: int = 0  # of prompts and order

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
