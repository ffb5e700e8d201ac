"""
Reads recorded runs: their lengths as a workload, or their rollouts for a replay, which shows whether simulated engines
take as long and keep the same candidates.

The final length of an aborted candidate is unknown. A replay aborts it as well, so it does not matter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...buffer.rounds import round_policy
from ...errors import ConfigurationError
from ...policy import LatencyCurve
from ...policy.traced_latency import TimedRollout, fit_rollouts
from ...scheduling import FinishReason, GroupPlan, RolloutResult, Scheduler, ScheduleSettings
from .cluster import SimulatedCluster
from .cluster_spec import ClusterSpec
from .workload import ENDLESS, RecordedLengths, Workload


if TYPE_CHECKING:
    import pandas as pd


logger = logging.getLogger(__name__)

STOP = FinishReason.STOP.value
LARGE_ERROR = 0.2  # of a fitted curve


@dataclass(frozen=True)
class RecordedRun:
    """
    A run whose rollouts were recorded.

    Args:
        directory (`Path`):
            `output_dir` of a run with `save_rollout_trace=True`, or of TRL's trainer with `record_lengths` or
            `log_completions=True`.

    Raises:
        [`ConfigurationError`]: When it is read, if there are no traces, they lack columns, or the log can't be read.
    """

    directory: Path

    @cached_property
    def traces(self) -> pd.DataFrame:
        """One row per candidate."""
        from ...telemetry.trl_completions import read_lengths  # loads pandas, which takes a second

        traces, notes = read_lengths(self.directory)
        for note in notes:
            logger.warning(note)
        if not len(traces):
            raise ConfigurationError(
                f"`--trace` ({str(self.directory)!r}) must be the `output_dir` of a run with "
                "`save_rollout_trace=True`, or of TRL's trainer with `record_lengths` or `log_completions=True`, and "
                "has neither `rollouts/rollout_*.parquet` nor `completions/completions_*.parquet`."
            )
        return traces

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in the run's log."""
        from ...telemetry.run_log import read_log  # loads pandas, for which a wrong option or `--help` should not wait

        return read_log(self.directory)[0]

    def workload(self, prompts_per_step: int | None = None, **fields: Any) -> tuple[Workload, int]:
        """
        Returns the run's lengths as a workload, and its rows per prompt. The limit is the run's, as its log says, or
        else its longest candidate.

        Args:
            prompts_per_step (`int`, *optional*):
                Defaults to the prompts that the run trained on per rollout.
            **fields (*optional*):
                Further fields of [`Workload`].
        """
        traces = self.traces[~self.traces["carried_over"]]  # a later rollout has them with all their tokens
        trained_on = traces[traces["selected"]].groupby(["step", "micro"])
        if not len(trained_on):
            raise ConfigurationError(
                f"`--trace` ({str(self.directory)!r}) must be a run with rows that were trained on, and has none. Let "
                "it train for a step."
            )
        by_prompt = traces.groupby("prompt_key", sort=False)
        lengths = RecordedLengths(
            [own.tolist() for _, own in by_prompt["length"]],
            [(own != STOP).tolist() for _, own in by_prompt["finish_reason"]],
        )
        limit = self.settings.get("max_completion_length") or int(traces["length"].max())
        batch = int(trained_on["group"].nunique().median())
        workload = Workload(
            lengths,
            min(batch, lengths.num_prompts) if prompts_per_step is None else prompts_per_step,
            limit,
            prompt_tokens=int(traces["num_prompt_tokens"].mean()),
            **fields,
        )
        return workload, int(trained_on["group"].value_counts().iloc[0])

    def fitted_cluster(self, assumed: ClusterSpec, **fields: Any) -> ClusterSpec:
        """
        Fits a latency curve to the times in the traces, for as many engines as the run had if `fields` have no other
        number. The curve's metadata tell how good it is. If there is none, the result is `assumed`, and they tell why.
        """
        num_engines, fitted = self.settings.get("num_engines") or 1, None
        why = "the run's rollouts overlap (`rollout_ahead`)" if self.settings.get("rollout_ahead") else None
        if why is None:
            fitted = fit_rollouts(_timed(self.traces), num_engines)
            why = "the run's traces have too few candidates, or no times"
        if fitted is None:
            metadata = {**assumed.latency.metadata, "not_fitted": why}
            return replace(assumed, latency=replace(assumed.latency, metadata=metadata))
        engines = f"{num_engines} engine{'s' * (num_engines > 1)}"
        error = float(np.median(np.abs(fitted.errors)))
        told = (
            f"{fitted.num_candidates:,} candidates of the run on {engines}. It predicts the seconds of their rollouts "
            f"with a median error of {error:.1%}"
        )
        if error > LARGE_ERROR:
            told += ", which is large, as on a busy machine, or where candidates waited in a queue"
        return ClusterSpec(replace(fitted.curve, metadata={"fitted": told}), **{"num_engines": num_engines, **fields})

    def rollouts(self) -> Iterator[RecordedRollout]:
        """Yields the rollouts, in order."""
        for number, (_, rollout) in enumerate(self.traces.groupby(["step", "micro"])):
            groups = [group.sort_values("candidate") for _, group in rollout.groupby("group")]
            yield RecordedRollout(
                plans=[_plan(index, group) for index, group in enumerate(groups)],
                lengths=[group["length"].where(group["finish_reason"] == STOP, ENDLESS).tolist() for group in groups],
                selected=[group.loc[group["selected"], "candidate"].tolist() for group in groups],
                seconds=float(rollout["end_seconds"].max() - rollout["start_seconds"].min()),
                number=number,
            )


