"""Runs written by hand: traces and logs small enough to count on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trl_darts.analysis.report.runs import outcomes
from trl_darts.telemetry.run_log import append_entry
from trl_darts.telemetry.traces import COLUMNS


# (length, finish reason, selected, start, end)
Candidate = tuple[int, str, bool, float, float]

# Prompt 7: the shortest and the longest are kept. Prompt 9: one is aborted at 4 tokens.
ROLLOUT: dict[int, list[Candidate]] = {
    7: [(2, "stop", True, 0.0, 2.0), (4, "stop", False, 0.0, 4.0), (9, "stop", True, 1.0, 10.0)],
    9: [(3, "stop", True, 0.0, 3.0), (4, "length", True, 0.0, 4.0), (4, "abort", False, 0.0, 4.0)],
}
SETTINGS = {
    "name": "out",
    "model": "some/Tiny-1B",
    "schedule": "darts",
    "num_generations": 2,
    "max_num_generations": 4,
}


def make_trace(groups: Mapping[int, Sequence[Candidate]] = ROLLOUT, step: int = 0) -> pd.DataFrame:
    """A trace file's table; `step` counts from 0 there."""
    rows = [
        (step, group, key, index, len(candidates), length, reason, selected, 2, start, end, 0, False, math.nan, "")
        for group, (key, candidates) in enumerate(groups.items())
        for index, (length, reason, selected, start, end) in enumerate(candidates)
    ]
    return pd.DataFrame(rows, columns=[*COLUMNS]).astype(COLUMNS)


def as_read(*traces: pd.DataFrame) -> pd.DataFrame:
    """What a run has of trace files of one rollout each."""
    table = pd.concat([trace.assign(micro=0) for trace in traces], ignore_index=True)
    table = table.assign(step=table["step"] + 1)
    return table.assign(outcome=outcomes(table))


def make_entry(step: int, **metrics: float) -> dict[str, Any]:
    """A log entry that fits `ROLLOUT`: 10 s of rollouts, 2 of scoring, 1 of sending weights, 5 of training."""
    return {
        "step": step,
        "reward": 0.1 * step,
        "step_time": 18.0,
        "completions/mean_length": 4.5,
        "completions/max_length": 9.0,
        "darts/pool/length_mean": 26 / 6,
        "darts/pool/length_p50": 4.0,
        "darts/pool/length_p99": 8.75,
        "darts/pool/length_max": 9.0,
        "darts/budget/total": 6.0,
        "darts/budget/redundancy": 1.5,
        "darts/rollout/seconds": 10.0,
        "darts/rollout/generated_tokens": 26.0,
        "darts/rollout/kept_tokens": 18.0,
        "darts/rollout/aborted_tokens": 4.0,
        "darts/rollout/bubble_ratio": 0.55,
        "darts/score/seconds": 2.0,
        "darts/sync/seconds": 1.0,
        **metrics,
    }


def write_run(
    directory: Path,
    traces: Mapping[str, pd.DataFrame] | int = 0,
    log: Sequence[Mapping[str, Any]] | int = 0,
    settings: Mapping[str, Any] | None = SETTINGS,
) -> Path:
    """
    Writes a run into its `output_dir`: traces by file name, or the same rollout in so many steps; lines of the log, or
    entries of so many steps that had this rollout, behind `settings`. No log: no file.
    """
    rollouts = directory / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    if isinstance(traces, int):
        traces = {f"rollout_{step:05d}_00.parquet": make_trace(step=step) for step in range(traces)}
    for name, trace in traces.items():
        trace.to_parquet(rollouts / name)
    entries = [make_entry(step + 1) for step in range(log)] if isinstance(log, int) else list(log)
    for line in [*([{"run": settings}] if settings and entries else []), *entries]:
        append_entry(directory, line)
    return directory
