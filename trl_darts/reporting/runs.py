"""
What a training left behind: its settings, its log and its traces, as tables.

Invariants: steps count from 1, as in the trainer's log, also those of traces, whose files count from 0. What is
missing or was left out stands in [`Run.notes`]; what can't be used at all is a [`ConfigurationError`].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import ConfigurationError
from ..logs import LOG_FILE, read_log
from ..traces import TRACE_PATTERN, read_traces
from .outcomes import outcomes


MAX_RUNS = 6  # as many colours can be told apart, also by the colour-blind


@dataclass(frozen=True)
class Run:
    """
    One training, as far as it can be read.

    Args:
        name (`str`):
            What the report calls it.
        directory (`Path`):
            Its `output_dir`.
        settings (`dict[str, Any]`):
            What the first line of its log says; empty where there is none.
        log (`pd.DataFrame`):
            One row per log entry, indexed by `step`. The column `num_steps` is the number of optimizer steps that the
            entry is a mean of, `num_rollouts` the number of rollouts in them; the others are the metrics. Empty where
            there is no log.
        traces (`pd.DataFrame`):
            One row per candidate, with the columns of a trace, `micro`, which tells rollouts of one step apart, and
            `outcome`, see [`outcomes`]. Empty where there are none.
        notes (`tuple[str, ...]`):
            What is missing, and what was left out.
    """

    name: str
    directory: Path
    settings: dict[str, Any]
    log: pd.DataFrame
    traces: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """The last step of which anything is known."""
        return int(max([*self.log.index[-1:], *self.traces["step"].tail(1)], default=0))

    def logged(self, *metrics: str) -> bool:
        """Whether the log has all of these metrics."""
        return all(metric in self.log and bool(self.log[metric].notna().any()) for metric in metrics)


def read_runs(directories: Sequence[str | Path], names: Sequence[str] = ()) -> list[Run]:
    """
    Reads runs.

    Args:
        directories (`Sequence[str | Path]`):
            The `output_dir` of each, at most six.
        names (`Sequence[str]`, *optional*):
            What to call them. Defaults to the ends of their paths, as long as it takes to tell them apart.

    Returns:
        `list[Run]`: In the same order.

    Raises:
        [`ConfigurationError`]: If a directory is no run, a run is empty or broken, or names don't fit.
    """
    paths = [Path(directory) for directory in directories]
    if not 1 <= len(paths) <= MAX_RUNS:
        raise ConfigurationError(
            f"`run_dir` ({len(paths)} directories) must be 1 to {MAX_RUNS}: more colours can't be told apart. Write "
            "several reports."
        )
    for path in paths:
        _check_directory(path)
    return [read_run(path, name) for path, name in zip(paths, _names(paths, names), strict=True)]


def read_run(directory: str | Path, name: str | None = None) -> Run:
    """
    Reads one run: the traces of `output_dir/rollouts`, and `log.jsonl` beside them or, where there is none, the newest
    checkpoint's `trainer_state.json`.

    Args:
        directory (`str` or `Path`):
            Its `output_dir`.
        name (`str`, *optional*):
            What to call it. Defaults to the directory's name.

    Returns:
        [`Run`]: What was found.

    Raises:
        [`ConfigurationError`]: If the directory is no run, or the run is empty or broken.
    """
    directory = Path(directory)
    _check_directory(directory)
    settings, log, restarted, log_notes = read_log(directory)
    traces, trace_notes = read_traces(directory)
    if log.empty and traces.empty:
        raise ConfigurationError(
            f"`run_dir` ({str(directory)!r}) is a run without a single finished step: there is nothing to report. Let "
            "it train for a step."
        )
    if restarted and not log.empty and traces["step"].gt(log.index[-1]).any():
        stale = traces["step"].gt(log.index[-1])
        trace_notes = [
            *trace_notes,
            f"Traces of steps {traces['step'][stale].min()} to {traces['step'].max()} are left out: the run was "
            "started again, and has not logged these steps since.",
        ]
        traces = traces[~stale]
    traces = traces.assign(outcome=outcomes(traces))
    notes = (*_missing(log, traces), *log_notes, *trace_notes)
    return Run(name or directory.resolve().name, directory, settings, _count_rollouts(log, traces), traces, notes)


def _check_directory(directory: Path) -> None:
    where = f"`run_dir` ({str(directory)!r})"
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise ConfigurationError(f"{where} must be a training's `output_dir`, and {state}. Check the path.")
    signs = (f"rollouts/{LOG_FILE}", f"rollouts/{TRACE_PATTERN}", "checkpoint-*/trainer_state.json")
    if any(next(directory.glob(sign), None) for sign in signs):
        return
    inside = next((path for path in sorted(directory.glob("*")) for sign in signs if any(path.glob(sign))), None)
    hint = f"Did you mean {str(inside)!r}?" if inside else "Train with `save_rollout_trace=True`, or check the path."
    raise ConfigurationError(
        f"{where} must be a training's `output_dir`, and has neither {', nor '.join(signs)}. {hint}"
    )


def _names(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    if names and len(names) != len(paths):
        raise ConfigurationError(
            f"`name` ({len(names)} given) must be given once per run ({len(paths)}), in their order, or not at all."
        )
    for depth in range(1, max(len(path.resolve().parts) for path in paths) + 1):
        found = list(names) or ["/".join(path.resolve().parts[-depth:]) for path in paths]
        if len(set(found)) == len(found):
            return found
        if names:
            break
    twice = next(name for name in found if found.count(name) > 1)
    raise ConfigurationError(
        f"`{'name' if names else 'run_dir'}` ({twice!r}) is there twice: runs must be told apart. Leave one out"
        f"{', or name it differently' if names else ''}."
    )


def _missing(log: pd.DataFrame, traces: pd.DataFrame) -> list[str]:
    notes = []
    if log.empty:
        notes.append(
            "No log: rewards, time split and step times are unknown. A run with `save_rollout_trace=True` writes one."
        )
    if traces.empty:
        notes.append(
            "No traces: length distribution, budgets and occupancy are unknown or coarser. Train with "
            "`save_rollout_trace=True`."
        )
    return notes


def _count_rollouts(log: pd.DataFrame, traces: pd.DataFrame) -> pd.DataFrame:
    """Adds `num_rollouts`: as many as there are traces in an entry's steps, else one per step that logged any."""
    logged = (
        log["darts/rollout/seconds"].notna() if "darts/rollout/seconds" in log else pd.Series(False, index=log.index)
    )
    counts = log["num_steps"].where(logged, 0)
    per_step = traces.drop_duplicates(["step", "micro"]).groupby("step").size()
    for step, width in log["num_steps"].items():
        covered = per_step.reindex(range(int(step) - int(width) + 1, int(step) + 1)).fillna(0)
        if logged[step] and covered.sum():
            counts[step] = covered.sum()
    return log.assign(num_rollouts=counts.astype(float))
