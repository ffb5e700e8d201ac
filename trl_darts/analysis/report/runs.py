"""
Reads a training's settings, log and traces as tables.

Invariants: steps count from 1, as in the trainer's log; names of trace files count from 0. [`Run.notes`] names what is
missing or left out; a directory that can't be used at all raises a [`ConfigurationError`].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...errors import ConfigurationError
from ...telemetry.run_log import LOG_FILE, read_evaluations, read_log
from ...telemetry.traces import TRACE_PATTERN, read_traces


MAX_RUNS = 6  # colours that can be told apart, also by the colour-blind
OUTCOMES = ("kept", "unused", "aborted")
SIGNS = (f"rollouts/{LOG_FILE}", f"rollouts/{TRACE_PATTERN}", "checkpoint-*/trainer_state.json")


@dataclass(frozen=True)
class Run:
    """A training, as far as it can be read. Missing parts are empty."""

    name: str  # in the report
    directory: Path  # its `output_dir`
    settings: dict[str, Any]  # from the first line of its log
    # One row per log entry, indexed by `step`: the `num_steps` optimizer steps that it averages, their `num_rollouts`,
    # and the metrics.
    log: pd.DataFrame
    # One row per candidate: the columns of a trace, `micro` (which rollout of the step), and `outcome`: "kept",
    # "aborted", or "unused" (complete and not kept).
    traces: pd.DataFrame
    notes: tuple[str, ...]  # what is missing, and what was left out
    evaluations: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))  # `eval_reward` by step

    @property
    def num_steps(self) -> int:
        """The last step with a log entry or a trace."""
        return int(max([*self.log.index[-1:], *self.traces["step"].tail(1)], default=0))

    def logged(self, *metrics: str) -> bool:
        """Whether the log has all of these metrics."""
        return all(metric in self.log and bool(self.log[metric].notna().any()) for metric in metrics)


def read_runs(directories: Sequence[str | Path], names: Sequence[str] = ()) -> list[Run]:
    """
    Reads at most six runs. A folder stands for the runs in it. Those without over-sampling come first there, because
    the first run is the baseline. Names default to those of the directories, or to their paths if names repeat.
    """
    folders = [_runs_in(Path(directory)) for directory in directories]
    if not 1 <= (found := sum(map(len, folders))) <= MAX_RUNS:
        raise ConfigurationError(
            f"`RUN_DIR` ({found} directories) must be 1 to {MAX_RUNS}: more colours can't be told apart. Write "
            "several reports."
        )
    runs = [run for paths in folders for run in sorted(map(read_run, paths), key=_over_samples)]
    found_names = _names([run.directory for run in runs], names)
    return [replace(run, name=name) for run, name in zip(runs, found_names, strict=True)]


def _runs_in(directory: Path) -> list[Path]:
    """Returns a run's directory, or those of the runs in a folder."""
    if not directory.is_dir() or _is_run(directory):
        return [directory]  # is checked when it is read
    return sorted(path for path in directory.iterdir() if _is_run(path)) or [directory]


def _is_run(directory: Path) -> bool:
    return any(any(directory.glob(sign)) for sign in SIGNS)


def _over_samples(run: Run) -> bool:
    """Whether the run is neither of TRL's own trainer nor of `schedule="grpo"`."""
    return bool(run.settings.get("schedule", "grpo") != "grpo")


def read_run(directory: str | Path) -> Run:
    """
    Reads one run: the traces in `output_dir/rollouts`, and the `log.jsonl` beside them, or else the newest
    checkpoint's `trainer_state.json`.

    Args:
        directory (`str` or `Path`):
            The run's `output_dir`.

    Returns:
        [`Run`]: The run.

    Raises:
        [`ConfigurationError`]: If the directory is no run, or the run is empty or broken.
    """
    directory = Path(directory)
    _check_directory(directory)
    settings, log, restarted, notes = read_log(directory)
    traces, trace_notes = read_traces(directory)
    if log.empty and traces.empty:
        raise ConfigurationError(
            f"`RUN_DIR` ({str(directory)!r}) has no finished step, so there is nothing to report. Let it train for a "
            "step."
        )
    notes = [*notes, *trace_notes]
    if traces.empty:
        notes.append("No traces: length distributions, budgets and occupancy need `save_rollout_trace=True`.")
    if log.empty:
        notes.append("No log: rewards, times of steps and faults are unknown. `save_rollout_trace=True` writes one.")
    elif restarted and (stale := traces["step"] > log.index[-1]).any():
        notes.append(
            f"Traces of steps {traces['step'][stale].min()} to {traces['step'].max()} are left out: the run was "
            "restarted, and has not logged these steps since."
        )
        traces = traces[~stale]
    traces = traces.assign(outcome=outcomes(traces))
    log = log.assign(num_rollouts=_count_rollouts(log, traces))
    evaluations = read_evaluations(directory)
    return Run(directory.resolve().name, directory, settings, log, traces, tuple(notes), evaluations)


def _check_directory(directory: Path) -> None:
    where = f"`RUN_DIR` ({str(directory)!r})"
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise ConfigurationError(f"{where} must be a training's `output_dir`, and {state}. Check the path.")
    if not _is_run(directory):
        raise ConfigurationError(
            f"{where} must be a training's `output_dir`, or a folder with some, and has neither "
            f"{', nor '.join(SIGNS)}. Train with `save_rollout_trace=True`, or check the path."
        )


def _names(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    if names and len(names) != len(paths):
        raise ConfigurationError(
            f"`--name` ({len(names)} given) must be given once per run ({len(paths)}), in their order, or not at all."
        )
    found = list(names) or [path.resolve().name for path in paths]
    if not names and len(set(found)) < len(found):
        found = [str(path) for path in paths]
    if twice := [name for name in found if found.count(name) > 1]:
        raise ConfigurationError(
            f"`{'--name' if names else 'RUN_DIR'}` ({twice[0]!r}) must be given once, so that runs can be told apart. "
            f"Leave one out{', or name it differently' if names else ''}."
        )
    return found


def outcomes(traces: pd.DataFrame) -> pd.Series:
    """
    Returns the outcome of each candidate. One that was carried over has a row in each of its rollouts, all with the
    outcome of the last one; its tokens count in the rollouts that decoded them. It is unused if the run ended first.
    """
    aborted = traces["finish_reason"].eq("abort")
    own = np.select([traces["selected"], aborted], ["kept", "aborted"], "unused")
    known = pd.Series(own, traces.index, dtype=object).mask(traces["carried_over"])
    return known.groupby([traces["prompt_key"], traces["candidate"]]).bfill().fillna("unused")


def _count_rollouts(log: pd.DataFrame, traces: pd.DataFrame) -> pd.Series:
    """
    Counts the rollouts of each entry: the traces of its steps, or else one per step that logged any. NaN if the log
    has no rollouts at all, as one of TRL's own trainer.
    """
    if "darts/rollout/seconds" not in log:
        return pd.Series(np.nan, log.index)
    per_step = traces.drop_duplicates(["step", "micro"]).groupby("step").size()
    counts = [
        (per_step[(per_step.index > step - width) & (per_step.index <= step)].sum() or width) if logged else 0
        for step, width, logged in zip(log.index, log["num_steps"], log["darts/rollout/seconds"].notna(), strict=True)
    ]
    return pd.Series(counts, log.index, dtype=float)
