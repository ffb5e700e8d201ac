"""
The numbers behind the panels: tables from runs and traces, and the steps over which runs can be compared.

Invariants: the log is used only if there are no traces; shares sum to 1; kept, unused and aborted tokens sum to the
generated ones; the parts of a step's time sum to the step's time; numbers of different runs are compared only over the
same steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...policy import rollout_time
from ...scheduling import Occupancy, bubble_ratio
from .runs import OUTCOMES, Run


PHASES, ENGINES = ("generate", "score", "train", "sync"), ("busy", "idle")  # of the trainer, and of the engines
FIRST_SEEN = "new"
FAULTS = {
    "Candidates resumed on another server or later": "darts/rollout/resumed_candidates",
    "Prompts dropped": "darts/rollout/dropped_groups",
    "Reward calls stopped at their deadline": "darts/stream/reward_timeouts",
}
POOL = {stat: f"darts/pool/length_{stat}" for stat in ("mean", "p50", "p99", "max")}
KEPT = {"mean": "completions/mean_length", "max": "completions/max_length"}


@dataclass(frozen=True)
class Window:
    """Steps from `first` to `last`, both included."""

    first: int
    last: int

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        """Returns the rows that lie entirely in it. A row with `num_steps` covers as many steps, up to its own."""
        return table[(_begins(table) >= self.first) & (table.index <= self.last)]

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def common_window(tables: Sequence[pd.DataFrame]) -> Window | None:
    """Returns the steps that all tables cover, if there are any. Empty tables don't count."""
    tables = [table for table in tables if len(table)]
    first = max((int(_begins(table)[0]) for table in tables), default=1)
    last = min((int(table.index[-1]) for table in tables), default=0)
    return Window(first, last) if first <= last else None


def _begins(table: pd.DataFrame) -> Any:
    return table.index.to_numpy() - (table["num_steps"].to_numpy() - 1 if "num_steps" in table else 0)


def in_common(tables: Sequence[pd.DataFrame]) -> tuple[list[pd.DataFrame], Window | None]:
    """Returns the rows of each table in the steps that all of them cover, and these steps."""
    window = common_window(tables)
    return [window.of(table) if window else table.iloc[:0] for table in tables], window


def common_traces(runs: Sequence[Run]) -> tuple[list[pd.DataFrame], Window | None]:
    """Returns each run's candidates in the steps that all runs with traces have, and these steps."""
    tables, window = in_common([run.traces.set_index("step", drop=False) for run in runs])
    return [table.reset_index(drop=True) for table in tables], window


