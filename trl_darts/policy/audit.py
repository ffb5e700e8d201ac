"""
Measures what a bounded wait loses, on groups of random prompts whose candidates all decode to their end. A rollout
that aborts candidates can't tell what they would have been worth; an audited group can.

Invariants: an estimate depends on audited groups alone; without selection (all candidates kept) nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .deferral import CUT_OFF
from .selection import select_dual_end


MAX_GROUPS = 1000  # the newest count, because the policy moves
# A warning compares two hypotheses: lengths say nothing about rewards, or they multiply the odds of a loss by this.
LOSS_ODDS = 5.0
# Probability of a warning where lengths say nothing, within `MAX_GROUPS` groups, however often they are looked at.
FALSE_ALARMS = 0.01
# A warning of truncated answers takes as many groups, and standard errors above `CUT_OFF`.
LEAST_GROUPS, SURE = 20, 3.0
Z_95 = 1.96


class AuditedGroup(NamedTuple):
    """What one audited group showed. Lengths are in tokens."""

    lost: float  # 1 if its best reward is in the pool and the bounded wait keeps no row with it, else 0
    lost_at_random: float  # the probability of the same with as many rows drawn at random
    kept_length: float
    plain_length: float
    kept_reward: float
    plain_reward: float
    truncated: float  # share of its answers


@dataclass(frozen=True)
class BoundedWait:
    """The selection whose loss is measured, in the terms of [`~trl_darts.scheduling.DualEnd`]."""

    num_kept: int  # M
    num_longest: int  # L
    saturates_at: float  # candidates from which on a prompt stops at its M-th complete one
    patience: float | None = None  # multiple of the M-th shortest length; `None` if groups wait as long as the batch

    def kept(self, lengths: Sequence[int], ended: Sequence[bool], usual_length: float) -> list[int]:
        """
        Returns the rows that would have been kept of candidates that were all decoded to their end. `ended` is `False`
        for those that were cut off at the limit. The batch would have been ready after `usual_length` tokens.
        """
        complete = sorted(length for length, whole in zip(lengths, ended, strict=True) if whole)
        bound = complete[self.num_kept - 1] if len(complete) >= self.num_kept else math.inf
        saturated = len(lengths) >= self.saturates_at
        if not saturated:
            bound = max(bound, usual_length) if self.patience is None else bound * self.patience
        in_time = [whole and length <= bound for length, whole in zip(lengths, ended, strict=True)]
        num_longest = 0 if saturated else self.num_longest
        return select_dual_end(lengths, in_time, self.num_kept - num_longest, num_longest)

    def audit(
        self,
        lengths: Sequence[int],
        ended: Sequence[bool],
        rewards: Sequence[float],
        usual_length: float,
        num_candidates: int,
    ) -> AuditedGroup:
        """
        Compares the rows that would have been kept of the first `num_candidates` with plain sampling, which all
        candidates show. `rewards` are NaN where they are unknown.
        """
        kept = self.kept(lengths[:num_candidates], ended[:num_candidates], usual_length)
        values = np.array(rewards, np.float64)
        best = values[:num_candidates] == values[:num_candidates].max()
        has_spread = values.max() > values.min()
        at_random = math.comb(num_candidates - int(best.sum()), self.num_kept) / math.comb(
            num_candidates, self.num_kept
        )
        return AuditedGroup(
            lost=float(has_spread and not best[kept].any()),
            lost_at_random=at_random if has_spread else 0.0,
            kept_length=float(np.mean([lengths[i] for i in kept])),
            plain_length=float(np.mean(lengths)),
            kept_reward=float(values[kept].mean()),
            plain_reward=float(values.mean()),
            truncated=1 - float(np.mean(ended)),
        )


@dataclass
class Audits:
    """The audited groups of a training, and what they tell."""

    groups: list[AuditedGroup] = field(default_factory=list)
    warned: bool = False

    def observe(self, group: AuditedGroup) -> None:
        """Adds a group, unless its rewards are unknown."""
        if not any(map(math.isnan, group)):
            self.groups = [*self.groups[1 - MAX_GROUPS :], group]

    def metrics(self) -> dict[str, float]:
        """Returns the estimates, and half of their 95 % intervals under names with `_interval`."""
        if len(self.groups) < 2:
            return {}
        lost, random, kept, plain, kept_reward, plain_reward, truncated = np.array(self.groups).T
        ratio = kept.mean() / plain.mean()
        found = {
            "lost_share": (lost.mean(), _error(lost)),
            "lost_share_at_random": (random.mean(), _error(random)),
            "length_mean_ratio": (ratio, _error(kept - ratio * plain) / plain.mean()),
            "reward_gap": (np.mean(kept_reward - plain_reward), _error(kept_reward - plain_reward)),
            "truncated_share": (truncated.mean(), _error(truncated)),
        }
        metrics = {"groups": float(len(lost))}
        for name, (estimate, error) in found.items():
            metrics |= {name: float(estimate), f"{name}_interval": float(Z_95 * error)}
        return metrics

    def log_evidence(self) -> float:
        """
        Returns the logarithm of the likelihood ratio of the two hypotheses. If lengths say nothing about rewards, any
        rows of a group are as likely to be kept, so `lost_at_random` is the exact probability of its loss, the ratio's
        expectation is 1 after every group, and it ever exceeds 1 / p with a probability of at most p (Ville's
        inequality).
        """
        return sum(
            group.lost * math.log(LOSS_ODDS) - math.log1p((LOSS_ODDS - 1) * group.lost_at_random)
            for group in self.groups
        )

    def pop_warning(self) -> str | None:
        """Returns a warning the first time that more is lost than chance explains, or many answers are truncated."""
        if self.warned:
            return None
        warning = self._loss() or self._truncation()
        self.warned = warning is not None
        return warning

    def _loss(self) -> str | None:
        if self.log_evidence() < -math.log(FALSE_ALARMS):
            return None
        lost, random, *_ = np.array(self.groups).T
        return (
            f"The bounded wait loses what long answers teach: of {len(lost)} audited groups, {lost.mean():.1%} have a "
            f"best answer of which no row is kept, and {random.mean():.1%} would with rows drawn at random. Set "
            "`defer_unsettled_groups=True`, which samples such prompts again to their end, or "
            "`long_end_patience=None`, which waits for all answers."
        )

    def _truncation(self) -> str | None:
        shares = np.array([group.truncated for group in self.groups])
        if len(shares) < LEAST_GROUPS or shares.mean() - SURE * _error(shares) <= CUT_OFF:
            return None
        return (
            f"The bounded wait aborts answers that should be unlearned: in {len(shares)} audited groups, "
            f"{shares.mean():.1%} of the answers are truncated, and the rows that are trained on hardly show it. Set "
            f"`defer_unsettled_groups=True`, which waits for all answers while more than {CUT_OFF:.0%} of them are "
            "truncated, or `long_end_patience=None`, which always does."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"groups": [list(group) for group in self.groups], "warned": self.warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups, self.warned = [AuditedGroup(*group) for group in state["groups"]], state["warned"]


def _error(values: np.ndarray) -> float:
    """Returns the standard error of the mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))
