"""Simulates trainings in virtual time: the trainer's scheduler and policies on engines that only count tokens."""

from ..estimates import Estimate
from .cluster import SimulatedCluster
from .cluster_spec import ASSUMED_CLUSTER, LLAMA_8B_NIM, PAT_CLUSTER, ClusterSpec
from .comparison import Outcome, compare
from .recorded import RecordedRollout, RecordedRun
from .run import SimulatedRun
from .sweep import parse_sweep, settings_of
from .training import SimulatedTraining
from .workload import ENDLESS, WORKLOADS, LengthModel, LogNormalLengths, RecordedLengths, ToolCalls, Workload


__all__ = [
    "ASSUMED_CLUSTER",
    "ENDLESS",
    "LLAMA_8B_NIM",
    "PAT_CLUSTER",
    "WORKLOADS",
    "ClusterSpec",
    "Estimate",
    "LengthModel",
    "LogNormalLengths",
    "Outcome",
    "RecordedLengths",
    "RecordedRollout",
    "RecordedRun",
    "SimulatedCluster",
    "SimulatedRun",
    "SimulatedTraining",
    "ToolCalls",
    "Workload",
    "compare",
    "parse_sweep",
    "settings_of",
]
