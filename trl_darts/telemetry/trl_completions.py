"""
Reads lengths from what TRL's trainer writes with `log_completions=True`: `completions/completions_<step>.parquet`, the
text of the last generation before each log entry.

TRL writes no numbers of tokens. They are approximated by the number of characters, scaled so that each step has the
mean that its log entry has. As many of the longest rows count as cut off as the entry says.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..scheduling import FinishReason, prompt_key
from .run_log import read_log
from .traces import COLUMNS, read_traces


PATTERN = "completions_*.parquet"
CHARACTERS_PER_TOKEN = 4.0  # where no log entry tells
MEAN, CUT_OFF = "completions/mean_length", "completions/clipped_ratio"


def read_lengths(directory: Path) -> tuple[pd.DataFrame, list[str]]:
    """
    Reads a run's traces, see [`read_traces`]. Without any, approximates them from TRL's logged completions, unless
    those are rows that a schedule chose. Also returns notes on what was left out or approximated.
    """
    traces, notes = read_traces(directory)
    paths = sorted((directory / "completions").glob(PATTERN))
    if len(traces) or not paths:
        return traces, notes
    log = read_log(directory)[1]
    if "darts/budget/total" in log:  # of a `DARTSGRPOTrainer`
        return traces, [*notes, "Logged completions are not used: they are the rows that were kept."]
    found = pd.concat([_of_step(pd.read_parquet(path), log) for path in paths], ignore_index=True)
    how = "the means in the log" if MEAN in log else f"{CHARACTERS_PER_TOKEN:g} characters per token, without a log"
    notes.append(f"Lengths are approximated from the text of {len(found):,} logged completions and {how}.")
    return found, notes


def _of_step(rows: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Returns the trace of one file, whose steps count from 1. A group is a run of rows with one prompt."""
    step = int(rows["step"].iloc[0])
    prompts = [_text(prompt) for prompt in rows["prompt"]]
    characters = np.array([len(_text(completion)) for completion in rows["completion"]])
    entry = log.loc[step] if step in log.index else pd.Series(dtype=float)
    mean = entry.get(MEAN, np.nan)
    scale = characters.mean() / mean if mean > 0 and characters.any() else CHARACTERS_PER_TOKEN
    num_cut_off = round(np.nan_to_num(entry.get(CUT_OFF, 0.0)) * len(rows))
    longest = np.argsort(-characters, kind="stable")[:num_cut_off]
    group = np.cumsum([False, *(a != b for a, b in zip(prompts[1:], prompts, strict=False))])
    trace = pd.DataFrame({"step": step, "group": group, "prompt_key": [_key(prompt) for prompt in prompts]})
    sizes = trace.groupby("group")["group"]
    unknown = dict.fromkeys(("start_seconds", "end_seconds", "expected_length"), np.nan)
    trace = trace.assign(
        candidate=sizes.cumcount(),
        num_candidates=sizes.transform("size"),
        length=np.maximum(np.round(characters / scale), 1),
        finish_reason=np.where(np.isin(np.arange(len(rows)), longest), FinishReason.LENGTH, FinishReason.STOP),
        selected=True,
        num_prompt_tokens=[round(len(prompt) / scale) for prompt in prompts],
        num_carried_tokens=0,
        carried_over=False,
        versions="",
        **unknown,
    )
    return trace[list(COLUMNS)].astype(COLUMNS).assign(micro=0)


def _text(content: Any) -> str:
    """Returns the text of a prompt or completion, which may be a conversation."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        return _text(content.get("content") or content.get("text") or "")
    return "".join(map(_text, content)) if isinstance(content, Iterable) else ""


def _key(prompt: str) -> int:
    return prompt_key(list(prompt.encode()))
