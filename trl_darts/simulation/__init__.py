"""Training in virtual time: the same scheduler and policies on engines that only count."""

from .cluster import SimulatedCluster
from .engine import ClusterSpec
from .lengths import ENDLESS, LengthModel, LogNormalLengths, RecordedLengths
from .replay import RecordedRollout, recorded_rollouts
from .steps import SimulatedRun
from .training import SimulatedTraining
from .workload import Workload


__all__ = [
    "ENDLESS",
    "ClusterSpec",
    "LengthModel",
    "LogNormalLengths",
    "RecordedLengths",
    "RecordedRollout",
    "SimulatedCluster",
    "SimulatedRun",
    "SimulatedTraining",
    "Workload",
    "recorded_rollouts",
]
