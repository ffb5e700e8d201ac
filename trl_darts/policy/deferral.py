"""
Decides which prompts are deferred to a long round.

A bounded wait aborts long answers. If only these are right, the kept rewards of a group are all equal, and it has no
gradient. A group with equal rewards and aborted candidates is *unsettled*. Its prompt can be deferred to a long round,
in which `num_generations` candidates are decoded to their end, as with GRPO. Long rounds are expensive, so they also
measure for which prompts they help: those whose spread of rewards comes from long answers more often than by chance.

Invariant (`tests/policy/test_deferral.py`): if rewards don't depend on lengths, the expected gain of a group is 0.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


GATE = 0.05  # smallest gain at which a prompt is deferred
EXPLORED = 0.03  # share of the other unsettled groups that are deferred too, to keep measuring
CUT_OFF = 0.03  # largest share of truncated answers at which rollouts are still bounded
WAITING_ROUNDS = 5  # rounds with more before a warning: the first one is always decoded to its end
MEMORY = 0.8  # weight of earlier observations in the moving averages
PRIOR_GROUPS, PRIOR_GAIN = 20.0, 4.0  # pseudo-observations: groups of long rounds, and their total gain
MEAN_WEIGHT = 3.0  # groups for which all prompts' mean counts in a prompt's estimate: one group alone tells little


def gain_of_length(rewards: Sequence[float], lengths: Sequence[int], usual_length: float) -> float:
    """
    Returns what long answers add to a group, of shape `(M,)`: 1 if its rewards have a spread and those of its rows
    with at most `usual_length` tokens have none, minus the probability of this for as many rows drawn at random. Rows
    without a reward (NaN) don't count, as in TRL's advantages.
    """
    known = [(round(r, 6), length) for r, length in zip(rewards, lengths, strict=True) if not math.isnan(r)]
    counts = Counter(reward for reward, _ in known)
    if len(counts) < 2:
        return 0.0
    short = [reward for reward, length in known if length <= usual_length]
    num_uniform = sum(math.comb(count, len(short)) for count in counts.values())
    chance = num_uniform / math.comb(len(known), len(short)) if short else 1.0
    return (len(set(short)) < 2) - chance


@dataclass
class LongRewards:
    """Estimates for which prompts only long rounds give different rewards, see [`gain_of_length`]."""

    num_groups: float = PRIOR_GROUPS
    total_gain: float = PRIOR_GAIN
    by_prompt: dict[int, tuple[float, float]] = field(default_factory=dict)  # groups and gain, by `PromptInfo.key`
    usual_length: float = 0.0  # average number of tokens at which a short round ends
    cut_off_share: float | None = None  # share of truncated answers in long rounds; `None` before the first
    deferred_share: float = 0.0  # expected share of the groups of a short round that are deferred
    num_waiting: int = 0  # rounds in a row after which `waits_for_all` held
    warned: bool = False

    def expected_gain(self, key: int) -> float:
        """Returns the expected gain of a long round for a prompt, shrunk towards all prompts' mean."""
        groups, gain = self.by_prompt.get(key, (0.0, 0.0))
        return (gain + MEAN_WEIGHT * self.total_gain / self.num_groups) / (groups + MEAN_WEIGHT)

    def defers(self, key: int, entry_id: int) -> bool:
        """Whether to defer an unsettled group. The result for an entry is reproducible, also after a resume."""
        return self.expected_gain(key) > GATE or random.Random(entry_id).random() < EXPLORED

    @property
    def waits_for_all(self) -> bool:
        """Whether all rollouts are decoded to their end: the share of truncated answers is unknown or large."""
        return self.cut_off_share is None or self.cut_off_share > CUT_OFF

    def observe_short(self, length: float, num_deferred: int, num_groups: int) -> None:
        """Learns the length at which a short round ended, and how many of its groups were deferred."""
        self.usual_length = MEMORY * self.usual_length + (1 - MEMORY) * length if self.usual_length else length
        if num_groups:
            self.deferred_share = MEMORY * self.deferred_share + (1 - MEMORY) * num_deferred / num_groups

    def observe_long(self, key: int, rewards: Sequence[float], lengths: Sequence[int]) -> None:
        """Learns from the rows of a group of a long round, of shape `(M,)`. Needs a short round before."""
        gain = gain_of_length(rewards, lengths, self.usual_length)
        groups, known = self.by_prompt.get(key, (0.0, 0.0))
        self.by_prompt[key] = MEMORY * groups + 1, MEMORY * known + gain
        self.num_groups, self.total_gain = self.num_groups + 1, self.total_gain + gain

    def observe_ends(self, num_cut_off: int, num_rows: int, num_uniform: int, num_groups: int) -> None:
        """
        Learns how many rows of a round that was decoded to its end are truncated. How many of its groups have equal
        rewards is what the first short round is expected to defer.
        """
        if num_rows:
            share = num_cut_off / num_rows
            known = self.cut_off_share
            self.cut_off_share = share if known is None else MEMORY * known + (1 - MEMORY) * share
            self.num_waiting = self.num_waiting + 1 if self.waits_for_all else 0
        if num_groups and not self.usual_length:
            self.deferred_share = num_uniform / num_groups

    def pop_warning(self) -> str | None:
        """Returns a warning, once, if rollouts were not bounded for `WAITING_ROUNDS` rounds in a row."""
        if self.warned or self.num_waiting < WAITING_ROUNDS:
            return None
        self.warned = True
        return (
            f"{self.cut_off_share:.1%} of the answers reach `max_completion_length`, more than {CUT_OFF:.0%} in "
            f"{self.num_waiting} rollouts: each waits for all of its answers and samples no spare candidates, as with "
            "`schedule='grpo'`. Raise `max_completion_length`, or set `defer_unsettled_groups=False` if long answers "
            "don't matter."
        )

    def num_started(self, num_groups: int) -> int:
        """Returns how many prompts to start for `num_groups` groups that are not deferred: at most twice as many."""
        return round(num_groups / (1 - min(self.deferred_share, 0.5)))

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_prompt": [[key, *known] for key, known in self.by_prompt.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.by_prompt = {key: (groups, gain) for key, groups, gain in state["by_prompt"]}
