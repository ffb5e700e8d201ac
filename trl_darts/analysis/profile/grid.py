"""
Which batch sizes, context lengths and prompts are measured: few, spread over the orders of magnitude, and only what
the server can hold (PAT, Section 4.2).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...engines.addresses import check_address
from ...errors import ConfigurationError
from .servers import ServerFacts


CONTEXT_LENGTHS = (128, 512, 2048, 8192, 32768)
PREFILL_LENGTHS = (128, 256, 512, 1024, 1536, 2048, 4096, 8192)

MAX_CONTEXT_TOKENS = 131_072
"""Tokens of all sequences together. Beyond, latency goes on in a line, and prompts cost minutes."""

DEFAULT_MAX_BATCH_SIZE = 256
"""Where a server does not tell how many sequences it decodes at once."""

MIN_COMPLETION = 128
"""Tokens that each sequence must have room for: until the last one has begun, and the measured ones."""

MAX_COMPLETION = 1024
"""Tokens after which each request ends by itself: what a server still decodes if we die."""

KV_SHARE = 0.9
"""Of the KV cache. Sequences occupy whole blocks, and a server that runs full preempts some."""


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
    model: str | None = None  # that of the profile to which these servers are added

    def __post_init__(self) -> None:
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        for url, times in Counter(self.urls).items():
            check_address("url", url)
            if times > 1:
                raise ConfigurationError(f"`url` ({url!r}) must be named once. Leave one out.")
        for name in ("batch_sizes", "max_batch_size", "context_lengths", "max_context_tokens", "repeats"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            if value == () or any(number < 1 for number in numbers):
                raise ConfigurationError(f"`{name}` ({', '.join(map(str, numbers))}) must be at least 1.")
        if self.seed < 0:
            raise ConfigurationError(f"`seed` ({self.seed}) must not be negative.")


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A batch size and the length of each sequence's prompt. `max_tokens` is the most that a completion may have."""

    batch_size: int
    context_length: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Grid:
    """What is to be measured: decoding, and lengths of prompts that are timed on their own."""

    points: tuple[GridPoint, ...]
    prefill_lengths: tuple[int, ...]


def make_grid(servers: Sequence[ServerFacts], options: ProfileOptions) -> Grid:
    """The points that every server can hold. Raises [`ConfigurationError`] if nothing is left."""
    longest = min(facts.max_model_len for facts in servers)
    caches = [facts.kv_cache_tokens for facts in servers if facts.kv_cache_tokens]
    cache = int(KV_SHARE * min(caches)) if caches else None
    sizes = _batch_sizes(servers, options.batch_sizes, options.max_batch_size)
    lengths = _context_lengths(longest, options.context_lengths)
    limit = options.max_context_tokens or MAX_CONTEXT_TOKENS
    points = []
    for length in lengths:
        for size in sizes:
            room = min(longest - length, MAX_COMPLETION, *([cache // size - length] if cache else []))
            if length * size <= limit and room >= min(MIN_COMPLETION, longest // 2):
                points.append(GridPoint(size, length, room))
    if not points:
        raise ConfigurationError(
            f"`context_lengths` ({_list(lengths)}) and `batch_sizes` ({_list(sizes)}) leave nothing to measure: a "
            f"batch must fit into the KV cache ({cache} tokens) and `max_context_tokens` ({limit}). Use shorter "
            "contexts or smaller batches."
        )
    prefill = [length for length in PREFILL_LENGTHS if length < min(longest, cache or longest)]
    return Grid(tuple(points), tuple(prefill) or (longest // 2,))


def _batch_sizes(servers: Iterable[ServerFacts], sizes: Sequence[int] | None, largest: int | None) -> list[int]:
    possible = min((facts.max_num_seqs for facts in servers if facts.max_num_seqs), default=None)
    name, wanted = ("batch_sizes", max(sizes)) if sizes else ("max_batch_size", largest)
    if possible is not None and wanted is not None and wanted > possible:
        raise ConfigurationError(
            f"`{name}` ({wanted}) must be at most {possible}, the sequences that a server decodes at once. Lower it, "
            f"or start the server with `--max-num-seqs {wanted}`."
        )
    if sizes:
        return sorted(size for size in set(sizes) if largest is None or size <= largest)
    most = largest or possible or DEFAULT_MAX_BATCH_SIZE
    return sorted({*(2**i for i in range(most.bit_length())), most})


def _context_lengths(longest: int, lengths: Sequence[int] | None) -> list[int]:
    room = min(MIN_COMPLETION, longest // 2)
    if lengths is None:
        possible = [length for length in CONTEXT_LENGTHS if length + room <= longest]
        if not possible or 2 * possible[-1] <= longest - room < CONTEXT_LENGTHS[-1]:
            possible.append(longest - room)  # a short model's end would stay dark
        return possible
    if max(lengths) + room > longest:
        raise ConfigurationError(
            f"`context_lengths` ({_list(lengths)}) must be at most {longest - room}: with {room} tokens to measure, "
            f"they must fit into the server's `max_model_len` ({longest}). Use shorter ones."
        )
    return sorted(set(lengths))


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, values))
