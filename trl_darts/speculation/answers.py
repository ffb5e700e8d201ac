"""Prompts with their answers, within a memory limit."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .index import GRAM, SuffixIndex


MAX_ANSWERS = 32  # per prompt: older ones come from an outdated policy
MAX_TOKENS = 2**28  # 1 GiB, at four bytes each
NUM_INDEXED = 2**16  # most tokens of earlier answers in a new index
_AFTER_EVICTION = 0.9  # share of the limit kept by an eviction, so that evictions are rare

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete or aborted answer. Its first `GRAM` tokens are the prompt's last ones."""

    version: int  # of the policy
    tokens: Tokens


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt. It has an index from its first draft until its last running sequence ends."""

    tokens: Tokens
    answers: list[Answer] = field(default_factory=list)  # oldest first
    num_running: int = 0
    index: SuffixIndex | None = None

    @property
    def context_start(self) -> int:
        """Position where an answer's text starts: before its first token, so that this one can be drafted too."""
        return max(0, len(self.tokens) - GRAM)

    def make_index(self) -> SuffixIndex:
        """Builds an index of the prompt and its newest answers."""
        index, room = SuffixIndex(), NUM_INDEXED
        chosen: list[Tokens] = []
        for answer in reversed(self.answers):
            room -= len(answer.tokens)
            if room < 0:
                break
            chosen.append(answer.tokens)
        for tokens in [self.tokens, *reversed(chosen)]:  # the newest last, where it is found first
            index.add(tokens.tolist())
        return index


class History:
    """
    Prompts with their answers. Beyond `max_tokens`, answers of the oldest policy are evicted first, the longest among
    them first.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.version = 0
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._prompts: dict[bytes, Prompt] = {}
        self._lengths: Counter[int] = Counter()  # of the prompts

    def prompt_of(self, tokens: Tokens, length: int | None = None) -> Prompt:
        """
        Returns the prompt of a request, known or new. `length` is that of the prompt, where the request says so: the
        tokens of a resumed one also have part of an answer. Otherwise it is the longest known prompt that they start
        with, whose search takes milliseconds with prompts of many lengths.
        """
        if length is None:
            shorter = sorted((n for n in self._lengths if n < len(tokens)), reverse=True)
            for n in [len(tokens), *shorter]:
                prompt = self._prompts.get(tokens[:n].tobytes())
                if prompt is not None:
                    return prompt
        tokens = tokens[:length]
        prompt = self._prompts.get(tokens.tobytes())
        if prompt is not None:
            return prompt
        prompt = Prompt(np.array(tokens, dtype=np.int32))
        self._prompts[prompt.tokens.tobytes()] = prompt
        self._lengths[len(tokens)] += 1
        self.num_tokens += len(tokens)
        return prompt

    def add(self, prompt: Prompt, tokens: Any) -> None:
        """Adds an answer of the current policy."""
        prompt.answers.append(Answer(self.version, np.array(tokens, dtype=np.int32)))
        self.num_tokens += len(tokens)
        if len(prompt.answers) > MAX_ANSWERS:
            self.num_tokens -= len(prompt.answers.pop(0).tokens)
        if self.num_tokens > self._max_tokens:
            self._evict()

    def _evict(self) -> None:
        answers = [(answer, prompt) for prompt in self._prompts.values() for answer in prompt.answers]
        answers.sort(key=lambda pair: (pair[0].version, -len(pair[0].tokens)))
        for answer, prompt in answers:
            if self.num_tokens <= _AFTER_EVICTION * self._max_tokens:
                break
            prompt.answers = [other for other in prompt.answers if other is not answer]
            self.num_tokens -= len(answer.tokens)
        for key in [key for key, prompt in self._prompts.items() if not prompt.answers and not prompt.num_running]:
            length = len(self._prompts.pop(key).tokens)
            self.num_tokens -= length
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
