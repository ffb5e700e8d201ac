"""Writes and reads a run's log: `rollouts/log.jsonl`, or the newest checkpoint's `trainer_state.json`."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import ConfigurationError
from ..scheduling import ScheduleSettings


LOG_FILE = "log.jsonl"
# Arguments of the trainer that matter when two runs are compared.
SETTINGS = (
    *(field.name for field in fields(ScheduleSettings)),
    "max_completion_length",
    "latency_curve",
    "length_history",
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "world_size",
    "num_engines",
    "temperature",
    "beta",
    "loss_type",
    "seed",
)

Attempt = list[dict[str, Any]]  # entries logged between two starts of a run


def append_entry(directory: Path, entry: Mapping[str, Any]) -> None:
    """Appends one line: `{"run": settings}` at each start of training, then `{"step": step, **metrics}`."""
    path = directory / "rollouts" / LOG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def read_evaluations(directory: Path) -> pd.Series:
    """Returns `eval_reward` by step, averaged over data sets. Steps that a later attempt repeated are replaced."""
    found: dict[int, list[float]] = {}
    for attempt in _attempts(directory)[1]:
        first = min(entry["step"] for entry in attempt)
        found = {step: values for step, values in found.items() if step < first}
        for entry in attempt:
            if "eval_reward" in entry:
                found.setdefault(entry["step"], []).append(entry["eval_reward"])
    return pd.Series({step: sum(values) / len(values) for step, values in sorted(found.items())}, dtype=float)


def read_log(directory: Path) -> tuple[dict[str, Any], pd.DataFrame, bool, list[str]]:
    """
    Reads a run's log. The last entry of a step counts. Entries of an earlier attempt are dropped from the first step
    of a later attempt on.

    Returns the settings (empty if unknown), one row per entry by `step` with `num_steps` (the number of optimizer
    steps that it averages), whether the run was started more than once, and notes.
    """
    settings, attempts, notes = _attempts(directory)
    entries: dict[int, dict[str, Any]] = {}
    for attempt in attempts:
        first = min(entry["step"] for entry in attempt)
        entries = {step: entry for step, entry in entries.items() if step < first}
        entries |= {entry["step"]: entry for entry in attempt if _is_training(entry)}
    return settings, _table(entries), len(attempts) > 1, notes


def _attempts(directory: Path) -> tuple[dict[str, Any], list[Attempt], list[str]]:
    """Returns settings, entries and notes of a run. All are empty without a log and a checkpoint."""
    path = directory / "rollouts" / LOG_FILE
    states = sorted(directory.glob("checkpoint-*/trainer_state.json"), key=lambda path: (len(path.parts[-2]), path))
    if path.exists():
        return _read_lines(path)
    return _read_state(states[-1]) if states else ({}, [], [])


def _read_lines(path: Path) -> tuple[dict[str, Any], list[Attempt], list[str]]:
    settings: list[dict[str, Any]] = []
    attempts: list[Attempt] = [[]]
    broken = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            entry = json.loads(line)
        except ValueError:  # the run was killed while writing
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("run"), dict):
            settings.append(entry["run"])
            attempts.append([])
        elif isinstance(entry, dict) and isinstance(entry.get("step"), int):
            attempts[-1].append(entry)
        else:
            broken.append(number)
    attempts = [attempt for attempt in attempts if attempt]
    if broken and not settings and not attempts:
        raise ConfigurationError(
            f"`run_dir`: {str(path)!r} must have one JSON object per line, and line {broken[0]} has none. Remove the "
            "file, and the report uses the newest checkpoint's log."
        )
    notes = []
    if broken:
        notes.append(f"{LOG_FILE}: {len(broken)} lines can't be read and are left out, the first is line {broken[0]}.")
    if any(other != settings[-1] for other in settings):
        notes.append("The run was restarted with other settings. The last ones are shown.")
    return (settings[-1] if settings else {}), attempts, notes


def _read_state(path: Path) -> tuple[dict[str, Any], list[Attempt], list[str]]:
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        entries = [entry for entry in history if isinstance(entry["step"], int)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"`run_dir`: {str(path)!r} must be a trainer's state with a `log_history`, and reading it failed: "
            f"{type(error).__name__} {error}. Remove this checkpoint, or choose another run."
        ) from error
    note = f"No {LOG_FILE}: log entries are those of {path.parent.name}, and the run's settings are unknown."
    return {}, [entries] if entries else [], [note]


def _is_training(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is of training, not of an evaluation or the summary at the end."""
    return "step_time" in entry or "reward" in entry or "darts/rollout/seconds" in entry


def _table(entries: Mapping[int, Mapping[str, Any]]) -> pd.DataFrame:
    steps = sorted(entries)
    log = pd.DataFrame([entries[step] for step in steps], index=pd.Index(steps, name="step", dtype="int64"))
    log = log.drop(columns="step", errors="ignore").apply(pd.to_numeric, errors="coerce")
    widths = [later - earlier for earlier, later in itertools.pairwise(steps)]
    # The first entry of a resumed run does not average all the steps before it.
    first = [min([*steps[:1], *widths[:1]])] if steps else []
    return log.assign(num_steps=pd.Series([*first, *widths], index=log.index, dtype="int64"))
