"""An engine that samples the chain of `long_tail.py` from the current weights, and decodes in virtual time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.long_tail import LIMIT, probabilities
from benchmarks.models import EOS_ID
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, scaled
from trl_darts.analysis.simulation import ClusterSpec, SimulatedCluster
from trl_darts.engines.batch import PromptBatch
from trl_darts.scheduling import GroupPlan, RolloutResult
from trl_darts.testing import StubEngine


CURVE = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES)


class ChainClock(StubEngine):
    """
    Samples answers from the model's current weights, and decodes them in virtual time. Training takes `per_token`
    seconds for each token; rollouts that were launched, or never end, decode meanwhile.
    """

    def __init__(self, trainer: Any, seed: int, per_token: float) -> None:
        super().__init__(self.later_turn, LIMIT, trainer._main)
        self._model, self._rng, self.per_token = trainer.model, np.random.default_rng(seed), per_token
        self._cluster = SimulatedCluster(ClusterSpec(CURVE))
        self._letters: dict[int, int] = {}  # last token of the prompt, by group
        self._logprobs: dict[tuple[int, ...], list[float]] = {}
        self.now = self._trains = 0.0  # seconds, and those of the training that is under way
        self._launched: RolloutResult | None = None

    def _write_all(self, batch: PromptBatch, groups: Sequence[GroupPlan]) -> dict[int, list[list[int]]]:
        counts = [group.num_candidates for group in groups]
        letters = [batch.rows[batch.row_of(group.group_id, 0)][-1] for group in groups]
        self._letters |= {group.group_id: letter for group, letter in zip(groups, letters, strict=True)}
        self._table = probabilities(self._model)
        answers = iter(sample(self._table, np.repeat(letters, counts), self._rng))
        return {group.group_id: [next(answers) for _ in range(group.num_candidates)] for group in groups}

    def extend(self, plan: Any, batch: PromptBatch) -> None:
        """Adds groups, and notes the log-probs of their answers."""
        super().extend(plan, batch)
        for group in plan.groups:
            for index, answer in enumerate(self._completions[group.group_id]):
                self._logprobs[group.group_id, index] = self._log(self._letters[group.group_id], answer)

    def _log(self, state: int, tokens: Sequence[int]) -> list[float]:
        return [float(v) for v in np.log(self._table[[state, *tokens[:-1]], tokens])] if tokens else []

    def drain(self, step: int) -> None:
        """Lets the training pass, and has the rest of each unfinished answer sampled by the new weights."""
        running = self._continuous
        if running is None:
            return super().drain(step)
        running.advance(self._trains)
        self._trains = 0.0
        counts = running.update(step)
        self._step, self._table = step, probabilities(self._model)
        waiting = [c for c in running.scheduler.ledger.candidates if c.ended is None]
        kept = [self._completions[c.group_id][c.index][: counts.get(c.candidate_id, 0)] for c in waiting]
        states = [own[-1] if own else self._letters[c.group_id] for c, own in zip(waiting, kept, strict=True)]
        rests = sample(self._table, np.array(states, int), self._rng)
        for candidate, own, state, rest in zip(waiting, kept, states, rests, strict=True):
            rest = rest[: LIMIT + 1 - len(own)]
            key = candidate.group_id, candidate.index
            self._completions[key[0]][key[1]] = own + rest
            self._logprobs[key] = self._logprobs[key][: len(own)] + self._log(state, rest)
            running.redraw(*key, len(own) + len(rest))
        return None

    def launch(self, plan: Any, batch: PromptBatch) -> None:
        """Decodes a rollout while the batch before trains."""
        self._launched = self._decode(plan, batch)

    def _run(self, plan: Any, batch: PromptBatch) -> RolloutResult:
        if plan.takes is not None:
            result = super()._run(plan, batch)
            self.now = self._continuous.now if self._continuous is not None else 0.0
        elif self._launched is not None:
            result, self._launched = self._launched, None
            self.now += max(self._trains, result.timeline.times[-1])
        else:
            result = self._decode(plan, batch)
            self.now += self._trains + result.timeline.times[-1]
        rows = [row for group in result.groups for row in group.rows]
        if plan.takes is not None:  # `launch` and `_decode` noted the others' log-probs
            for group in result.groups:
                for row in group.candidates:
                    row.logprobs = self._logprobs.pop((group.plan.group_id, row.index))[: row.length]
        self._trains = self.per_token * sum(row.length for row in rows)
        return result

    def _decode(self, plan: Any, batch: PromptBatch) -> RolloutResult:
        result = super()._run(plan, batch)
        for group in result.groups:
            for row in group.rows:
                row.logprobs = self._log(self._letters[group.plan.group_id], row.tokens)
        return result


def sample(table: np.ndarray, states: np.ndarray, rng: np.random.Generator) -> list[list[int]]:
    """An answer from each state, with `eos`; one that does not end has a token more than the limit."""
    bounds = table.cumsum(1)
    tokens = np.zeros((len(states), LIMIT + 1), int)
    running = np.arange(len(states))
    for place in range(LIMIT + 1):
        following = (bounds[states] < rng.random((len(states), 1))).sum(1).clip(max=len(table) - 1)
        tokens[running, place] = following
        running, states = running[following != EOS_ID], following[following != EOS_ID]
    is_end = tokens == EOS_ID
    lengths = np.where(is_end.any(1), is_end.argmax(1) + 1, LIMIT + 1)
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
