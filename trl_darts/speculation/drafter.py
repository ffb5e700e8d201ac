"""The drafter that runs in a vLLM server."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .answers import History, Prompt
from .gain import DraftGain
from .index import SuffixIndex


logger = logging.getLogger("vllm.trl_darts")

ALWAYS_VARIABLE = "TRL_DARTS_ALWAYS_DRAFT"  # if set, drafts don't pause where they don't pay: for measurements

# Of the trainer's requests, see `engines/vllm_api.py`: the lengths of a request's prompts, and which of them it is if
# there are several. A resumed one has part of an answer after its prompt.
PROMPT_LENGTHS = re.compile(r"-p([\d.]+)-[0-9a-f]{32}-(\d+)")
# A sequence can be missing from a batch for a while: vLLM preempts some, and skips some during a long prefill.
STEPS_BETWEEN_SWEEPS = 64
# A sequence drafts twice as many tokens as the model accepted last time, and two more. Whether drafts pay at all in as
# large a batch is measured, see `DraftGain`.
MAX_DRAFT, FIRST_DRAFT = 16, 4
MAX_INDEXED = 2**23  # total tokens of all indexes, about 1 GiB; no index is created beyond it


@dataclass(slots=True)
class Answering:
    """A running sequence."""

    prompt: Prompt
    tokens: list[int]  # from `prompt.context_start` on
    end: int  # number of the request's tokens seen so far, its prompt included
    last_step: int
    text: int | None = None  # in the prompt's index
    num_drafted: int = 0  # in the last step
    budget: int = FIRST_DRAFT  # most tokens to draft next

    def learn(self, num_new: int) -> None:
        """Sets the budget from a step's `num_new` tokens, the last of which the model sampled itself."""
        if self.num_drafted:
            self.budget = min(2 * num_new, MAX_DRAFT)