def curve_of(path: str | Path, models: Mapping[str, Any]) -> LatencyCurve:
    """Loads a latency curve. Raises [`ConfigurationError`] if one of the `models`, by run, is another."""
    curve = LatencyCurve.load(path, "--latency-curve")
    for run, model in models.items():
        if not curve.is_of(model):
            raise ConfigurationError(
                f"`--latency-curve` ({str(path)!r}) must be of the model that was trained, and is of "
                f"{curve.metadata.get('model')!r}, while {run!r} trained {model!r}. Measure one with `trl-darts "
                "profile`, or leave the option out."
            )
    return curve


def _timed(traces: pd.DataFrame) -> list[TimedRollout]:
    table = traces.assign(decoded=traces["length"] - traces["num_carried_tokens"])
    columns = ["start_seconds", "end_seconds", "decoded"]
    return [TimedRollout(*own[columns].to_numpy(float).T) for _, own in table.groupby(["step", "micro"])]


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout of a trace."""

    plans: list[GroupPlan]
    lengths: list[list[int]]
    selected: list[list[int]]
    seconds: float
    number: int = 0  # of the rollout in its run, from 0

    def replay(self, settings: ScheduleSettings, cluster: ClusterSpec, max_length: int) -> RolloutResult:
        """
        Replays the rollout with the run's `settings` and `max_completion_length`. Raises [`ConfigurationError`] if the
        schedule also chooses the prompts of a rollout, which a trace does not record.
        """
        if round_policy(settings, len(self.plans)) is not None:
            raise ConfigurationError(
                f"`schedule` ({settings.schedule!r}) can't be replayed: traces don't record when prompts were added "
                "to a rollout. Replay a run of 'grpo' or 'darts', or simulate this run's workload."
            )
        policies = settings.policies(self.plans, rollout=self.number)
        scheduler = Scheduler(policies, settings.num_generations)
        return SimulatedCluster(cluster).run(scheduler, self.plans, self.lengths, max_length)


def _plan(index: int, group: pd.DataFrame) -> GroupPlan:
    first = group.iloc[0]
    expected = None if math.isnan(first["expected_length"]) else float(first["expected_length"])
    num_prompt_tokens = int(first["num_prompt_tokens"])
    return GroupPlan(index, len(group), num_prompt_tokens=num_prompt_tokens, expected_length=expected)
