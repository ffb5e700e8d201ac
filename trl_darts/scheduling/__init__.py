"""Decisions about rollouts, without I/O: the scheduler, its policies and the ledger they read."""

from .admission import Admission, AdmissionPolicy, PromptInfo, UniformAdmission, VarianceAdmission, prompt_key
from .placement import AssignedPlacement, balance
from .policies import AllGroups, BatchStop, DualEnd, GroupStop, LeastLoaded, Placement, SchedulePolicies, WaitForAll
from .scheduler import Scheduler
from .schedules import SCHEDULES, make_policies
from .summary import GroupSummary, Occupancy, bubble_ratio
from .types import (
    Abort,
    Candidate,
    CandidateEnded,
    CandidateFailed,
    CandidateState,
    Command,
    EngineJoined,
    EngineLoad,
    EngineLost,
    Event,
    FinishReason,
    Group,
    GroupPlan,
    GroupResult,
    PartialCandidate,
    RolloutResult,
    Submit,
    Timeline,
    TokensArrived,
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
    "Event",
    "FinishReason",
    "Group",
    "GroupPlan",
    "GroupResult",
    "GroupStop",
    "GroupSummary",
    "LeastLoaded",
    "Occupancy",
    "PartialCandidate",
    "Placement",
    "PromptInfo",
    "RolloutResult",
    "SchedulePolicies",
    "Scheduler",
    "Submit",
    "Timeline",
    "TokensArrived",
    "UniformAdmission",
    "VarianceAdmission",
    "WaitForAll",
    "balance",
    "bubble_ratio",
    "make_policies",
    "prompt_key",
]
