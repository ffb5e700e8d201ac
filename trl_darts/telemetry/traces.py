"""Writes and reads a run's traces: `rollouts/rollout_<step>_<micro step>.parquet`, one row per candidate."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from ..errors import ConfigurationError
from ..scheduling import GroupSummary


TRACE_PATTERN = "rollout_*.parquet"
COLUMNS = {
    "step": "int64",
    "group": "int64",
    "prompt_key": "uint64",  # a 64-bit hash, which a float would truncate
    "candidate": "int64",
    "num_candidates": "int64",
    "length": "int64",
    "finish_reason": "str",
    "selected": "bool",
    "num_prompt_tokens": "int64",
    "start_seconds": "float64",
    "end_seconds": "float64",
    "num_carried_tokens": "int64",
    "carried_over": "bool",
    "expected_length": "float64",
    "versions": "str",
}


def write_trace(
    directory: Path,
    step: int,
    micro_step: int,
    groups: Iterable[GroupSummary],
    carried_over: Iterable[GroupSummary] = (),
) -> None:
    """
    Writes one rollout, of whose groups some may be `carried_over` to a later one. Seconds count from its first
    submission, and are NaN if they are not known. `step` counts from 0, and `micro_step` distinguishes rollouts of one
    step. With `rollout_ahead="continuous"`, `versions` is "3:40 4:12" if weights after 3 optimizer steps sampled
    40 tokens, and those after 4 steps the next 12.
    """
    groups = sorted(groups, key=lambda group: group.group_id)
    carried = set(map(id, carried_over))  # a batch can take several rollouts, and a prompt can be in each
    begin = min((start for group in groups for start, _ in group.times), default=0.0)
    rows = [
        {
            "step": step,
            "group": place,
            "prompt_key": group.prompt_key,
            "candidate": index,
            "num_candidates": len(group.lengths),
            "length": length,
            "finish_reason": group.finish_reasons[index],
            "selected": index in group.selected,
            "num_prompt_tokens": group.num_prompt_tokens,
            "start_seconds": group.times[index][0] - begin,
            "end_seconds": group.times[index][1] - begin,
            "num_carried_tokens": group.carried[index] if group.carried else 0,
            "carried_over": id(group) in carried,
            "expected_length": math.nan if group.expected_length is None else group.expected_length,
            "versions": " ".join(f"{v}:{n}" for v, n in group.versions[index]) if group.versions else "",
        }
        for place, group in enumerate(groups)
        for index, length in enumerate(group.lengths)
    ]
    path = directory / "rollouts" / f"rollout_{step:05d}_{micro_step:02d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS).to_parquet(path)


def read_traces(directory: Path) -> tuple[pd.DataFrame, list[str]]:
    """
    Reads all traces of a run: one row per candidate, in the order of the rollouts, with `step` counted from 1 and a
    column `micro`. Also returns notes on files that were left out.
    """
    frames, broken = [], []
    paths = {path: numbers for path in (directory / "rollouts").glob(TRACE_PATTERN) if (numbers := _numbers(path))}
    for path in sorted(paths, key=paths.__getitem__):
        try:
            frame = pd.read_parquet(path)
        except (OSError, ValueError) as error:  # pyarrow's errors are `ValueError`s
            broken.append((path, (str(error).splitlines() or [type(error).__name__])[0].rstrip(".") + "."))
            continue
        if frame.empty:  # all prompts of the rollout were dropped
            broken.append((path, "It has no candidates."))
            continue
        try:
            frame = frame if "versions" in frame else frame.assign(versions="")  # of an earlier version
            frames.append(frame[list(COLUMNS)].astype(COLUMNS).assign(micro=paths[path][1]))
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"`run_dir`: {str(path)!r} must have the columns that this version of `save_rollout_trace=True` "
                f"writes: {' '.join(str(error).split())}. Train again, or remove this run's traces, and the report "
                "uses its log."
            ) from error
    if broken and not frames:
        path, reason = broken[0]
        raise ConfigurationError(
            f"`run_dir`: {str(path)!r} must be a Parquet file with candidates. {reason} Remove it: runs that are "
            "killed while writing leave such files."
        )
    notes = [f"{path.name} is left out. {reason}" for path, reason in broken]
    if not frames:
        return pd.DataFrame(columns=[*COLUMNS, "micro"]).astype({**COLUMNS, "micro": "int64"}), notes
    traces = pd.concat(frames, ignore_index=True)
    return traces.assign(step=traces["step"] + 1), notes


def _numbers(path: Path) -> tuple[int, int] | None:
    """Returns step and micro-step from the file's name."""
    match = re.fullmatch(r"rollout_(\d+)_(\d+)\.parquet", path.name)
    return (int(match[1]), int(match[2])) if match else None
