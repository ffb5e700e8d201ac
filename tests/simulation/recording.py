"""Runs of a training whose truth is known: a simulated one leaves the traces and the log of a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from trl_darts.metrics import RolloutRecord
from trl_darts.scheduling import GroupSummary, Occupancy, ScheduleSettings
from trl_darts.analysis.simulation import ClusterSpec, SimulatedRun, SimulatedTraining, Workload


def record(
    directory: Path, settings: ScheduleSettings, workload: Workload, spec: ClusterSpec, steps: int
) -> SimulatedRun:
    """
    Trains in virtual time.

    Args:
        directory (`Path`):
            Becomes the `output_dir` of a run with `save_rollout_trace=True`.
        settings ([`ScheduleSettings`]):
            Of its schedule.
        workload ([`Workload`]):
            What it trains on.
        spec ([`ClusterSpec`]):
            What decodes.
        steps (`int`):
            Optimizer steps.

    Returns:
        [`SimulatedRun`]: The truth.
    """
    training = SimulatedTraining(workload, settings, spec)
    rounds, run = training.rounds, training.cluster.run
    carries_over = rounds is not None and rounds.buffer().keeps_tokens
    records: list[RolloutRecord] = []

    def recorded(*args):
        result = run(*args)
        groups, deferred = ([GroupSummary.of(group) for group in own] for own in (result.groups, result.deferred))
        occupancy, rows = Occupancy.of(result), settings.num_generations
        records.append(
            RolloutRecord(None, groups, occupancy, rows, deferred=deferred, carries_over=carries_over)  # type: ignore
        )
        return result

    training.cluster.run = recorded  # type: ignore[method-assign]
    truth = training.run(steps)
    rollouts = directory / "rollouts"
    rollouts.mkdir(parents=True)
    first = {"name": directory.name, "model": "some/Tiny-1B", "schedule": settings.schedule}
    lines = [{"run": {**first, "max_completion_length": workload.max_completion_length}}]
    for step, own in enumerate(records):
        pd.DataFrame(own.trace()).assign(step=step).to_parquet(rollouts / f"rollout_{step:05d}_00.parquet")
        seconds = {"step_time": own.seconds + 1, "darts/rollout/seconds": own.seconds, "darts/score/seconds": 0.5}
        lines.append({"step": step + 1, "reward": 0.5, **seconds})
    (rollouts / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return truth
