"""A run's log: `rollouts/log.jsonl`, or the newest checkpoint's `trainer_state.json`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import ConfigurationError


LOG_FILE = "log.jsonl"  # what `RunLogCallback` writes; that module loads torch, and readers must not wait for it


def read_log(directory: Path) -> tuple[dict[str, Any], pd.DataFrame, bool, list[str]]:
    """
    Reads what a run logged.

    Args:
        directory (`Path`):
            Its `output_dir`.

    Returns:
        `tuple`: The settings (empty where unknown), the entries (see [`Run`]), whether the run was started more than
        once, and notes.

    Raises:
        [`ConfigurationError`]: If a log is there and can't be read.
    """
    path = directory / "rollouts" / LOG_FILE
    if path.exists():
        headers, attempts, notes = _read_lines(path)
    elif states := sorted(directory.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step):
        headers, attempts, notes = _read_state(states[-1])
    else:
        return {}, _table({}), False, []
    entries: dict[int, dict[str, Any]] = {}
    for attempt in attempts:
        first = min((entry["step"] for entry in attempt), default=None)
        if first is not None:  # what an earlier attempt logged from here on did not last
            entries = {step: entry for step, entry in entries.items() if step < first}
        for entry in filter(_is_training, attempt):
            entries[int(entry["step"])] = entry
    if len({json.dumps(header, sort_keys=True) for header in headers}) > 1:
        notes.append("The run was started again with other settings. Those shown are the last.")
    return (headers[-1] if headers else {}), _table(entries), len(attempts) > 1, notes


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]], list[str]]:
    headers: list[dict[str, Any]] = []
    attempts: list[list[dict[str, Any]]] = [[]]
    broken = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        entry = _parse(line)
        if entry is None:
            broken.append(number)
        elif isinstance(entry.get("run"), dict):
            headers.append(entry["run"])
            attempts.append([])
        elif isinstance(entry.get("step"), int):
            attempts[-1].append(entry)
        else:
            broken.append(number)
    attempts = [attempt for attempt in attempts if attempt]
    if broken and not headers and not attempts:
        raise ConfigurationError(
            f"`run_dir`: {str(path)!r} must have one JSON object per line, and line {broken[0]} has none. Remove the "
            "file: the report then takes the newest checkpoint's log."
        )
    notes = [f"{LOG_FILE}: lines that can't be read are left out (numbers {_list(broken)})."] if broken else []
    return headers, attempts, notes


def _read_state(path: Path) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]], list[str]]:
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        entries = [entry for entry in history if isinstance(entry["step"], int)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"`run_dir`: {str(path)!r} must be a trainer's state with a `log_history`, and reading it failed: "
            f"{type(error).__name__} {error}. Remove this checkpoint, or name another run."
        ) from error
    note = f"No {LOG_FILE}: log entries are those of {path.parent.name}, and the run's settings are unknown."
    return [], [entries], [note]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _is_training(entry: Mapping[str, Any]) -> bool:
    """Entries of evaluations, and the one at the end of a training, have neither of these."""
    return "step_time" in entry or "reward" in entry or "darts/rollout/seconds" in entry


def _checkpoint_step(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _table(entries: Mapping[int, Mapping[str, Any]]) -> pd.DataFrame:
    """Entries as rows. An entry stands for the steps since the one before."""
    steps = sorted(entries)
    log = pd.DataFrame([entries[step] for step in steps], index=pd.Index(steps, name="step", dtype="int64"))
    log = log.drop(columns="step", errors="ignore").apply(pd.to_numeric, errors="coerce")
    widths = [later - earlier for earlier, later in itertools.pairwise(steps)]
    # The first entry of a run that was resumed elsewhere does not stand for all the steps before it.
    first = [min([*steps[:1], *widths[:1]])] if steps else []
    return log.assign(num_steps=pd.Series([*first, *widths], index=log.index, dtype="int64"))


def _list(numbers: Iterable[int], most: int = 5) -> str:
    numbers = list(numbers)
    return ", ".join(map(str, numbers[:most])) + (" …" if len(numbers) > most else "")
