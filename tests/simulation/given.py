"""Workloads whose lengths are given, prompt by prompt, so that a training can be computed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings
from trl_darts.analysis.simulation import ClusterSpec, SimulatedRun, SimulatedTraining, Workload


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


def train_given(
    lengths: GivenLengths, settings: ScheduleSettings, num_steps: int, num_groups: int = 2, limit: int = 10_000, **more
) -> SimulatedRun:
    """A token takes a second, however many run at once. `more` are limits of the engine."""
    redraws = more.pop("redraws", False)
    workload = InOrder(lengths, num_groups, limit, redraws=redraws)
    return SimulatedTraining(workload, settings, ClusterSpec(SECOND_PER_TOKEN, **more)).run(num_steps)