def typical_step(runs: Sequence[Run]) -> int | None:
    """Returns the common step whose rollouts took the (lower) median of time, summed over all runs with traces."""
    seconds = [rollouts(run)["seconds"] for run in runs if not run.traces.empty]
    if not seconds:
        return None
    total = pd.concat(seconds, axis=1, join="inner").sum(axis=1).sort_values(kind="stable")
    return int(total.index[(len(total) - 1) // 2]) if len(total) else None


def decoded(traces: pd.DataFrame) -> pd.Series:
    """Returns the tokens of each candidate that were decoded in this rollout, not in an earlier one."""
    return traces["length"] - traces["num_carried_tokens"]


def ended(traces: pd.DataFrame) -> pd.DataFrame:
    """Returns the candidates whose lengths are final."""
    return traces[~traces["carried_over"]]


def length_stats(run: Run, kept: bool = False) -> pd.DataFrame:
    """
    Returns `mean`, `p50`, `p99` and `max` of the response lengths by step (Figures 14 and 15 of
    [DARTS](https://huggingface.co/papers/2605.30859)), of all candidates or of the `kept` rows. A log may lack some.
    """
    traces = run.traces[run.traces["selected"]] if kept else ended(run.traces)
    if not traces.empty:
        lengths = traces.groupby("step")["length"]
        stats = {"mean": lengths.mean(), "p50": lengths.median(), "p99": lengths.quantile(0.99), "max": lengths.max()}
        return pd.DataFrame(stats).astype(float)
    columns = {stat: run.log[name] for stat, name in (KEPT if kept else POOL).items() if run.logged(name)}
    return pd.DataFrame(columns, index=run.log.index).dropna(how="all")


def length_edges(longest: int, num_bins: int = 32) -> np.ndarray:
    """Returns edges of at most `num_bins` bins of whole tokens, 0 to beyond `longest`, on a logarithmic scale."""
    return np.unique([0, *np.ceil(np.geomspace(1, max(2, longest + 1), num_bins))]).astype(float)


def length_shares(traces: pd.DataFrame, edges: np.ndarray) -> pd.DataFrame:
    """
    Returns the distribution of lengths before and after selection (Figure 10 of
    [DARTS](https://huggingface.co/papers/2605.30859)): by bin, the share of all candidates (`pool`) and of the `kept`
    ones. The edges must cover all lengths.
    """
    parts = {"pool": ended(traces)["length"], "kept": traces["length"][traces["selected"]]}
    counts = {name: np.histogram(lengths, edges)[0] for name, lengths in parts.items()}
    return pd.DataFrame({name: count / max(1, count.sum()) for name, count in counts.items()})


def budget_shares(traces: pd.DataFrame) -> pd.Series:
    """Returns the share of the groups by `num_candidates`, in ascending order."""
    return _groups(traces)["num_candidates"].value_counts(normalize=True).sort_index()


def budget_by_spread(traces: pd.DataFrame, num_bins: int = 5) -> pd.Series:
    """
    Returns the mean number of candidates per prompt, by how much the lengths of the prompt's earlier answers differed:
    the mean over its earlier rollouts of the sample standard deviation, with aborted candidates at the length they had
    ([`LengthTracker`] treats these as lower bounds).

    Bins are `"new"` for prompts without an earlier rollout, then `"1"` (least spread) to `num_bins`, equally full.
    Empty bins are left out.
    """
    groups = _groups(traces)
    earlier = groups.groupby("prompt_key")["spread"].transform(lambda spread: spread.expanding().mean().shift())
    rank = earlier.rank(method="first")  # breaks ties, so that bins are equally full
    bins = np.ceil(rank * num_bins / max(1, rank.count()))
    label = bins.map(lambda number: FIRST_SEEN if np.isnan(number) else str(int(number)))
    means = groups["num_candidates"].groupby(label).mean()
    return means.reindex([name for name in (FIRST_SEEN, *map(str, range(1, num_bins + 1))) if name in means.index])


def _groups(traces: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per group, in the order of the rollouts: prompt, budget, and the spread of its lengths."""
    grouped = ended(traces).groupby(["step", "micro", "group"], sort=True)
    return grouped.agg(
        prompt_key=("prompt_key", "first"), num_candidates=("num_candidates", "first"), spread=("length", "std")
    )


def occupancy(rollout: pd.DataFrame) -> pd.DataFrame:
    """
    Counts the running candidates of one rollout by outcome (`kept`, `unused`, `aborted`) and in all (`running`), from
    each time in seconds (the index) until the next. The last row is all zeros.
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
    """Returns the share of one rollout's decoding slots that were idle, as `darts/rollout/bubble_ratio`."""
    starts, ends = rollout["start_seconds"], rollout["end_seconds"]
    running = starts.value_counts().sub(ends.value_counts(), fill_value=0).sort_index().cumsum()
    return max(0.0, bubble_ratio(Occupancy(int(running.max()), (ends - starts).sum(), ends.max() - starts.min())))


def rollouts(run: Run) -> pd.DataFrame:
    """
    Returns costs and results of the rollouts by step; from a log, one row per entry that has a rollout.

    Columns are `num_steps` that a row covers, and their `num_rollouts`; sums over these of `seconds`, of the decoded
    tokens `kept`, `unused` and `aborted`, of `candidates` that ended and `rows` trained on; and the means `longest`
    (tokens of the longest candidate) and `bubble`.
    """
    if run.traces.empty:
        return _rollouts_of_log(run)
    traces = run.traces.assign(decoded=decoded(run.traces), ended=~run.traces["carried_over"])
    keys = ["step", "micro"]
    each = traces.groupby(keys)
    tokens = traces.pivot_table("decoded", keys, "outcome", "sum", fill_value=0)
    sums = tokens.reindex(columns=list(OUTCOMES), fill_value=0).assign(
        num_rollouts=1,
        seconds=each["end_seconds"].max() - each["start_seconds"].min(),
        candidates=each["ended"].sum(),
        rows=each["selected"].sum(),
    )
    means = pd.DataFrame(
        {"longest": each["length"].max(), "bubble": each[["start_seconds", "end_seconds"]].apply(bubble)}
    )
    return sums.groupby("step").sum().join(means.groupby("step").mean()).assign(num_steps=1).astype(float)


def _rollouts_of_log(run: Run) -> pd.DataFrame:
    names = {
        "darts/rollout/seconds": "seconds",
        "darts/rollout/generated_tokens": "generated",
        "darts/rollout/kept_tokens": "kept",
        "darts/rollout/aborted_tokens": "aborted",
        "darts/budget/total": "candidates",
        "darts/budget/redundancy": "redundancy",
        "darts/pool/length_max": "longest",
        "darts/rollout/bubble_ratio": "bubble",
    }
    table = run.log.reindex(columns=[*names, "num_steps", "num_rollouts"]).rename(columns=names)
    table = table.query("num_rollouts > 0")
    table = table.assign(
        rows=table["candidates"] / table["redundancy"],
        # An aborted candidate is never kept: a group stops when it has enough complete ones.
        unused=(table["generated"] - table["kept"] - table["aborted"]).clip(lower=0),
    )
    sums = ["seconds", *OUTCOMES, "candidates", "rows"]
    table[sums] = table[sums].mul(table["num_rollouts"], axis=0)
    return table.drop(columns=["generated", "redundancy"]).astype(float)


def time_split(run: Run) -> pd.DataFrame:
    """
    Returns seconds per optimizer step, by log entry: `total` (TRL's `step_time`) and its parts `generate` (with
    `rollout_ahead`, the time that the trainer waited), `score`, `sync` (0 if no weights were sent) and `train` (the
    rest); `busy` and `idle` of the engines; and `num_steps`. NaN if the log lacks a part.
    """
    metrics = ("step_time", "darts/rollout/seconds", "darts/score/seconds", "darts/sync/seconds")
    total, generate, score, sync = (run.log.get(name, pd.Series(np.nan, run.log.index)) for name in metrics)
    decode, generate = generate, run.log.get("darts/rollout/wait_seconds", generate).fillna(generate)
    per_step = run.log["num_rollouts"] / run.log["num_steps"]
    idle = per_step.eq(0)  # a step that reuses an earlier rollout
    split = pd.DataFrame(
        {
            "total": total,
            "generate": (generate * per_step).mask(idle, 0.0),
            "score": (score * per_step).mask(idle, 0.0),
            "busy": (decode * per_step).mask(idle, 0.0).clip(upper=total),
            "sync": sync.fillna(0.0) * per_step.clip(upper=1),  # at most once per optimizer step
            "num_steps": run.log["num_steps"],
        }
    )
    train = total - split["generate"] - split["score"] - split["sync"]
    return split.assign(idle=total - split["busy"], train=train.where(train >= 0))


def reward_curve(run: Run) -> pd.DataFrame:
    """
    Returns `reward` by step, and `seconds`: the sum of `step_time` so far, without evaluation, checkpoints and the
    optimizer's update. NaN after an entry without `step_time`.
    """
    log = run.log.reindex(columns=["reward", "step_time", "num_steps"])
    seconds = (log["step_time"] * log["num_steps"]).cumsum(skipna=False)
    return pd.DataFrame({"reward": log["reward"], "seconds": seconds}).dropna(subset="reward")


def evaluation_curve(run: Run) -> pd.Series:
    """Returns the evaluation reward by the seconds of [`reward_curve`], as far as these are known."""
    known = reward_curve(run)["seconds"].dropna()
    steps = run.evaluations.index[run.evaluations.index <= known.index.max()] if len(known) else []
    seconds = np.interp(steps, [0, *known.index], [0.0, *known])
    return pd.Series(run.evaluations.reindex(steps).to_numpy(), index=seconds)


def faults(run: Run) -> pd.DataFrame:
    """Counts the `FAULTS` in each entry's rollouts, as far as the log has them."""
    counted = {label: run.log[metric].fillna(0.0) for label, metric in FAULTS.items() if run.logged(metric)}
    return pd.DataFrame(counted, index=run.log.index).mul(run.log["num_rollouts"], axis=0)


def predicted_times(traces: pd.DataFrame, latency: Callable[[np.ndarray], np.ndarray]) -> pd.DataFrame:
    """
    Returns the `predicted` seconds of each rollout from its lengths
    ([DARTS](https://huggingface.co/papers/2605.30859), Eq. 4), and the `real` ones, by `step` and `micro`. Candidates
    that were carried over count with the tokens that the rollout decoded.
    """
    rolls = traces.assign(decoded=decoded(traces)).groupby(["step", "micro"])
    predicted = rolls["decoded"].agg(lambda lengths: rollout_time(lengths, latency))
    real = rolls["end_seconds"].max() - rolls["start_seconds"].min()
    return pd.DataFrame({"predicted": predicted.astype(float), "real": real.astype(float)})
