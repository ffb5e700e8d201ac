"""A simulated cluster that a budget controller is tried on."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trl_darts.policy import BudgetController, LatencyCurve


M, M_UP, N = 8, 16, 64
TARGET = int(1.5 * N * M)
CURVE = LatencyCurve([1, 64, 256, 1024], [0.010, 0.012, 0.025, 0.085])


@dataclass
class Cluster:
    """Rollouts whose time is k·M + c, with noise: what Eq. 6 assumes."""

    k: float = 0.01
    c: float = 8.0
    noise: float = 0.05
    seed: int = 0
    warm_up: float = 1.0
    lengths_median: float = 400.0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def run(
        self, controller: BudgetController, num_steps: int, rho: float = 0.9, num_prompts: int = N
    ) -> Iterator[int]:
        for _ in range(num_steps):
            total = controller.total(num_prompts, rho)
            seconds = (self.k * total + self.c) * math.exp(self.noise * self.rng.standard_normal()) * self.warm_up
            self.warm_up = 1.0
            controller.observe(total, seconds, self.rng.lognormal(math.log(self.lengths_median), 1, total).astype(int))
            yield total


def mean(totals: Iterator[int]) -> float:
    return statistics.fmean(totals)


def calibrated(cluster: Cluster, **kwargs: object) -> tuple[BudgetController, float]:
    controller = BudgetController(M, M_UP, **kwargs)  # type: ignore[arg-type]
    list(cluster.run(controller, 8))
    return controller, mean(cluster.run(controller, 60))
