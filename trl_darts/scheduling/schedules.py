"""The table of schedules: which object makes each decision. One row per published system."""

from ..errors import ConfigurationError
from .policies import DualEnd, GroupStop, Patience, SchedulePolicies, UniformPool, WaitForAll


# What each schedule keeps of a prompt's candidates, unless `selection` says something else.
SCHEDULES = {
    "grpo": "all",
    "darts": "dual_end",
    "tail_batching": "all",
    "partial_rollout": "all",
    "sorted": "all",
}
SELECTIONS = ("dual_end", "uniform", "all")


def check_choice(name: str, value: object, choices: object) -> None:
    """[`ConfigurationError`] unless a setting is one of its choices."""
    if value not in list(choices):  # type: ignore[call-overload]
        raise ConfigurationError(f"`{name}` ({value!r}) must be one of {', '.join(map(repr, choices))}.")  # type: ignore[call-overload]


def make_policies(
    schedule: str,
    num_generations: int,
    max_num_generations: int,
    num_longest: int,
    tail_pruning: bool = True,
    long_end_patience: Patience = None,
    selection: str | None = None,
) -> SchedulePolicies:
    """
    The policies of a schedule within one rollout. Which prompts go into it, and how many of them it waits for, is the
    business of its [`RoundPolicy`].

    Args:
        schedule (`str`):
            Name of the row: `"darts"`, `"grpo"`, `"tail_batching"`, `"partial_rollout"` or `"sorted"`.
        num_generations (`int`):
            M, the rows that each group yields.
        max_num_generations (`int`):
            M_up, the most candidates of a group.
        num_longest (`int`):
            L, how many rows are the longest complete ones.
        tail_pruning (`bool`, *optional*, defaults to `True`):
            Whether a group with M_up candidates stops at its M-th complete one.
        long_end_patience (`float` or `"auto"`, *optional*):
            Bound on the wait for the long end, see [`DualEnd`]. Defaults to `None`, unlike the config's `"auto"`.
        selection (`str`, *optional*):
            What is kept of a group's candidates: `"dual_end"`, `"uniform"` or `"all"`. Defaults to the schedule's own.

    Returns:
        [`SchedulePolicies`]: One object per decision.

    Raises:
        [`ConfigurationError`]: If the schedule or the selection is unknown.
    """
    check_choice("schedule", schedule, SCHEDULES)
    selection = selection or SCHEDULES[schedule]
    check_choice("selection", selection, SELECTIONS)
    stop: GroupStop = WaitForAll()
    if selection != "all":
        kind = DualEnd if selection == "dual_end" else UniformPool
        stop = kind(num_generations, max_num_generations, num_longest, tail_pruning, long_end_patience)
    return SchedulePolicies(group_stop=stop)
