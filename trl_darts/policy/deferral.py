"""
Which prompts are sampled again, to their end: those whose kept rows have no spread of rewards, while candidates were
aborted that might have given one.

A bounded wait never sees what long answers teach. Where only long answers are right, the groups that it keeps are
uniform, and have no gradient. Such a group is *unsettled*: its prompt can wait for a long round, in which GRPO's
`num_generations` candidates are decoded to their end. Long rounds are expensive, so they also measure for which
prompts they help.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any


GATE = 0.05  # probability of a spread from long candidates alone, from which on a prompt is deferred
EXPLORED = 0.05  # share of unsettled groups that are deferred all the same, to keep measuring
CUT_OFF = 0.03  # share of answers without an end, from which on every rollout is waited for
MEMORY = 0.8  # weight of the past in each moving average
PRIOR_ROUNDS, PRIOR_HITS = 20.0, 4.0  # groups of long rounds, and those of them that a long round has helped


@dataclass
class LongRewards:
    """What long rounds have shown: for which prompts the spread of rewards comes from long candidates alone."""

    num_groups: float = PRIOR_ROUNDS
    num_hits: float = PRIOR_HITS
    by_prompt: dict[int, tuple[float, float]] = field(default_factory=dict)  # groups and hits, by `PromptInfo.key`
    usual_length: float = 0.0  # tokens after which a short round is over, on average
    cut_off_share: float | None = None  # of answers in long rounds; `None` before the first
    deferred_share: float = 0.3  # of the groups of short rounds

    def probability(self, key: int) -> float:
        """Probability that a long round gives this prompt's group a spread that a short one does not."""
        groups, hits = self.by_prompt.get(key, (0.0, 0.0))
        return (hits + self.num_hits / self.num_groups) / (groups + 1)

    def defers(self, key: int, entry_id: int) -> bool:
        """Whether an unsettled group is deferred. The same for the same entry, also after a resume."""
        return self.probability(key) > GATE or random.Random(entry_id).random() < EXPLORED

    @property
    def waits_for_all(self) -> bool:
        """Whether rollouts are decoded to their end: nothing is known yet, or too many answers never end."""
        return self.cut_off_share is None or self.cut_off_share > CUT_OFF

    def observe_short(self, length: float, num_deferred: int, num_groups: int) -> None:
        """Learns from a short round: after how many tokens it was over, and how many of its groups were deferred."""
        self.usual_length = MEMORY * self.usual_length + (1 - MEMORY) * length if self.usual_length else length
        if num_groups:
            self.deferred_share = MEMORY * self.deferred_share + (1 - MEMORY) * num_deferred / num_groups

    def observe_long(self, key: int, is_uniform: bool, is_short_uniform: bool) -> None:
        """
        Learns from a group of a long round: whether its rewards have no spread, and whether those have none of its
        rows that are at most `usual_length` long.
        """
        groups, hits = self.by_prompt.get(key, (0.0, 0.0))
        hit = not is_uniform and is_short_uniform
        self.by_prompt[key] = MEMORY * groups + 1, MEMORY * hits + hit
        self.num_groups, self.num_hits = self.num_groups + 1, self.num_hits + hit

    def observe_ends(self, num_cut_off: int, num_rows: int) -> None:
        """Learns how many rows of a round that was decoded to its end were cut off at the limit."""
        if num_rows:
            share = num_cut_off / num_rows
            known = self.cut_off_share
            self.cut_off_share = share if known is None else MEMORY * known + (1 - MEMORY) * share

    def num_started(self, num_groups: int) -> int:
        """Prompts of a short round that are likely to leave `num_groups` settled ones: at most twice as many."""
        return round(num_groups * min(2.0, 1 / (1 - self.deferred_share)))

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_prompt": [[key, *known] for key, known in self.by_prompt.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.by_prompt = {key: (groups, hits) for key, groups, hits in state["by_prompt"]}
