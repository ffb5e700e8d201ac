"""
The numbers behind each panel: tables in, tables out. Nothing here draws.

Invariants: traces are preferred, the log stands in where there are none; shares sum to 1; kept, unused and aborted
tokens sum to the generated ones.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from .outcomes import OUTCOMES, decoded, ended
from .runs import Run


POOL = {"mean": "length_mean", "p50": "length_p50", "p99": "length_p99", "max": "length_max"}
KEPT = {"mean": "completions/mean_length", "max": "completions/max_length"}
FIRST_SEEN = "new"


def length_stats(run: Run, kept: bool = False) -> pd.DataFrame:
    """
    Response lengths in tokens over training (Figures 14 and 15 of
    [DARTS](https://huggingface.co/papers/2605.30859)).

    Args:
        run ([`Run`]):
            A run.
        kept (`bool`, *optional*, defaults to `False`):
            Of the rows that are trained on instead of all candidates.

    Returns:
        `pd.DataFrame`: `mean`, `p50`, `p99` and `max` by step. From the log, those that it has.
    """
    traces = run.traces[run.traces["selected"]] if kept else ended(run.traces)
    if not traces.empty:
        lengths = traces.groupby("step")["length"]
        stats = {"mean": lengths.mean(), "p50": lengths.median(), "p99": lengths.quantile(0.99), "max": lengths.max()}
        return pd.DataFrame(stats).astype(float)
    names = KEPT if kept else {stat: f"darts/pool/{name}" for stat, name in POOL.items()}
    columns = {stat: run.log[name] for stat, name in names.items() if run.logged(name)}
    return pd.DataFrame(columns, index=run.log.index).dropna(how="all")


def length_shares(traces: pd.DataFrame, edges: np.ndarray) -> pd.DataFrame:
    """
    How lengths are distributed, before and after selection (Figure 10 of
    [DARTS](https://huggingface.co/papers/2605.30859)).

    Args:
        traces (`pd.DataFrame`):
            Candidates.
        edges (`np.ndarray` of shape `(bins + 1,)`):
            Tokens at which bins begin and end, rising. They must cover all lengths.

    Returns:
        `pd.DataFrame` of shape `(bins, 2)`: Shares of the candidates in `pool`, and of the kept ones in `kept`.
    """
    selected = traces["selected"]
    counts = {
        name: np.histogram(part["length"], edges)[0]
        for name, part in (("pool", ended(traces)), ("kept", traces[selected]))
    }
    return pd.DataFrame({name: count / max(1, count.sum()) for name, count in counts.items()})


def length_edges(longest: int, num_bins: int = 32) -> np.ndarray:
    """
    Bins of equal width on a logarithmic scale, each at least one token wide.

    Args:
        longest (`int`):
            The longest response in tokens.
        num_bins (`int`, *optional*, defaults to `32`):
            At most so many.

    Returns:
        `np.ndarray` of shape `(≤ num_bins + 1,)`: Whole tokens, from 0 or 1 beyond `longest`.
    """
    return np.unique([0, *np.ceil(np.geomspace(1, max(2, longest + 1), num_bins))]).astype(float)


def budget_shares(traces: pd.DataFrame) -> pd.Series:
    """
    How many candidates prompts got.

    Args:
        traces (`pd.DataFrame`):
            Candidates.

    Returns:
        `pd.Series`: Share of the groups by `num_candidates`, rising.
    """
    return _groups(traces)["num_candidates"].value_counts(normalize=True).sort_index()


def budget_by_spread(traces: pd.DataFrame, num_bins: int = 5) -> pd.DataFrame:
    """
    Who got the budget: candidates by how much a prompt's earlier answers differed in length. What decides is the same
    quantity, as [`LengthTracker`] estimates it; here it is the mean over all earlier rollouts of the prompt of the
    standard deviation (Bessel's) of its candidates' lengths, with aborted ones at the length they had.

    Args:
        traces (`pd.DataFrame`):
            Candidates.
        num_bins (`int`, *optional*, defaults to `5`):
            Bins of equally many groups, by rank.

    Returns:
        `pd.DataFrame`: `candidates` (mean), `spread` (mean, in tokens) and `groups` (count) by bin: `"new"` for
        prompts without an earlier rollout, then `"1"` (least spread) to `num_bins`. Empty bins are left out.
    """
    groups = _groups(traces)
    earlier = groups.groupby("prompt_key")["spread"].transform(lambda spread: spread.expanding().mean().shift())
    rank = earlier.rank(method="first")  # ties are broken by order, so that bins are equally full
    bins = np.ceil(rank * num_bins / max(1, rank.count()))
    label = bins.map(lambda number: FIRST_SEEN if np.isnan(number) else str(int(number)))
    table = groups.assign(earlier=earlier, bin=label).groupby("bin")
    stats = table.agg(candidates=("num_candidates", "mean"), spread=("earlier", "mean"), groups=("earlier", "size"))
    order = [FIRST_SEEN, *map(str, range(1, num_bins + 1))]
    return stats.reindex([name for name in order if name in stats.index])


def occupancy(rollout: pd.DataFrame) -> pd.DataFrame:
    """
    How many candidates ran over time, by what became of them.

    Args:
        rollout (`pd.DataFrame`):
            The candidates of one rollout.

    Returns:
        `pd.DataFrame`: `kept`, `unused`, `aborted` and their sum `running`, from each time in seconds (the index)
        until the next. The last row is all zeros.
    """
    begin = rollout["start_seconds"].min()
    changes = [
        pd.DataFrame({"seconds": rollout[column] - begin, "outcome": rollout["outcome"], "change": change})
        for column, change in (("start_seconds", 1), ("end_seconds", -1))
    ]
    table = pd.concat(changes).pivot_table("change", "seconds", "outcome", "sum", fill_value=0)
    running = table.reindex(columns=list(OUTCOMES), fill_value=0).sort_index().cumsum().astype(int)
    return running.assign(running=running.sum(axis=1))


def bubble(rollout: pd.DataFrame) -> float:
    """
    Share of the decoding slots that stood idle (SortedRL, Eq. 4), as `darts/rollout/bubble_ratio`.

    Args:
        rollout (`pd.DataFrame`):
            The candidates of one rollout.

    Returns:
        `float`: Between 0 and 1. `0.0` for a rollout that took no time.
    """
    starts, ends = rollout["start_seconds"].to_numpy(), rollout["end_seconds"].to_numpy()
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.repeat([1, -1], len(starts))[order])
    settled = np.append(np.diff(times[order]) > 0, True)  # what happens at one time counts together
    slots = running[settled].max() * (times.max() - times.min())
    return float(max(0.0, 1 - (ends - starts).sum() / slots)) if slots > 0 else 0.0


def rollouts(run: Run) -> pd.DataFrame:
    """
    What each step's rollouts cost and brought.

    Args:
        run ([`Run`]):
            A run.

    Returns:
        `pd.DataFrame`: By step; from the log, one row per entry that has a rollout. `num_steps` (the steps a row
        stands for) and `num_rollouts`; summed over these `seconds`, `kept`, `unused` and `aborted` (tokens that these
        rollouts decoded), `candidates` (that ended) and `rows` (that are trained on); and the means `longest` (tokens
        of the longest candidate) and `bubble`.
    """
    if run.traces.empty:
        return _rollouts_of_log(run)
    traces = run.traces.assign(decoded=decoded(run.traces), ended=~run.traces["carried_over"])
    keys = ["step", "micro"]
    each = traces.groupby(keys)
    tokens = traces.pivot_table("decoded", keys, "outcome", "sum", fill_value=0)
    table = tokens.reindex(columns=list(OUTCOMES), fill_value=0).assign(
        num_rollouts=1,
        seconds=each["end_seconds"].max() - each["start_seconds"].min(),
        candidates=each["ended"].sum(),
        rows=each["selected"].sum(),
    )
    means = pd.DataFrame(
        {"longest": each["length"].max(), "bubble": each[["start_seconds", "end_seconds"]].apply(bubble)}
    )
    return table.groupby("step").sum().join(means.groupby("step").mean()).assign(num_steps=1).astype(float)


def _rollouts_of_log(run: Run) -> pd.DataFrame:
    names = {
        "seconds": "darts/rollout/seconds",
        "generated": "darts/rollout/generated_tokens",
        "kept": "darts/rollout/kept_tokens",
        "aborted": "darts/rollout/aborted_tokens",
        "candidates": "darts/budget/total",
        "redundancy": "darts/budget/redundancy",
        "longest": "darts/pool/length_max",
        "bubble": "darts/rollout/bubble_ratio",
    }
    log = run.log.reindex(columns=[*names.values(), "num_steps", "num_rollouts"])
    table = log.rename(columns={metric: name for name, metric in names.items()}).query("num_rollouts > 0")
    table = table.assign(rows=table["candidates"] / table["redundancy"])
    # An aborted candidate is never kept: a group stops when it has enough complete ones.
    table = table.assign(unused=(table["generated"] - table["kept"] - table["aborted"]).clip(lower=0))
    for name in ("seconds", *OUTCOMES, "candidates", "rows"):
        table[name] *= table["num_rollouts"]
    return table.drop(columns=["generated", "redundancy"]).astype(float)


def _groups(traces: pd.DataFrame) -> pd.DataFrame:
    """One row per group, in the order of the rollouts: prompt, budget, and the spread of its lengths (Bessel's)."""
    grouped = ended(traces).groupby(["step", "micro", "group"], sort=True)
    return grouped.agg(
        prompt_key=("prompt_key", "first"), num_candidates=("num_candidates", "first"), spread=("length", "std")
    )
