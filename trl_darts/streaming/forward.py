"""
Forward passes over nothing but new tokens
([DARTS](https://huggingface.co/papers/2605.30859), Appendix E: a KV cache per trajectory, processed tokens padded).

```
row 0   · · · · k k k k k k | n n n n n        k: cached, right-aligned     n: new, left-aligned
row 1   k k k k k k k k k k | n n ·            so that each row's own tokens are next to each other, as sliding
row 2   · · · · · · · · · · | n n n n n        windows need them
```
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ..errors import ConfigurationError
from .plan import Chunk, Round, Tokens


IGNORED = -100  # no log-prob is computed for such a label
KeyValues = list[tuple[torch.Tensor, torch.Tensor]]  # by layer, of shape (tokens, heads, size)
LogProbs = dict[str, torch.Tensor]  # by the name of the model that computed them


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One row of a forward pass."""

    past: KeyValues | None  # of the tokens before; `None` where there are none
    inputs: Sequence[int]
    labels: Sequence[int] | None = None  # for each input, the token after it; `None` where no log-probs are wanted
    ends: bool = False  # no tokens follow: the keys and values are not wanted


@dataclass(frozen=True, slots=True)
class ScoredModel:
    """
    A model whose log-probs are wanted: how to call it, with TRL's fused LM head, and what must be entered around a
    forward pass, for example without an adapter. `routes`: it has experts and takes `output_router_logits`.
    """

    call: Callable[..., Any]
    within: Callable[[], AbstractContextManager[Any]]
    routes: bool = False