class SuffixDrafter:
    """
    Drafts the continuation found in other answers to the same prompt, running ones and those of earlier rollouts. vLLM
    loads it as the `model` of its speculative method `"custom_class"`.

    Failures are counted and never raised; decoding then continues without drafts.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.num_failures = 0
        self._max_draft = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._gain = DraftGain(pauses=not os.environ.get(ALWAYS_VARIABLE))
        self._forget()
        parallel = vllm_config.parallel_config
        # vLLM takes drafts from the first rank of the last stage alone, and only this stage has drafters.
        self._drafts = parallel.rank % parallel.tensor_parallel_size == 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is no model, but vLLM's CPU build calls this method."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Returns no drafts: vLLM's own call does not identify the sequences. Our plugin calls `draft` instead."""
        return [[] for _ in sampled_token_ids]

    def new_policy(self) -> None:
        """Moves the previous policy's answers to the history. Called after a weight update."""
        with self._surviving():
            self._sweep(max_age=0)
            self._history.version += 1

    def draft(self, batch: Any, sampled_token_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """
        Returns drafts for the next step of each sequence in vLLM's `InputBatch`. `sampled_token_ids` holds the tokens
        just sampled, none for a sequence still in prefill.
        """
        if self._drafts:
            with self._surviving():
                return self._draft(batch, sampled_token_ids)
        return [[] for _ in sampled_token_ids]

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Catches any exception inside the block and resets the drafter's state."""
        try:
            yield
        except Exception as error:
            self.num_failures += 1
            self._forget()  # the state may be inconsistent
            if self.num_failures == 1:
                logger.warning(
                    "Drafting failed (%s: %s). Answers stay correct, but decoding is slower. Further failures are "
                    "counted but not logged.",
                    type(error).__name__,
                    error,
                )

    def _forget(self) -> None:
        self._history = History()
        self._answering: dict[str, Answering] = {}
        self._step = 0
        self._last_time: float | None = None

    def _draft(self, batch: Any, sampled_token_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        self._step += 1
        num_known = len(self._answering)
        names, ends = batch.req_ids, batch.num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        decoding = {
            row: self._follow(batch, row, names[row], ends[row], sampled)
            for row, sampled in enumerate(sampled_token_ids)
            if sampled
        }
        num_tokens = sum(map(len, sampled_token_ids))
        self._time_step(decoding, num_tokens, all(sampled_token_ids) and len(self._answering) == num_known)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        may_draft = bool(decoding) and self._gain.allows_drafts(len(decoding))
        for row, answering in decoding.items():
            if may_draft:
                drafts[row] = self._draft_one(answering)
            answering.num_drafted = len(drafts[row])
        if self._step % STEPS_BETWEEN_SWEEPS == 0:
            self._sweep(max_age=STEPS_BETWEEN_SWEEPS)
            self._drop_indexes()
        return drafts

    def _follow(self, batch: Any, row: int, name: str, end: int, sampled: Sequence[int]) -> Answering:
        """Returns the sequence of a row, after adding its new tokens."""
        answering = self._answering.get(name)
        if answering is None:
            return self._begin(batch, row, name, end)
        if end - answering.end != len(sampled):  # it was not in the last batch
            sampled = batch.token_ids_cpu[row, answering.end : end].tolist()
        answering.tokens += sampled
        answering.end, answering.last_step = end, self._step
        answering.learn(len(sampled))
        if answering.text is not None and answering.prompt.index is not None:
            answering.prompt.index.extend(answering.text, sampled)
        return answering

    def _begin(self, batch: Any, row: int, name: str, end: int) -> Answering:
        tokens = batch.token_ids_cpu[row, :end]
        prompt_tokens = tokens[: batch.num_prompt_tokens[row]]
        prompt = self._history.prompt_of(prompt_tokens, _prompt_length(name))
        prompt.num_running += 1
        answering = Answering(prompt, tokens[prompt.context_start :].tolist(), end, self._step)
        self._answering[name] = answering
        return answering

    def _time_step(self, decoding: dict[int, Answering], num_tokens: int, only_decoding: bool) -> None:
        """Records the last step's duration, unless it had prefills. Must be called before the next drafts are made."""
        now, before = time.perf_counter(), self._last_time
        self._last_time = now
        if before is not None and decoding and only_decoding:
            num_drafted = sum(answering.num_drafted for answering in decoding.values())
            self._gain.add(len(decoding), num_drafted, num_tokens, now - before)

    def _draft_one(self, answering: Answering) -> list[int]:
        prompt = answering.prompt
        budget = min(answering.budget, self._max_draft, self._max_model_len - answering.end - 1)
        if budget <= 0:
            return []
        if answering.text is None:
            self._index(prompt)
        if prompt.index is None or answering.text is None:
            return []
        return prompt.index.propose(answering.text, budget)

    def _index(self, prompt: Prompt) -> None:
        """Creates the prompt's index if there is room, and adds its running sequences."""
        if prompt.index is None:
            if sum(index.num_tokens for index in self._indexes().values()) > MAX_INDEXED:
                return
            prompt.index = prompt.make_index()
        for answering in self._answering.values():
            if answering.prompt is prompt and answering.text is None:
                answering.text = prompt.index.add(answering.tokens)

    def _indexes(self) -> dict[Prompt, SuffixIndex]:
        prompts = {answering.prompt for answering in self._answering.values()}
        return {prompt: prompt.index for prompt in prompts if prompt.index is not None}

    def _drop_indexes(self) -> None:
        """Drops the largest indexes beyond the limit: they grow while their prompts run."""
        indexes = sorted(self._indexes().items(), key=lambda pair: pair[1].num_tokens)
        excess = sum(index.num_tokens for _, index in indexes) - MAX_INDEXED
        while excess > 0:
            prompt, index = indexes.pop()
            excess -= index.num_tokens
            prompt.index = None
            for answering in self._answering.values():
                if answering.prompt is prompt:
                    answering.text = None

    def _sweep(self, max_age: int) -> None:
        """Moves sequences that were absent for `max_age` steps to the history."""
        gone = [name for name, one in self._answering.items() if one.last_step <= self._step - max_age]
        for name in gone:
            answering = self._answering.pop(name)
            prompt = answering.prompt
            prompt.num_running -= 1
            if not prompt.num_running:
                prompt.index = None
            self._history.add(prompt, answering.tokens)


def _prompt_length(name: str) -> int | None:
    """Returns the length of a request's prompt, `None` if its name does not say it."""
    marked = PROMPT_LENGTHS.search(name)
    if marked is None:
        return None
    lengths = marked[1].split(".")
    return int(lengths[int(marked[2])] if len(lengths) > 1 else lengths[0])
