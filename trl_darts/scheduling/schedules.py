"""The table of schedules: which object makes each decision. One row per published system."""

from collections.abc import Callable

from ..errors import ConfigurationError
from .policies import DualEnd, SchedulePolicies, WaitForAll


def _grpo(**_: object) -> SchedulePolicies:
    return SchedulePolicies(group_stop=WaitForAll())


def _darts(
    num_generations: int,
    max_num_generations: int,
    num_longest: int,
    tail_pruning: bool,
    long_end_patience: float | None,
) -> SchedulePolicies:
    return SchedulePolicies(
        group_stop=DualEnd(num_generations, max_num_generations, num_longest, tail_pruning, long_end_patience)
    )


SCHEDULES: dict[str, Callable[..., SchedulePolicies]] = {"grpo": _grpo, "darts": _darts}


def make_policies(
    schedule: str,
    num_generations: int,
    max_num_generations: int,
    num_longest: int,
    tail_pruning: bool = True,
    long_end_patience: float | None = None,
) -> SchedulePolicies:
    """
    The policies of a schedule.

    Args:
        schedule (`str`):
            Name of the row: `"grpo"` or `"darts"`.
        num_generations (`int`):
            M, the rows that each group yields.
        max_num_generations (`int`):
            M_up, the most candidates of a group.
        num_longest (`int`):
            L, how many rows are the longest complete ones.
        tail_pruning (`bool`, *optional*, defaults to `True`):
            Whether a group with M_up candidates stops at its M-th complete one.
        long_end_patience (`float`, *optional*):
            Bound on the wait for the long end, see [`DualEnd`].

    Returns:
        [`SchedulePolicies`]: One object per decision.

    Raises:
        [`ConfigurationError`]: If the schedule is unknown.
    """
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"`schedule` ({schedule!r}) must be one of {', '.join(map(repr, SCHEDULES))}.")
    return SCHEDULES[schedule](
        num_generations=num_generations,
        max_num_generations=max_num_generations,
        num_longest=num_longest,
        tail_pruning=tail_pruning,
        long_end_patience=long_end_patience,
    )
