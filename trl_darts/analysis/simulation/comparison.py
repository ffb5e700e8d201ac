"""Several settings on the same workload, seed by seed, and what can be said of the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ...errors import ConfigurationError
from ...scheduling import ScheduleSettings
from .engine import ClusterSpec
from .training import SimulatedRun, SimulatedTraining
from .workload import Workload


def half_width(standard_error: float, degrees: int) -> float:
    """Half of a 95 % interval, by Student's t; infinity where nothing is known of the error."""
    from scipy.special import stdtrit  # takes a third of a second to import, for which `--help` should not wait

    return float(stdtrit(degrees, 0.975) * standard_error) if degrees > 0 else math.inf


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half of its 95 % confidence interval: infinity for a single seed."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From one value per seed, with Student's t."""
        mean, num = float(np.mean(values)), len(values)
        if num == 1:
            return cls(mean, math.inf)
        return cls(mean, half_width(float(np.std(values, ddof=1)) / math.sqrt(num), num - 1))

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if math.isinf(self.half_width) else f"{self.mean:.3g} ± {self.half_width:.2g}"


@dataclass(frozen=True)
class Outcome:
    """One setting over all seeds."""

    name: str
    runs: list[SimulatedRun]  # one per seed
    # Seconds of the baseline over those of this setting, seed by seed: of a step, or, where some groups teach nothing,
    # per group that does. The i-th candidate of a prompt was the same for both in each epoch, if both started it.
    speedups: list[float]

    @property
    def speedup(self) -> Estimate:
        """Seconds of the baseline over those of this setting."""
        return Estimate.of(self.speedups)

    def estimate(self, quantity: str) -> Estimate:
        """The mean over the steps of a quantity of [`SimulatedRun`], where it is known."""
        return Estimate.of([float(np.nanmean(getattr(run, quantity))) for run in self.runs])

    @property
    def wasted_share(self) -> Estimate:
        """Tokens that nobody trains on, over all tokens. Those that still may be trained on count as kept."""
        kept = [sum(run.kept_tokens) + run.buffered_tokens[-1] for run in self.runs]
        return Estimate.of([1 - own / sum(run.pool_tokens) for own, run in zip(kept, self.runs, strict=True)])

    @property
    def batch_length_spread(self) -> Estimate:
        """How much the mean length of a batch's rows differs from batch to batch: its coefficient of variation."""
        return Estimate.of([float(np.std(run.mean_kept) / np.mean(run.mean_kept)) for run in self.runs])

    @property
    def off_policy_share(self) -> Estimate:
        """Tokens that an older policy sampled, over all that are trained on."""
        stale = [float(np.dot(run.off_policy_share, run.kept_tokens)) for run in self.runs]
        return Estimate.of([own / sum(run.kept_tokens) for own, run in zip(stale, self.runs, strict=True)])

    @property
    def longest_wait(self) -> float:
        """Steps that a prompt waited for after its first candidate was started, for the one that waited longest."""
        return max(max(run.longest_wait) for run in self.runs)

    def row(self) -> dict[str, float | str]:
        """
        All that is known of it, as a row of a table.

        A quantity that has a property of its own here is that, and not the mean over the steps. `longest_wait`, a
        maximum, has no interval.
        """
        row: dict[str, float | str] = {"setting": self.name, "longest_wait": self.longest_wait}
        derived = {
            "speedup": self.speedup,
            "wasted_share": self.wasted_share,
            "batch_length_spread": self.batch_length_spread,
            "off_policy_share": self.off_policy_share,
        }
        means = (field.name for field in fields(SimulatedRun) if field.name not in {*row, *derived})
        for name, estimate in (derived | {name: self.estimate(name) for name in means}).items():
            row[name], row[f"{name}_ci95"] = estimate.mean, estimate.half_width
        return row


def compare(
    workload: Workload,
    settings: Mapping[str, ScheduleSettings],
    cluster: ClusterSpec,
    num_steps: int,
    num_seeds: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """
    Trains with each setting, on the same prompts and candidates.

    Args:
        workload ([`Workload`]):
            What is trained on.
        settings (`Mapping[str, ScheduleSettings]`):
            By name. The first is the baseline.
        cluster ([`ClusterSpec`]):
            What decodes.
        num_steps (`int`):
            Steps of each training.
        num_seeds (`int`):
            Trainings of each setting.
        on_run (`Callable`, *optional*):
            Called after each training.

    Returns:
        `list[Outcome]`: In the order of `settings`.

    Raises:
        [`ConfigurationError`]: If there is no setting, no step or no seed.
    """
    if not settings or num_seeds < 1:
        raise ConfigurationError(f"`settings` ({len(settings)}) and `num_seeds` ({num_seeds}) must be at least 1.")
    runs: dict[str, list[SimulatedRun]] = {name: [] for name in settings}
    for seed in range(num_seeds):
        for name, setting in settings.items():
            runs[name].append(SimulatedTraining(workload, setting, cluster, seed).run(num_steps))
            on_run()
    per_group = workload.uniform_share > 0
    seconds = {
        name: [sum(run.step_seconds) / (sum(run.informative_groups) if per_group else 1) for run in own]
        for name, own in runs.items()
    }
    baseline = next(iter(seconds.values()))
    return [
        Outcome(name, own, [base / mine for base, mine in zip(baseline, seconds[name], strict=True)])
        for name, own in runs.items()
    ]
