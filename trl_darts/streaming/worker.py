"""What one process scores: the caches of its candidates, and the log-probs of those that are complete."""

import hashlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from .forward import KeyValues, NewTokens, forward_new, num_cached
from .rounds import Chunk, Round, Tokens


# By the name of the model that computed them.
LogProbs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ScoredModel:
    """
    A model whose log-probs are wanted.

    Args:
        call (`Callable`):
            The model, with TRL's fused LM head.
        within (`Callable[[], ContextManager]`):
            What must be entered around a forward pass, for example without an adapter.
        routes (`bool`, *optional*, defaults to `False`):
            Whether it has experts and takes `output_router_logits`.
    """

    call: Callable[..., Any]
    within: Callable[[], AbstractContextManager[Any]]
    routes: bool = False


@dataclass(slots=True)
class _Candidate:
    tokens: Tokens = field(default_factory=list)
    past: dict[str, KeyValues | None] = field(default_factory=dict)
    log_probs: dict[str, list[torch.Tensor]] = field(default_factory=dict)


def row_digest(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    """Identity of a row: equal tokens have equal log-probs."""
    digest = hashlib.sha1(array("q", prompt).tobytes(), usedforsecurity=False)
    digest.update(b"|" + array("q", completion).tobytes())
    return digest.digest()


class StreamWorker:
    """
    Executes rounds of scoring.

    Args:
        models (`Mapping[str, ScoredModel]`):
            Whose log-probs are wanted, by name.
        device (`torch.device`):
            Of the models.
        sharded (`bool`):
            Whether a forward pass is a collective: it is gone through also where this process has nothing to score.
    """

    def __init__(self, models: Mapping[str, ScoredModel], device: torch.device, sharded: bool) -> None:
        self._models = models
        self._device = device
        self._sharded = sharded
        self._bytes: dict[str, int] = {}  # of a token's keys and values, by model; known after the first pass
        self._begin(0)

    def _begin(self, rollout: int) -> None:
        self._rollout = rollout
        self._prompts: dict[int, Tokens] = {}
        self._prefixes: dict[int, dict[str, KeyValues | None]] = {}
        self._candidates: dict[int, _Candidate] = {}
        self.complete: dict[bytes, LogProbs] = {}
        self.hidden_seconds = 0.0  # while candidates decoded
        self.num_chunks = 0
        self.peak_bytes = 0

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, over all models. Zero until a first round with `prefills`."""
        return sum(self._bytes.values())

    def forget(self) -> None:
        """Lets go of everything: the weights will change."""
        self._begin(self._rollout)

    def execute(self, work: Round) -> None:
        """
        Scores one round.

        Args:
            work ([`Round`]):
                What to do. Those of a new rollout make the worker forget the last one.
        """
        start = time.perf_counter()
        if work.rollout != self._rollout:
            self._begin(work.rollout)
        for candidate_id in work.dropped:
            self._candidates.pop(candidate_id, None)
        if work.prefills:
            self._prefill(work.prompts)
        if work.scores:
            self._score([chunk for chunk in work.chunks if chunk.tokens])
        self._note_peak()
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
        long = [group_id for group_id, prompt in prompts.items() if len(prompt) > 1]
        for group_id in prompts.keys() - long:
            self._prefixes[group_id] = dict.fromkeys(self._models)
        rows = [NewTokens(None, self._prompts[group_id][:-1]) for group_id in long]
        for name in self._models:
            _, caches = self._forward(name, rows)
            for group_id, cache in zip(long, caches, strict=True):
                self._prefixes.setdefault(group_id, {})[name] = cache

    def _score(self, chunks: Sequence[Chunk]) -> None:
        candidates, spans = [], []
        for chunk in chunks:
            candidate = self._candidates.get(chunk.candidate_id)
            if candidate is None:
                candidate = _Candidate(past=dict(self._prefixes[chunk.group_id]))
                candidate.log_probs = {name: [] for name in self._models}
                self._candidates[chunk.candidate_id] = candidate
            last = candidate.tokens[-1] if candidate.tokens else self._prompts[chunk.group_id][-1]
            candidate.tokens.extend(chunk.tokens)
            candidates.append(candidate)
            spans.append(([last, *chunk.tokens[:-1]], chunk.tokens, chunk.final))
        for name in self._models:
            rows = [NewTokens(c.past[name], *span) for c, span in zip(candidates, spans, strict=True)]
            log_probs, caches = self._forward(name, rows)
            for candidate, own, cache in zip(candidates, log_probs, caches, strict=True):
                candidate.log_probs[name].append(own.clone())  # no view, which would keep the whole pass
                candidate.past[name] = cache

    def _forward(self, name: str, rows: Sequence[NewTokens]) -> tuple[list[torch.Tensor], list[KeyValues | None]]:
        measured = name in self._bytes
        if not rows and not self._sharded and measured:
            return [], []
        model = self._models[name]
        with torch.no_grad(), model.within():
            log_probs, caches = forward_new(
                model.call, rows or [NewTokens(None, [0], [0])], self._device, model.routes
            )
        if not measured:
            self._bytes[name] = sum(tensor.nbytes for pair in caches[0] for tensor in pair) // len(caches[0][0][0])
        return (log_probs, caches) if rows else ([], [])

    def _close(self, chunk: Chunk) -> None:
        """Keeps the log-probs of a candidate that has come to its end, and frees its cache."""
        candidate = self._candidates.pop(chunk.candidate_id, None)
        if candidate is not None:
            key = row_digest(self._prompts[chunk.group_id], candidate.tokens)
            self.complete[key] = {name: torch.cat(parts).cpu() for name, parts in candidate.log_probs.items()}

    def _note_peak(self) -> None:
        pasts = [c.past for c in self._candidates.values()] + list(self._prefixes.values())
        tokens = sum(num_cached(past) for by_model in pasts for past in by_model.values()) // len(self._models)
        self.peak_bytes = max(self.peak_bytes, tokens * self.bytes_per_token)
