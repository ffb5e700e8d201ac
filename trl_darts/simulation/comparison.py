"""Several settings on the same workload, seed by seed, and what can be said of the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ..errors import ConfigurationError
from ..scheduling import ScheduleSettings
from .engine import ClusterSpec
from .steps import SimulatedRun
from .training import SimulatedTraining
from .workload import Workload


# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half of its 95 % confidence interval: infinity for a single seed."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """
        From one value per seed.

        Args:
            values (`Sequence[float]`):
                At least one.
        """
        mean, num = float(np.mean(values)), len(values)
        if num == 1:
            return cls(mean, math.inf)
        quantile = _T95[min(num - 1, len(_T95)) - 1]
        return cls(mean, quantile * float(np.std(values, ddof=1)) / math.sqrt(num))

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if math.isinf(self.half_width) else f"{self.mean:.3g} ± {self.half_width:.2g}"


@dataclass(frozen=True)
class Outcome:
    """
    One setting over all seeds.

    Args:
        name (`str`):
            Of the setting.
        settings ([`ScheduleSettings`]):
            The setting.
        runs (`list[SimulatedRun]`):
            One per seed.
        speedups (`list[float]`):
            Seconds of the baseline over those of this setting, seed by seed. Both saw the same candidates.
    """

    name: str
    settings: ScheduleSettings
    runs: list[SimulatedRun]
    speedups: list[float]

    @property
    def speedup(self) -> Estimate:
        """Seconds of the baseline over those of this setting."""
        return Estimate.of(self.speedups)

    def estimate(self, quantity: str) -> Estimate:
        """The mean over the steps of a quantity of [`SimulatedRun`]."""
        return Estimate.of([float(np.mean(getattr(run, quantity))) for run in self.runs])

    @property
    def wasted_share(self) -> Estimate:
        """Tokens that nobody trains on, over all tokens."""
        return Estimate.of([1 - sum(run.kept_tokens) / sum(run.pool_tokens) for run in self.runs])

    def row(self) -> dict[str, float | str]:
        """All that is known of it, as a row of a table."""
        quantities = {f.name: self.estimate(f.name) for f in fields(SimulatedRun)}
        row: dict[str, float | str] = {"setting": self.name}
        for name, estimate in {"speedup": self.speedup, "wasted_share": self.wasted_share, **quantities}.items():
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
    baseline = [sum(run.step_seconds) for run in next(iter(runs.values()))]
    return [
        Outcome(
            name,
            settings[name],
            own,
            [seconds / sum(run.step_seconds) for seconds, run in zip(baseline, own, strict=True)],
        )
        for name, own in runs.items()
    ]


def verdict(outcomes: Sequence[Outcome]) -> str:
    """
    Which setting to take, in words, and when not to.

    Args:
        outcomes (`Sequence[Outcome]`):
            Of [`compare`], the baseline first.

    Returns:
        `str`: One paragraph.
    """
    baseline, *others = outcomes
    if not others:
        seconds = baseline.estimate("step_seconds")
        return f"{baseline.name} takes {seconds} s per step. There is nothing to compare it with."
    best = max(others, key=lambda outcome: outcome.speedup.mean)
    speedup = best.speedup
    if speedup.mean <= 1.0:
        words = (
            f"Stay with {baseline.name}: nothing is faster. The best of the others, {best.name}, is {speedup} times"
        )
        words += " as fast."
        more = best.estimate("candidates").mean / baseline.estimate("candidates").mean
        if more <= 1.0:
            return words
        return f"{words} It samples {more:.2f} times as many candidates, and here its tail is not that much shorter."
    if math.isinf(speedup.half_width):
        return (
            f"{best.name} is the fastest: {speedup} times as fast as {baseline.name}, with one seed. Simulate several "
            "seeds before you believe it."
        )
    if speedup.low <= 1.0:
        return (
            f"{best.name} may be the fastest, {speedup} times as fast as {baseline.name}, but the seeds differ too "
            "much to be sure. Simulate more steps or seeds."
        )
    doubts = []
    if best.settings.num_generations != baseline.settings.num_generations:
        doubts.append(
            f"it trains on {best.settings.num_generations} rows per prompt, and {baseline.name} on "
            f"{baseline.settings.num_generations}"
        )
    ratio = best.estimate("kept_vs_pool_length_ratio")
    if ratio.high < 0.8:
        doubts.append(
            f"its rows are {ratio} times as long as what the policy samples, so where the right answers are the long "
            "ones it trains on the wrong ones"
        )
    if (cut := best.estimate("truncated_ratio")).mean > 0.05:
        doubts.append(f"{100 * cut.mean:.0f} % of its rows are cut off at the limit")
    words = f"{best.name} is the fastest: {speedup} times as fast as {baseline.name}."
    return f"{words} Don't take it before you have looked at the reward: {'; '.join(doubts)}." if doubts else words
