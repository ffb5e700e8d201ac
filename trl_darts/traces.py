"""A run's traces: `rollouts/rollout_<step>_<micro>.parquet`, one row per candidate."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from .errors import ConfigurationError


TRACE_PATTERN = "rollout_*.parquet"
COLUMNS = (
    "step",
    "group",
    "prompt_key",
    "candidate",
    "num_candidates",
    "length",
    "finish_reason",
    "selected",
    "num_prompt_tokens",
    "start_seconds",
    "end_seconds",
    "num_carried_tokens",
    "carried_over",
    "expected_length",
)
COUNTS = ("step", "group", "candidate", "num_candidates", "length", "num_prompt_tokens", "num_carried_tokens")
FLAGS = ("selected", "carried_over")
TIMES = ("start_seconds", "end_seconds")


def read_traces(directory: Path) -> tuple[pd.DataFrame, list[str]]:
    """
    Reads all traces of a run.

    Args:
        directory (`Path`):
            Its `output_dir`.

    Returns:
        `tuple[pd.DataFrame, list[str]]`: One row per candidate, in the order of the rollouts, with `step` counted from
        1 and a column `micro`; and notes.

    Raises:
        [`ConfigurationError`]: If a trace lacks columns, or none can be read.
    """
    frames, broken = [], []
    paths = [path for path in (directory / "rollouts").glob(TRACE_PATTERN) if _number(path) is not None]
    for path in sorted(paths, key=lambda path: _number(path) or (0, 0)):
        try:
            frame = pd.read_parquet(path)
        except (OSError, ValueError) as error:  # pyarrow's errors are `ValueError`s
            broken.append((path, _line(error)))
            continue
        if frame.empty:  # all prompts of the rollout were dropped
            broken.append((path, "It has no candidates."))
            continue
        _check(path, frame)
        frames.append(frame[list(COLUMNS)].assign(micro=(_number(path) or (0, 0))[1]))
    if broken and not frames:
        first, reason = broken[0]
        raise ConfigurationError(
            f"`run_dir`: {str(first)!r} must be a Parquet file, with candidates. {reason} Remove it; a run "
            "that is killed while it writes leaves such files."
        )
    notes = [f"{path.name} is left out. {reason}" for path, reason in broken]
    if not frames:
        dtypes = {"step": "int64", "micro": "int64", **dict.fromkeys(FLAGS, "bool")}
        return pd.DataFrame(columns=[*COLUMNS, "micro"]).astype(dtypes), notes
    traces = pd.concat(frames, ignore_index=True)
    return traces.assign(step=traces["step"] + 1, finish_reason=traces["finish_reason"].astype(str)), notes


def _number(path: Path) -> tuple[int, int] | None:
    """Step and micro-step in a trace's name."""
    match = re.fullmatch(r"rollout_(\d+)_(\d+)\.parquet", path.name)
    return (int(match[1]), int(match[2])) if match else None


def _check(path: Path, frame: pd.DataFrame) -> None:
    if missing := [column for column in COLUMNS if column not in frame]:
        raise ConfigurationError(
            f"`run_dir`: {str(path)!r} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}: a "
            "trace needs all that `save_rollout_trace=True` writes today. Train again, or remove this run's traces: "
            "the report then takes its log."
        )
    kinds = ((COUNTS, "iu", "whole numbers from 0 on"), (FLAGS, "b", "booleans"), (TIMES, "f", "seconds from 0 on"))
    for columns, dtype, words in kinds:
        for column in columns:
            if frame[column].dtype.kind not in dtype or not (frame[column] >= 0).all():
                raise ConfigurationError(
                    f"`run_dir`: {str(path)!r} must have {words} in the column {column}, and has "
                    f"{frame[column].dtype} from {frame[column].min()!s}. Remove it; no training writes such files."
                )


def _line(error: Exception) -> str:
    """The first line of a message, as a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".") + "."
