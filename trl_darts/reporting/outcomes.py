"""What became of each candidate, also of those that several rollouts decoded a part of."""

from __future__ import annotations

import numpy as np
import pandas as pd


OUTCOMES = ("kept", "unused", "aborted")


def outcomes(traces: pd.DataFrame) -> pd.Series:
    """
    What became of each candidate.

    One that was carried over into a later rollout has a row in each, and what became of it in the last one is true of
    all of them: its tokens count where they were decoded. Where the run ended before it did, it is unused.

    Args:
        traces (`pd.DataFrame`):
            All candidates of a run, in the order of the rollouts.

    Returns:
        `pd.Series`: `"kept"`, `"aborted"`, or `"unused"` (ran to its end, but was not kept).
    """
    selected = traces["selected"].to_numpy()
    aborted = traces["finish_reason"].eq("abort").to_numpy()
    own = pd.Series(np.select([selected, aborted], ["kept", "aborted"], "unused"), traces.index, dtype=object)
    known = own.mask(traces["carried_over"])
    return known.groupby([traces["prompt_key"], traces["candidate"]]).bfill().fillna("unused")


def decoded(traces: pd.DataFrame) -> pd.Series:
    """Tokens of each candidate that its rollout decoded, and no earlier one."""
    return traces["length"] - traces["num_carried_tokens"]


def ended(traces: pd.DataFrame) -> pd.DataFrame:
    """Those candidates whose lengths will not change any more."""
    return traces[~traces["carried_over"]]
