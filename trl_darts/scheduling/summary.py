"""What is remembered of a rollout once its tokens are gone: lengths, ends and choices per group, and occupancy."""

from dataclasses import dataclass, field

import numpy as np

from .types import FinishReason, GroupResult, RolloutResult


# A look-up by the member is faster than its `value`, before Python 3.12.
_WORDS: dict[FinishReason | None, str] = {
    None: FinishReason.ABORT.value,
    **{reason: reason.value for reason in FinishReason},
}
_STOP = FinishReason.STOP.value


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """
    A group without its tokens.

    Args:
        group_id (`int`):
            Identity within the rollout.
        prompt_key (`int`):
            Identity of the prompt over the whole training.
        lengths (`list[int]` of shape `(M'_i,)`):
            Tokens sampled for each candidate, also the aborted ones.
        finish_reasons (`list[str]` of shape `(M'_i,)`):
            `"stop"`, `"length"` or `"abort"`.
        selected (`list[int]` of shape `(M,)`):
            Indices of the rows that are trained on.
        num_prompt_tokens (`int`, *optional*, defaults to `0`):
            Length of the prompt.
        times (`list[tuple[float, float]]` of shape `(M'_i, 2)`, *optional*):
            When each candidate was submitted first and when it ended, in seconds on the engine's clock. Equal for one
            that was called off before it was submitted.
        carried (`list[int]` of shape `(M'_i,)`, *optional*):
            How many of each candidate's tokens are of an earlier rollout. Empty for none.
        expected_length (`float`, *optional*):
            Tokens that a candidate was expected to have, where something was known.
    """

    group_id: int
    prompt_key: int
    lengths: list[int]
    finish_reasons: list[str]
    selected: list[int]
    num_prompt_tokens: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    expected_length: float | None = None

    @classmethod
    def of(cls, group: GroupResult) -> "GroupSummary":
        """The summary of a group's result."""
        return cls(
            group_id=group.plan.group_id,
            prompt_key=group.plan.prompt_key,
            lengths=[len(c.tokens) for c in group.candidates],
            finish_reasons=[_WORDS[c.finish_reason] for c in group.candidates],
            selected=group.selected,
            num_prompt_tokens=group.plan.num_prompt_tokens,
            times=[((c.ended if c.started is None else c.started) or 0.0, c.ended or 0.0) for c in group.candidates],
            carried=_carried(group) if group.plan.resumed else [],
            expected_length=group.plan.expected_length,
        )

    @property
    def num_carried_tokens(self) -> int:
        """How many of its tokens are of an earlier rollout."""
        return sum(self.carried)

    @property
    def censored(self) -> list[bool]:
        """For each candidate, whether its length is only a lower bound."""
        return [reason != _STOP for reason in self.finish_reasons]


def _carried(group: GroupResult) -> list[int]:
    resumed = [len(partial.tokens) for partial in group.plan.resumed]  # they have the first indices
    return resumed + [0] * (len(group.candidates) - len(resumed))


@dataclass(frozen=True, slots=True)
class Occupancy:
    """
    How busy the engines were.

    Args:
        peak (`int`):
            Most candidates that ran at once.
        area (`float`):
            Integral of running candidates over time, in candidate-seconds.
        seconds (`float`):
            From the first submission to the last end.
    """

    peak: int
    area: float
    seconds: float

    @classmethod
    def of(cls, result: RolloutResult) -> "Occupancy":
        """Integrates a rollout's occupancy."""
        times, running = np.asarray(result.timeline.times), np.asarray(result.timeline.running)
        if not len(times):
            return cls(0, 0.0, 0.0)
        area = float(running[:-1] @ np.diff(times))
        return cls(int(running.max()), area, float(times[-1] - times[0]))


def bubble_ratio(occupancy: Occupancy) -> float:
    """
    Share of the decoding slots that stood idle (SortedRL, Eq. 4).

    The queue size Q of the equation is the most candidates that ran at once, over all engines.

    Args:
        occupancy ([`Occupancy`]):
            Of a rollout.

    Returns:
        `float`: Between 0 and 1; `0.0` for an empty rollout.
    """
    slots = occupancy.peak * occupancy.seconds
    return 1.0 - occupancy.area / slots if slots > 0 else 0.0
