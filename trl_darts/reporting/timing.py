"""
Where time goes, and what it was predicted to be: the numbers behind the panels of time.

Invariant: the parts of a step's time sum to the step's time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from ..policy import rollout_time
from .outcomes import decoded
from .runs import Run


PHASES = ("generate", "score", "train", "sync")
_PHASE_METRICS = {
    "generate": "darts/rollout/seconds",
    "score": "darts/score/seconds",
    "sync": "darts/sync/seconds",
}


def time_split(run: Run) -> pd.DataFrame:
    """
    Where a step's time goes.

    Args:
        run ([`Run`]):
            A run with a log.

    Returns:
        `pd.DataFrame`: By log entry, seconds per optimizer step: `total` (TRL's `step_time`), `generate`, `score`,
        `sync` (0 where weights were not sent), `train` (what is left), and `num_steps`. NaN where the log lacks what
        is needed.
    """
    log = run.log.reindex(columns=list(dict.fromkeys([*run.log, "step_time", *_PHASE_METRICS.values()])))
    num_steps = log["num_steps"]
    per_step = log["num_rollouts"] / num_steps
    idle = per_step.eq(0)  # a step that reuses an earlier rollout
    generate, score = ((log[_PHASE_METRICS[phase]] * per_step).mask(idle, 0.0) for phase in ("generate", "score"))
    sync = log[_PHASE_METRICS["sync"]].fillna(0.0) * per_step.clip(upper=1)  # at most once per optimizer step
    train = log["step_time"] - generate - score - sync
    return pd.DataFrame(
        {
            "total": log["step_time"],
            "generate": generate,
            "score": score,
            "train": train.where(train >= 0),
            "sync": sync,
            "num_steps": num_steps,
        }
    )


def merge_entries(split: pd.DataFrame, most: int = 100) -> pd.DataFrame:
    """
    Log entries as fewer ones, each the mean of several in a row.

    Args:
        split (`pd.DataFrame`):
            What [`time_split`] returned.
        most (`int`, *optional*, defaults to `100`):
            At most so many rows.

    Returns:
        `pd.DataFrame`: The same columns. A row stands for the steps of its entries, and has the last one's step.
    """
    group = np.arange(len(split)) // max(1, -(-len(split) // most))
    weighted = split.mul(split["num_steps"], axis=0).assign(num_steps=split["num_steps"])
    sums = weighted.groupby(group).sum()
    means = sums.div(sums["num_steps"], axis=0).assign(num_steps=sums["num_steps"])
    return means.set_index(split.index.to_series().groupby(group).last())


def reward_curve(run: Run) -> pd.DataFrame:
    """
    Reward over training.

    Args:
        run ([`Run`]):
            A run with a log.

    Returns:
        `pd.DataFrame`: By step, `reward` and `seconds`: the sum of `step_time` until then, NaN from where one is
        missing. Evaluation, checkpoints and the optimizer's update are not in it.
    """
    log = run.log.reindex(columns=["reward", "step_time", "num_steps"])
    seconds = (log["step_time"] * log["num_steps"]).cumsum(skipna=False)
    return pd.DataFrame({"reward": log["reward"], "seconds": seconds}).dropna(subset="reward")


def predicted_times(traces: pd.DataFrame, latency: Callable[[np.ndarray], np.ndarray]) -> pd.DataFrame:
    """
    What the cost model makes of each rollout's lengths ([DARTS](https://huggingface.co/papers/2605.30859), Eq. 4),
    against the time that it took.

    Args:
        traces (`pd.DataFrame`):
            Candidates. Those that were carried over count with what the rollout decoded of them.
        latency ([`LatencyCurve`]):
            Per-token latency in seconds as a function of the number of running sequences.

    Returns:
        `pd.DataFrame`: `predicted` and `real` seconds per rollout, by `step` and `micro`.
    """
    rolls = traces.assign(decoded=decoded(traces)).groupby(["step", "micro"])
    predicted = rolls["decoded"].agg(lambda lengths: rollout_time(lengths, latency))
    real = rolls["end_seconds"].max() - rolls["start_seconds"].min()
    return pd.DataFrame({"predicted": predicted.astype(float), "real": real.astype(float)})
