"""Summary of a rollout without its tokens: lengths, finish reasons and selections per group, and occupancy."""

from dataclasses import dataclass, field

import numpy as np

from .types import FinishReason, GroupResult, RolloutResult


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """
    A group without its tokens. `times` has each candidate's first submission and end in seconds on the engine's clock.
    They are equal for a candidate that was aborted before its submission.
    """

    group_id: int
    prompt_key: int
    lengths: list[int]  # (M'_i,), including aborted ones
    finish_reasons: list[str]  # (M'_i,), the values of `FinishReason`
    selected: list[int]  # (M,)
    num_prompt_tokens: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)  # (M'_i, 2)
    carried: list[int] = field(default_factory=list)  # (M'_i,), tokens from an earlier rollout; empty if none
    expected_length: float | None = None
    # (M'_i, runs), which version of the weights sampled how many tokens; empty if they did not change meanwhile
    versions: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    @classmethod
    def of(cls, group: GroupResult) -> "GroupSummary":
        resumed = [len(partial.tokens) for partial in group.plan.resumed]  # these come first
        return cls(
            group_id=group.plan.group_id,
            prompt_key=group.plan.prompt_key,
            lengths=[len(c.tokens) for c in group.candidates],
            finish_reasons=[str(c.finish_reason or FinishReason.ABORT) for c in group.candidates],
            selected=group.selected,
            num_prompt_tokens=group.plan.num_prompt_tokens,
            times=[((c.ended if c.started is None else c.started) or 0.0, c.ended or 0.0) for c in group.candidates],
            carried=resumed and resumed + [0] * (len(group.candidates) - len(resumed)),
            expected_length=group.plan.expected_length,
            versions=[c.versions for c in group.candidates] if any(c.stamps for c in group.candidates) else [],
        )

    @property
    def num_carried_tokens(self) -> int:
        return sum(self.carried)

    @property
    def censored(self) -> list[bool]:
        """Whether each candidate's length is only a lower bound."""
        return [reason != FinishReason.STOP for reason in self.finish_reasons]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of the engines."""

    peak: int  # most candidates running at once
    area: float  # running candidates integrated over time, in candidate-seconds
    seconds: float  # from the first submission to the last end

    @classmethod
    def of(cls, result: RolloutResult) -> "Occupancy":
        times, running = np.asarray(result.timeline.times), np.asarray(result.timeline.running)
        if not len(times):
            return cls(0, 0.0, 0.0)
        area = float(running[:-1] @ np.diff(times))
        return cls(int(running.max()), area, float(times[-1] - times[0]))

    def then(self, later: "Occupancy") -> "Occupancy":
        """Returns the occupancy of two consecutive rollouts."""
        return Occupancy(max(self.peak, later.peak), self.area + later.area, self.seconds + later.seconds)


def bubble_ratio(occupancy: Occupancy) -> float:
    """
    Returns the share of idle decoding slots (SortedRL, Eq. 4), between 0 and 1; 0 for an empty rollout. The queue size
    Q of the equation is the peak number of running candidates over all engines.
    """
    slots = occupancy.peak * occupancy.seconds
    return 1.0 - occupancy.area / slots if slots > 0 else 0.0
