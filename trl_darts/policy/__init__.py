"""
The papers' maths: selection of candidates, their number, the latency model, and statistics of response lengths.

Uses NumPy and the standard library only; fitting a latency loads scipy. Results depend on arguments and observations
only: nothing here reads a clock or uses a shared random generator.
"""

from .allocation import allocate_redundancy
from .budget import BudgetController, redundancy_budget
from .censoring import GroupMoments, group_moments
from .forecast import EngineTimes, Forecast, Layout, TailTimes, remaining_lengths
from .latency import LatencyCurve, rollout_time
from .latency_profile import DecodePoint, HeldOutError, LatencyProfile, PrefillCurve, PrefillPoint
from .latency_surface import LatencySurface
from .lengths import LengthTracker, PromptLengthPrior
from .selection import select_dual_end, select_shortest


__all__ = [
    "BudgetController",
    "DecodePoint",
    "EngineTimes",
    "Forecast",
    "GroupMoments",
    "HeldOutError",
    "LatencyCurve",
    "LatencyProfile",
    "LatencySurface",
    "Layout",
    "LengthTracker",
    "PrefillCurve",
    "PrefillPoint",
    "PromptLengthPrior",
    "TailTimes",
    "allocate_redundancy",
    "group_moments",
    "redundancy_budget",
    "remaining_lengths",
    "rollout_time",
    "select_dual_end",
    "select_shortest",
]