def row_digest(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    """Identity of a row: equal tokens have equal log-probs."""
    digest = hashlib.sha1(array("q", prompt).tobytes(), usedforsecurity=False)
    digest.update(b"|" + array("q", completion).tobytes())
    return digest.digest()


def num_cached(past: KeyValues | None) -> int:
    """Tokens of a cache."""
    return 0 if past is None else len(past[0][0])


def forward_new(
    model: Callable[..., Any], rows: Sequence[NewTokens], device: torch.device, routes: bool = False
) -> tuple[list[torch.Tensor], list[KeyValues | None]]:
    """
    For each row, log-probs of its labels, and the keys and values of all its tokens so far. There must be at least one
    row, each with at least one input.
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
    # Experts' auxiliary loss is of no use here, and can't be computed from new tokens alone.
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
    cache = DynamicCache()  # without the model's config: a layer with a sliding window would cut what it gets
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
    return batched[row, :, start:end].transpose(0, 1).clone()  # no view, which would keep the whole batch


def _layers(cache: DynamicCache, length: int) -> KeyValues:
    layers: list[Any] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    if not layers or any(keys is None or keys.shape[-2] != length for keys, _ in layers):
        raise ConfigurationError(
            "`stream_logprobs` (True) needs a model whose layers all keep the keys and values of every token, and "
            "this one's do not. Set it to `False`."
        )
    return layers


@dataclass(slots=True)
class _Scoring:
    """A candidate whose scoring has begun."""

    past: dict[str, KeyValues | None]  # by the name of the model
    log_probs: dict[str, list[torch.Tensor]]
    tokens: Tokens = field(default_factory=list)


class Scorer:
    """What one process scores: the caches of its candidates, and the log-probs of those that are complete."""

    def __init__(self, models: Mapping[str, ScoredModel], device: torch.device, sharded: bool = False) -> None:
        self._models = models
        self._device = device
        self._sharded = sharded
        self._bytes: dict[str, int] = {}  # of a token's keys and values, by model; known after the first pass
        self._begin(0)

    def _begin(self, rollout: int) -> None:
        self._rollout = rollout
        self._prompts: dict[int, Tokens] = {}
        self._prefixes: dict[int, dict[str, KeyValues | None]] = {}
        self._open: dict[int, _Scoring] = {}
        self.complete: dict[bytes, LogProbs] = {}  # by `row_digest`
        self.hidden_seconds = 0.0  # while candidates decoded
        self.num_chunks = 0
        self.peak_bytes = 0

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, over all models. Zero until a first round with `prefills`."""
        return sum(self._bytes.values())

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are kept now."""
        pasts = [scoring.past for scoring in self._open.values()] + list(self._prefixes.values())
        return sum(num_cached(past) for by_model in pasts for past in by_model.values()) // len(self._models)

    def forget(self) -> None:
        """Lets go of everything: the weights will change."""
        self._begin(self._rollout)

    def execute(self, work: Round) -> None:
        """Scores one round. The first one of another rollout makes the scorer forget the last."""
        start = time.perf_counter()
        if work.rollout != self._rollout:
            self._begin(work.rollout)
        for candidate_id in work.dropped:
            self._open.pop(candidate_id, None)
        if work.prefills:
            self._prefill(work.prompts)
        if work.scores:
            self._score([chunk for chunk in work.chunks if chunk.tokens])
        self.peak_bytes = max(self.peak_bytes, self.num_cached * self.bytes_per_token)
        for group_id in work.released:
            self._prefixes.pop(group_id, None)
        for chunk in work.chunks:
            if chunk.final:
                self._close(chunk)
        self.num_chunks += sum(bool(chunk.tokens) for chunk in work.chunks)
        if work.hidden:
            self.hidden_seconds += time.perf_counter() - start

    def _prefill(self, prompts: Mapping[int, Tokens]) -> None:
        """The tokens that all candidates of a group share; the prompt's last one has another label for each."""
        self._prompts.update(prompts)
        self._prefixes.update({group_id: dict.fromkeys(self._models) for group_id in prompts})
        long = [group_id for group_id, prompt in prompts.items() if len(prompt) > 1]
        rows = [NewTokens(None, self._prompts[group_id][:-1]) for group_id in long]
        for name in self._models:
            _, caches = self._forward(name, rows)
            for group_id, cache in zip(long, caches, strict=True):
                self._prefixes[group_id][name] = cache

    def _score(self, chunks: Sequence[Chunk]) -> None:
        scorings, spans = [], []
        for chunk in chunks:
            scoring = self._open.get(chunk.candidate_id)
            if scoring is None:
                scoring = _Scoring(dict(self._prefixes[chunk.group_id]), {name: [] for name in self._models})
                self._open[chunk.candidate_id] = scoring
            last = scoring.tokens[-1] if scoring.tokens else self._prompts[chunk.group_id][-1]
            scoring.tokens.extend(chunk.tokens)
            scorings.append(scoring)
            spans.append(([last, *chunk.tokens[:-1]], chunk.tokens, chunk.final))
        for name in self._models:
            rows = [NewTokens(s.past[name], *span) for s, span in zip(scorings, spans, strict=True)]
            log_probs, caches = self._forward(name, rows)
            for scoring, own, cache in zip(scorings, log_probs, caches, strict=True):
                scoring.log_probs[name].append(own.clone())  # no view, which would keep the whole pass
                scoring.past[name] = cache

    def _forward(self, name: str, rows: Sequence[NewTokens]) -> tuple[list[torch.Tensor], list[KeyValues | None]]:
        measured = name in self._bytes
        if not rows and not self._sharded and measured:
            return [], []
        model = self._models[name]
        with torch.no_grad(), model.within():
            padded = rows or [NewTokens(None, [0], [0])]  # a token that means nothing
            log_probs, caches = forward_new(model.call, padded, self._device, model.routes)
        if not measured:
            pairs = caches[0] or []
            self._bytes[name] = sum(keys.nbytes + values.nbytes for keys, values in pairs) // num_cached(pairs)
        return (log_probs, caches) if rows else ([], [])

    def _close(self, chunk: Chunk) -> None:
        """Keeps the log-probs of a candidate that has come to its end, and frees its cache."""
        scoring = self._open.pop(chunk.candidate_id, None)
        if scoring is not None:
            key = row_digest(self._prompts[chunk.group_id], scoring.tokens)
            self.complete[key] = {name: torch.cat(parts).cpu() for name, parts in scoring.log_probs.items()}
