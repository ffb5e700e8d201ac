"""
Chooses the batch sizes, context lengths and prompts to measure: a few of each order of magnitude, as far as they fit
into the servers (PAT, Section 4.2).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...engines.addresses import check_address
from ...errors import ConfigurationError
from .profiled_server import ProfiledServer


CONTEXT_LENGTHS = (128, 512, 2048, 8192, 32768)
PREFILL_LENGTHS = (128, 256, 512, 1024, 1536, 2048, 4096, 8192)
MAX_CONTEXT_TOKENS = 131_072  # of all sequences together: with more, latency is linear and prompts take minutes
DEFAULT_MAX_BATCH_SIZE = 256  # if a server does not report `max_num_seqs`
MIN_COMPLETION = 128  # tokens that a sequence needs: some until all sequences have started, then the timed ones
MAX_COMPLETION = 1024  # tokens after which a request ends, in case this process dies
KV_SHARE = 0.9  # of the KV cache: sequences occupy whole blocks, and a full server preempts


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure. Raises [`ConfigurationError`] if an address is invalid or a number is too small."""

    urls: tuple[str, ...]  # servers of the same model, in the same precision and layout
    batch_sizes: tuple[int, ...] | None = None  # default: powers of two up to `max_batch_size`
    max_batch_size: int | None = None  # default: as many sequences as a server decodes at once
    context_lengths: tuple[int, ...] | None = None  # default: 128 to 32,768 by factors of 4
    max_context_tokens: int | None = None  # prompt tokens of a batch; default: 131,072, if the KV cache holds them
    repeats: int = 3  # measurements of each point
    hardware: str | None = None  # a note for the file; default: what the servers report
    api_key: str | None = field(default=None, repr=False)
    seed: int = 0  # of the prompts and of the order of measurements
    model: str | None = None  # of the profile to which these servers are added

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
    """A batch size, the length of each sequence's prompt, and the most tokens that a completion may have."""

    batch_size: int
    context_length: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The batches to decode, and the lengths of the prompts to time."""

    points: tuple[GridPoint, ...]
    prefill_lengths: tuple[int, ...]


def make_grid(servers: Sequence[ProfiledServer], options: ProfileOptions) -> Grid:
    """Returns the points that fit into every server. Raises [`ConfigurationError`] if there is none."""
    longest = min(server.max_model_len for server in servers)
    caches = [server.kv_cache_tokens for server in servers if server.kv_cache_tokens]
    cache = int(KV_SHARE * min(caches)) if caches else None
    sizes = _batch_sizes(servers, options)
    lengths = _context_lengths(longest, options.context_lengths)
    limit = options.max_context_tokens or MAX_CONTEXT_TOKENS
    points = []
    for length in lengths:
        for size in sizes:
            room = min(longest - length, MAX_COMPLETION, *([cache // size - length] if cache else []))
            if length * size <= limit and room >= _min_room(longest):
                points.append(GridPoint(size, length, room))
    if not points:
        raise ConfigurationError(
            f"`context_lengths` ({_list(lengths)}) and `batch_sizes` ({_list(sizes)}) leave nothing to measure: a "
            f"batch must fit into the KV cache ({cache} tokens) and `max_context_tokens` ({limit}). Use shorter "
            "contexts or smaller batches."
        )
    prefill = [length for length in PREFILL_LENGTHS if length < min(longest, cache or longest)]
    return Grid(tuple(points), tuple(prefill) or (longest // 2,))


def _min_room(max_model_len: int) -> int:
    return min(MIN_COMPLETION, max_model_len // 2)


def _batch_sizes(servers: Iterable[ProfiledServer], options: ProfileOptions) -> list[int]:
    sizes, largest = options.batch_sizes, options.max_batch_size
    possible = min((server.max_num_seqs for server in servers if server.max_num_seqs), default=None)
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
    most = longest - _min_room(longest)
    if lengths is None:
        possible = [length for length in CONTEXT_LENGTHS if length <= most]
        if not possible or 2 * possible[-1] <= most < CONTEXT_LENGTHS[-1]:
            possible.append(most)  # otherwise the longest contexts of a short model would not be measured
        return possible
    if max(lengths) > most:
        raise ConfigurationError(
            f"`context_lengths` ({_list(lengths)}) must be at most {most}: with {longest - most} tokens to measure, "
            f"they must fit into the server's `max_model_len` ({longest}). Use shorter ones."
        )
    return sorted(set(lengths))


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, values))
