"""
Forward passes over new tokens only
([DARTS](https://huggingface.co/papers/2605.30859), Appendix E: a KV cache per trajectory, processed tokens padded).

```
row 0   · · · · k k k k k k | n n n n n        k: cached, right-aligned     n: new, left-aligned
row 1   k k k k k k k k k k | n n ·            so that the tokens of each row are adjacent, as sliding
row 2   · · · · · · · · · · | n n n n n        windows require
```
"""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ..errors import ConfigurationError
from .plan import Chunk, ScoringRound, Tokens


IGNORED = -100  # label without a log-prob
KeyValues = list[tuple[torch.Tensor, torch.Tensor]]  # by layer, of shape (tokens, heads, size)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One row of a forward pass."""

    past: KeyValues | None  # of the previous tokens; `None` if there are none
    inputs: Sequence[int]
    labels: Sequence[int] | None = None  # the token after each input; `None` if no log-probs are needed
    ends: bool = False  # no tokens follow, so the keys and values are not needed


def row_digest(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    """Returns a hash that identifies a row by its tokens."""
    digest = hashlib.sha1(array("q", prompt).tobytes(), usedforsecurity=False)
    digest.update(b"|" + array("q", completion).tobytes())
    return digest.digest()


def num_cached(past: KeyValues | None) -> int:
    return 0 if past is None else len(past[0][0])


def forward_new(
    model: Callable[..., Any], rows: Sequence[NewTokens], device: torch.device, routes: bool = False
) -> tuple[list[torch.Tensor], list[KeyValues | None]]:
    """
    Runs one forward pass. Returns each row's log-probs of its labels, and the keys and values of all its tokens so
    far. There must be at least one row, each with at least one input.
    """
    lengths = [num_cached(row.past) for row in rows]
    context, width = max(lengths), max(len(row.inputs) for row in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    mask = torch.zeros(len(rows), context + width, dtype=torch.long)
    for b, row in enumerate(rows):
        count = len(row.inputs)
        inputs[b, :count] = torch.tensor(row.inputs)
        mask[b, context - lengths[b] : context + count] = 1
        if row.labels is not None:
            labels[b, :count] = torch.tensor(row.labels)
    positions = torch.tensor(lengths)[:, None] + torch.arange(width)
    cache = _batched_cache([row.past for row in rows])
    # The auxiliary loss of experts is not needed here, and can't be computed from new tokens alone.
    extra = {"output_router_logits": False} if routes else {}
    output = model(
        input_ids=inputs.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        past_key_values=cache,
        shift_labels=labels.to(device),
        fused_lm_head=True,
        **extra,
    )
    layers = _layers(cache, context + width)
    log_probs = [output.log_probs[b, : len(row.inputs)] for b, row in enumerate(rows)]
    spans = [(context - length, context + len(row.inputs)) for length, row in zip(lengths, rows, strict=True)]
    return log_probs, [
        None if row.ends else [(_own(keys, b, *span), _own(values, b, *span)) for keys, values in layers]
        for b, (row, span) in enumerate(zip(rows, spans, strict=True))
    ]


def _batched_cache(pasts: Sequence[KeyValues | None]) -> DynamicCache:
    cache = DynamicCache()  # without the model's config: a layer with a sliding window would truncate its input
    like = next((past for past in pasts if past is not None), None)
    if like is not None:
        for index, (keys, values) in enumerate(like):
            own_keys = [keys[:0] if past is None else past[index][0] for past in pasts]
            own_values = [values[:0] if past is None else past[index][1] for past in pasts]
            cache.update(_batched(own_keys), _batched(own_values), index)
    return cache


def _batched(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_side="left").transpose(1, 2)


def _own(batched: torch.Tensor, row: int, start: int, end: int) -> torch.Tensor:
    return batched[row, :, start:end].transpose(0, 1).clone()  # a view would keep the whole batch alive


def _layers(cache: DynamicCache, length: int) -> KeyValues:
    layers: list[Any] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    if not layers or any(keys is None or keys.shape[-2] != length for keys, _ in layers):
        raise ConfigurationError(
            "`stream_logprobs` (True) needs a model whose layers all keep the keys and values of every token. Set it "
            "to `False` for this model."
        )
    return layers


@dataclass(slots=True)
class _Scoring:
    """Scoring state of one candidate."""

    past: KeyValues | None
    tokens: Tokens = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)


class Scorer:
    """
    Scores candidates with one model on one process. Holds the caches of running candidates, and the log-probs of
    complete ones.

    The model must have TRL's fused LM head. It is called inside `within()`, for example without its adapter. Set
    `routes` for a model with experts. Set `sharded` if a forward pass is a collective operation, so that it also runs
    without rows on this process.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        within: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        sharded: bool = False,
        routes: bool = False,
    ) -> None:
        self._model = model
        self._within = within
        self._device = device
        self._sharded = sharded
        self._routes = routes
        self.bytes_per_token = 0  # of keys and values; known after the first pass
        self._begin(0)

    def _begin(self, rollout: int) -> None:
        self._rollout = rollout
        self._prompts: dict[int, Tokens] = {}
        self._prefixes: dict[int, KeyValues | None] = {}
        self._open: dict[int, _Scoring] = {}
        self.complete: dict[bytes, torch.Tensor] = {}  # by `row_digest`
        self.peak_tokens = 0  # most tokens in the cache at once

    @property
    def num_cached(self) -> int:
        """Number of tokens in the cache."""
        return sum(map(num_cached, [*self._prefixes.values(), *(scoring.past for scoring in self._open.values())]))

    def forget(self) -> None:
        """Drops all caches and log-probs before the weights change."""
        self._begin(self._rollout)

    def execute(self, work: ScoringRound) -> None:
        """Scores one round. The first round of a new rollout drops everything of the previous one."""
        if work.rollout != self._rollout:
            self._begin(work.rollout)
        for candidate_id in work.dropped:
            self._open.pop(candidate_id, None)
        if work.prefills:
            self._prefill(work.prompts)
        if work.scores:
            self._score([chunk for chunk in work.chunks if chunk.tokens])
        self.peak_tokens = max(self.peak_tokens, self.num_cached)
        for group_id in work.released:
            self._prefixes.pop(group_id, None)
        for chunk in work.chunks:
            if chunk.final:
                self._close(chunk)

    def _prefill(self, prompts: Mapping[int, Tokens]) -> None:
        """Caches the prompts without their last token, whose label differs between candidates."""
        self._prompts.update(prompts)
        self._prefixes.update(dict.fromkeys(prompts))
        long = [group_id for group_id, prompt in prompts.items() if len(prompt) > 1]
        _, caches = self._forward([NewTokens(None, prompts[group_id][:-1]) for group_id in long])
        self._prefixes.update(zip(long, caches, strict=True))

    def _score(self, chunks: Sequence[Chunk]) -> None:
        scorings, rows = [], []
        for chunk in chunks:
            scoring = self._open.get(chunk.candidate_id)
            if scoring is None:
                scoring = self._open[chunk.candidate_id] = _Scoring(self._prefixes[chunk.group_id])
            last = scoring.tokens[-1] if scoring.tokens else self._prompts[chunk.group_id][-1]
            scoring.tokens.extend(chunk.tokens)
            scorings.append(scoring)
            rows.append(NewTokens(scoring.past, [last, *chunk.tokens[:-1]], chunk.tokens, chunk.final))
        for scoring, log_probs, cache in zip(scorings, *self._forward(rows), strict=True):
            scoring.log_probs.append(log_probs.clone())  # a view would keep the whole output alive
            scoring.past = cache

    def _forward(self, rows: Sequence[NewTokens]) -> tuple[list[torch.Tensor], list[KeyValues | None]]:
        if not rows and not self._sharded and self.bytes_per_token:
            return [], []
        with torch.no_grad(), self._within():
            padded = rows or [NewTokens(None, [0], [0])]  # a dummy token
            log_probs, caches = forward_new(self._model, padded, self._device, self._routes)
        if not self.bytes_per_token:
            pairs = caches[0] or []
            self.bytes_per_token = sum(keys[0].nbytes + values[0].nbytes for keys, values in pairs)
        return (log_probs, caches) if rows else ([], [])

    def _close(self, chunk: Chunk) -> None:
        """Stores the log-probs of a complete candidate, and frees its cache."""
        scoring = self._open.pop(chunk.candidate_id, None)
        if scoring is not None:
            key = row_digest(self._prompts[chunk.group_id], scoring.tokens)
            self.complete[key] = torch.cat(scoring.log_probs).cpu()
