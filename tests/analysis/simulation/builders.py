"""Workloads whose lengths are given, so that a training can be computed by hand, and runs whose truth is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trl_darts.analysis.simulation import ClusterSpec, SimulatedRun, SimulatedTraining, Workload
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import GroupSummary, Occupancy, ScheduleSettings
from trl_darts.telemetry.metrics import RolloutRecord
from trl_darts.telemetry.run_log import append_entry
from trl_darts.telemetry.traces import write_trace


SECOND_PER_TOKEN = LatencyCurve([1], [1.0])


@dataclass(frozen=True)
class GivenLengths:
    """Of each prompt's candidates in their first attempt, and in further ones; a prompt has all that it may get."""

    first: Sequence[Sequence[int]]
    again: Sequence[Sequence[int]] = ()

    @property
    def num_prompts(self) -> int:
        return len(self.first)

    def draw(self, prompts, num_candidates, seed):
        lengths = self.again if len(seed) > 2 else self.first
        return np.array([lengths[prompt][:num_candidates] for prompt in prompts], np.int64)


class InOrder(Workload):
    """All epochs have the prompts in the order in which they are given."""

    def epochs(self, seed: int) -> Iterator[list[np.ndarray]]:
        while True:
            yield list(np.arange(self.lengths.num_prompts).reshape(-1, self.prompts_per_step))


def train_given(lengths: GivenLengths, settings: ScheduleSettings, num_steps: int, **more) -> SimulatedRun:
    """In batches of two prompts; a token takes a second, however many run at once. `more` are limits of the engine."""
    workload = InOrder(lengths, 2, 10_000, redraws=more.pop("redraws", False))
    return SimulatedTraining(workload, settings, ClusterSpec(SECOND_PER_TOKEN, **more)).run(num_steps)


def outcome(result) -> list:
    """What a rollout kept, and how each candidate ended."""
    return [(g.selected, [(c.length, c.finish_reason) for c in g.candidates]) for g in result.groups]


def end_of(result) -> float:
    assert result.timeline.running[-1] == 0
    return result.timeline.times[-1]


def record(
    directory: Path, settings: ScheduleSettings, workload: Workload, spec: ClusterSpec, steps: int
) -> SimulatedRun:
    """A simulated training leaves the traces and the log of a real one. Returns the truth."""
    training = SimulatedTraining(workload, settings, spec)
    run, records = training.cluster.run, []

    def recorded(*args):
        result = run(*args)
        groups, deferred = ([GroupSummary.of(group) for group in own] for own in (result.groups, result.deferred))
        more = {"deferred": deferred, "carries_over": settings.keeps_tokens}
        records.append(RolloutRecord(None, groups, Occupancy.of(result), settings.num_generations, **more))
        return result

    training.cluster.run = recorded
    truth = training.run(steps)
    header = {"name": directory.name, "model": "some/Tiny-1B", "schedule": settings.schedule}
    append_entry(directory, {"run": {**header, "max_completion_length": workload.max_completion_length}})
    for step, own in enumerate(records):
        write_trace(directory, step, 0, own.groups, own.carried_over)
        seconds = {"step_time": own.seconds + 1, "darts/rollout/seconds": own.seconds, "darts/score/seconds": 0.5}
        append_entry(directory, {"step": step + 1, "reward": 0.5, **seconds})
    return truth
