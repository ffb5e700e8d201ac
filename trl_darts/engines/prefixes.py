"""
Answers of the last epoch as beginnings of new ones (`reuse_answers`).

```
last epoch's rows ──▶ AnswerStore ──▶ verified by the servers in one prefill ──▶ kept up to the first rejected token
       ▲                                                                                      │
       └──────────── rows of the rollout ◀── decoded to the end ◀── its replacement drawn ◀───┘
```
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np

from ..policy.verification import draw_residual, num_accepted
from ..scheduling import Candidate, FinishReason, GroupPlan, PartialCandidate, RolloutResult
from .answers import TOP, Answer, AnswerStore, TopTokens
from .failures import FAILURES, describe
from .pool import Member, State
from .reuse_tally import ReuseTally
from .vllm_api import ServerPrompt, top_of


MAX_AT_ONCE = 8  # verifications on one server: it computes the logits of all of their tokens
POLL_S = 1.0

logger = logging.getLogger(__name__)

Tops = list[dict[int, float]]  # by position


@dataclass(frozen=True)
class Target:
    """A server that verifies."""

    member: Member
    model: str
    room: asyncio.Semaphore

    def check(self) -> None:
        """Raises `TimeoutError` if the server is lost."""
        if self.member.state is not State.UP:
            raise TimeoutError(self.member.reason)

    async def wait(self, answer: Coroutine[Any, Any, Tops]) -> Tops:
        """Waits for an answer as long as the server is healthy."""
        task = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([task], timeout=POLL_S))[0]:
                self.check()
            return task.result()
        finally:
            task.cancel()


def make_prefixes(trainer: Any) -> "VerifiedPrefixes | None":
    """Returns what reuses answers, if the settings say so."""
    args = trainer.args
    if not args.reuse_answers:
        return None
    store = AnswerStore(args.reuse_answers_gib)
    return VerifiedPrefixes(store, set(trainer.eos_token_ids), args.max_completion_length, args.seed)


class VerifiedPrefixes:
    """
    Keeps the rows of rollouts, and begins the next ones to the same prompts with what the current policy keeps.
    Lives in the engine's event loop, except for metrics and checkpoints, which are between rollouts.

    Args:
        store (`AnswerStore`):
            The last answers.
        ends (`set[int]`):
            IDs of end-of-sequence tokens.
        max_length (`int`):
            Most tokens of an answer.
        seed (`int`):
            Seed of the draws.
    """

    def __init__(self, store: AnswerStore, ends: set[int], max_length: int, seed: int) -> None:
        self.store = store
        self.ends = ends
        self.max_length = max_length
        self.num_rollouts = 0
        self._seed = seed
        self._tops: dict[tuple[int, int], TopTokens] = defaultdict(TopTokens)  # of the rollout, by group and index
        self.tally = ReuseTally()
        self._problems: list[str] = []  # of the rollout

    def clear(self) -> None:
        """Begins a training without earlier answers."""
        self.store.clear()
        self.tally.forget()

    async def resume(
        self,
        plans: Sequence[GroupPlan],
        prompts: Mapping[int, Sequence[ServerPrompt]],
        targets: Sequence[Target],
        timeout_s: float,
    ) -> list[GroupPlan]:
        """Returns the plans of a rollout with what is kept of earlier answers: nothing where a server fails."""
        self._tops.clear()
        self.num_rollouts += 1
        if not self.tally.begin():
            return list(plans)
        begin = time.perf_counter()
        places = cycle(targets)
        resumed = await asyncio.gather(
            *(self._resumed(plan, prompts[plan.group_id], places, timeout_s) for plan in plans if targets)
        )
        self.tally.end(time.perf_counter() - begin)
        if self._problems:
            count, first = len(self._problems), self._problems[0]
            logger.warning("%d earlier answers could not be verified, and are sampled anew: %s", count, first)
            self._problems = []
        return resumed or list(plans)

    async def _resumed(
        self, plan: GroupPlan, prompts: Sequence[ServerPrompt], targets: Iterator[Target], timeout_s: float
    ) -> GroupPlan:
        answers = self.store.get(plan.prompt_key)[: plan.num_candidates]
        if plan.resumed or not answers or len(prompts) > 1 or prompts[0].features or prompts[0].problem:
            return plan
        verified = await asyncio.gather(
            *(self._verified(answer, prompts[0], next(targets), timeout_s) for answer in answers)
        )
        partials: list[PartialCandidate] = []
        for place, (answer, new) in enumerate(zip(answers, verified, strict=True)):
            if new is not None and len(new):
                rng = np.random.default_rng([self._seed, self.num_rollouts, plan.prompt_key % 2**32, place])
                partial = self._kept(answer, new, rng, (plan.group_id, len(partials)))
                if partial.tokens:
                    partials.append(partial)
        return replace(plan, resumed=tuple(partials))

    async def _verified(self, answer: Answer, prompt: ServerPrompt, target: Target, timeout_s: float) -> Tops | None:
        """Returns the log-probs of the answer's tokens and of the likeliest ones, `None` if the server fails."""
        tokens = answer.tokens[: self.max_length - 1].tolist()  # the server needs room for a token of its own
        body = {
            "model": target.model,
            "prompt": [*prompt.tokens, *tokens],
            "max_tokens": 1,
            "prompt_logprobs": TOP,
            "temperature": 1.0,
        }
        try:
            async with target.room:
                target.check()
                return await target.wait(target.member.server.prompt_logprobs(body, len(prompt.tokens), timeout_s))
        except FAILURES as error:
            self._problems.append(describe(error, "a request"))
            return None

    def _kept(self, answer: Answer, new: Tops, rng: np.random.Generator, place: tuple[int, int]) -> PartialCandidate:
        """What is kept of an answer, and the token that replaces the first one that is not."""
        tokens = answer.tokens[: len(new)].tolist()
        logprobs = [own[token] for token, own in zip(tokens, new, strict=True)]
        count = num_accepted(answer.logprobs[: len(new)], logprobs, rng)
        self.tally.counts["verified"] += len(tokens)
        self.tally.counts["reused"] += count
        self.tally.counts["answers"] += 1
        self.tally.counts["whole"] += count == len(answer)
        kept, kept_logprobs = tokens[:count], logprobs[:count]
        if count < len(tokens):
            old = answer.top(count)
            if old:
                old[tokens[count]] = float(answer.logprobs[count])
            token, unknown = draw_residual(old, new[count], rng)
            self.tally.counts["rejected"] += 1
            self.tally.unknown += unknown
            if token is not None:
                kept, kept_logprobs = [*kept, token], [*kept_logprobs, new[count][token]]
        self._tops[place].continue_at(0)
        for top in new[: len(kept)]:
            self._tops[place].add(top)
        return PartialCandidate(kept, kept_logprobs, self._reason(kept, answer.ended and count == len(answer)))

    def _reason(self, tokens: Sequence[int], ended: bool) -> FinishReason | None:
        if ended or (tokens and tokens[-1] in self.ends):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.max_length else None

    def note(self, group_id: int, index: int, offset: int, tops: Sequence[Any]) -> None:
        """Notes the likeliest tokens of a chunk that begins after `offset` tokens."""
        known = self._tops[group_id, index]
        known.continue_at(offset)  # a server may have been lost, or it continues from an earlier rollout
        for top in tops:
            known.add(top_of(top))

    def keep(self, result: RolloutResult) -> None:
        """Keeps the rows of a rollout's complete groups."""
        for group in result.groups:
            rows = [(row, self._tops[group.plan.group_id, row.index]) for row in group.rows]
            answers = [_answer(row, tops) for row, tops in rows if row.logprobs]
            if answers:
                self.store.put(group.plan.prompt_key, answers)
        self._tops.clear()


def _answer(row: Candidate, tops: TopTokens) -> Answer:
    tokens, logprobs = np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32)
    return Answer(tokens, logprobs, *tops.arrays(row.length), ended=row.finish_reason is FinishReason.STOP)
