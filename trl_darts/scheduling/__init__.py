"""Decisions about rollouts, without I/O: the scheduler, its policies and the ledger they read."""

from .admission import Admission, AdmissionPolicy, PromptInfo, UniformAdmission, VarianceAdmission, prompt_key
from .events import (
    Abort,
    CandidateEnded,
    CandidateFailed,
    Command,
    EngineJoined,
    EngineLost,
    EngineResized,
    Event,
    RolloutExpired,
    Submit,
    TokensArrived,
)
from .placement import AssignedPlacement, LongestFirst, balance, known_lengths
from .policies import AllGroups, BatchStop, DualEnd, GroupStop, LeastLoaded, Placement, SchedulePolicies, WaitForAll
from .scheduler import Scheduler
from .schedules import SCHEDULES, make_policies
from .settings import ScheduleSettings
from .summary import GroupSummary, Occupancy, bubble_ratio
from .types import (
    Candidate,
    CandidateState,
    EngineLoad,
    FinishReason,
    Group,
    GroupPlan,
    GroupResult,
    PartialCandidate,
    RolloutResult,
    Timeline,
)


__all__ = [
    "SCHEDULES",
    "Abort",
    "Admission",
    "AdmissionPolicy",
    "AllGroups",
    "AssignedPlacement",
    "BatchStop",
    "Candidate",
    "CandidateEnded",
    "CandidateFailed",
    "CandidateState",
    "Command",
    "DualEnd",
    "EngineJoined",
    "EngineLoad",
    "EngineLost",
    "EngineResized",
    "Event",
    "FinishReason",
    "Group",
    "GroupPlan",
    "GroupResult",
    "GroupStop",
    "GroupSummary",
    "LeastLoaded",
    "LongestFirst",
    "Occupancy",
    "PartialCandidate",
    "Placement",
    "PromptInfo",
    "RolloutExpired",
    "RolloutResult",
    "SchedulePolicies",
    "ScheduleSettings",
    "Scheduler",
    "Submit",
    "Timeline",
    "TokensArrived",
    "UniformAdmission",
    "VarianceAdmission",
    "WaitForAll",
    "balance",
    "bubble_ratio",
    "known_lengths",
    "make_policies",
    "prompt_key",
]
