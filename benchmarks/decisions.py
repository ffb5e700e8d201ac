"""
Measures the processor time of one training step's decisions on one core.

    python benchmarks/decisions.py [--num-prompts 512] [--factor 8] [--repeats 15] [--check]

Each stage in `STAGES` is a function that makes a part of the decisions for a `Batch`, and may read the results of
earlier stages in it. The step is measured again with `--factor` times the prompts, to show that nothing is quadratic.
With `--check`, the exit status is 1 if a limit is exceeded. Medians are appended to
benchmarks/results/decisions.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lines import record
from trl_darts.policy import BudgetController, LatencyCurve, LengthTracker, allocate_redundancy
from trl_darts.scheduling import CandidateEnded, EngineLoad, FinishReason, GroupPlan, Scheduler, ScheduleSettings


LIMIT_S = 0.050  # for a step with 512 prompts
LIMIT_GROWTH = 1.5  # growth of the time over that of the batch: 12 times for 8 times the prompts
NUM_GENERATIONS, MAX_NUM_GENERATIONS, NUM_LONGEST = 10, 20, 1
POOL_SIZES = (12, 20)  # 16 candidates per prompt on average
CURVE = LatencyCurve([1, 64, 256, 8192], [0.010, 0.012, 0.025, 0.700])


@dataclass
class Batch:
    """Random lengths of one step, and the decisions of the stages."""

    keys: list[int]
    pools: list[tuple[list[int], list[bool]]]  # lengths, complete
    tracker: LengthTracker
    controller: BudgetController
    plans: list[GroupPlan]
    events: list[CandidateEnded]  # in order of arrival, by length
    total: int = 0
    allocation: list[int] = field(default_factory=list)
    selected: list[list[int]] = field(default_factory=list)


def make_batch(num_prompts: int, rng: np.random.Generator) -> Batch:
    """Draws log-normal lengths between and within prompts; 5 to 30 % of a pool are aborted or truncated."""
    keys = rng.integers(-(2**63), 2**63, num_prompts).tolist()
    tracker = LengthTracker()
    controller = BudgetController(NUM_GENERATIONS, MAX_NUM_GENERATIONS, cost_weight=0.001, latency_curve=CURVE)
    pools = []
    for key in keys:
        size = int(rng.integers(POOL_SIZES[0], POOL_SIZES[1] + 1))
        lengths = rng.lognormal(rng.normal(6, 0.5), rng.uniform(0.3, 1.2), size).astype(int) + 1
        bound = int(np.quantile(lengths, 1 - rng.uniform(0.05, 0.3)))
        complete = (lengths <= bound).tolist()
        pools.append((np.minimum(lengths, bound).tolist(), complete))
        tracker.update(key, pools[-1][0], [not done for done in complete])
    tracker.end_step()
    controller.observe(tracker.rho, tracker.dataset_mean)
    plans = [GroupPlan(group_id, len(lengths)) for group_id, (lengths, _) in enumerate(pools)]
    return Batch(keys, pools, tracker, controller, plans, make_events(pools))


def make_events(pools: list[tuple[list[int], list[bool]]]) -> list[CandidateEnded]:
    """Builds the end of every candidate, shortest first. Equal lengths share lists, which the scheduler copies."""
    tokens: dict[int, list[int]] = {}
    events: list[CandidateEnded] = []
    for lengths, complete in pools:
        for length, done in zip(lengths, complete, strict=True):
            chunk = tokens.setdefault(length, [7] * length)
            reason = FinishReason.STOP if done else FinishReason.LENGTH
            events.append(CandidateEnded(len(events), 0, 0, chunk, chunk, reason, float(length)))
    return sorted(events, key=lambda event: event.now)


def budget(batch: Batch) -> None:
    """Decides the number of candidates of the batch."""
    batch.total = batch.controller.total(len(batch.keys), batch.tracker.rho)


def allocate(batch: Batch) -> None:
    """Decides the number of candidates of each prompt."""
    stds = [batch.tracker.std(key) for key in batch.keys]
    batch.allocation = allocate_redundancy(stds, batch.total, NUM_GENERATIONS, MAX_NUM_GENERATIONS)


def schedule(batch: Batch) -> None:
    """Handles all events of the rollout: submissions, aborts and selection."""
    policies = ScheduleSettings(
        num_generations=NUM_GENERATIONS,
        max_num_generations=MAX_NUM_GENERATIONS,
        num_longest=NUM_LONGEST,
        long_end_patience=None,
    ).policies()
    scheduler = Scheduler(policies, NUM_GENERATIONS)
    scheduler.start(batch.plans, [EngineLoad("engine")], 0.0)
    for event in batch.events:
        scheduler.handle(event)
    batch.selected = [group.selected for group in scheduler.result().groups]


def track(batch: Batch) -> None:
    """Updates the statistics of lengths per prompt."""
    for key, (lengths, complete) in zip(batch.keys, batch.pools, strict=True):
        batch.tracker.update(key, lengths, [not done for done in complete])
    batch.tracker.end_step()


def observe(batch: Batch) -> None:
    """Updates the statistics of the data set."""
    batch.controller.observe(batch.tracker.rho, batch.tracker.dataset_mean)


STAGES: tuple[Callable[[Batch], None], ...] = (budget, allocate, schedule, track, observe)


def measure(num_prompts: int, repeats: int) -> dict[str, float]:
    """Returns processor seconds by stage: medians over the steps, without a first one that warms up."""
    batch = make_batch(num_prompts, np.random.default_rng(0))
    gc.collect()
    gc.freeze()  # excludes the batch from collections: real engines hand over its events one by one
    seconds: dict[str, list[float]] = {stage.__name__: [] for stage in STAGES}
    for _ in range(repeats + 1):
        for stage in STAGES:
            gc.collect()  # garbage of earlier steps
            start = time.process_time()
            stage(batch)
            seconds[stage.__name__].append(time.process_time() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def show(small: dict[str, float], large: dict[str, float], num_prompts: int, factor: int) -> None:
    """Prints a table."""
    low, high = POOL_SIZES
    table = Table(title=f"Decisions of one step on one core, {low} to {high} candidates per prompt (median, ms)")
    for title in ("stage", "decision", f"{num_prompts} prompts", f"{num_prompts * factor} prompts", "growth"):
        table.add_column(title, justify="left" if title in ("stage", "decision") else "right")
    for stage in STAGES:
        table.add_row(stage.__name__, stage.__doc__, *_cells(small[stage.__name__], large[stage.__name__]))
    table.add_section()
    table.add_row("total", "", *_cells(sum(small.values()), sum(large.values())))
    Console().print(table)


def _cells(small: float, large: float) -> tuple[str, str, str]:
    return f"{small * 1e3:.2f}", f"{large * 1e3:.2f}", f"{large / small:.1f} x"


def main() -> int:
    """Runs the benchmark and checks the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument(
        "--factor", type=int, default=8, help="size of the larger batch in multiples of the smaller one"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    small = measure(args.num_prompts, args.repeats)
    large = measure(args.num_prompts * args.factor, max(3, args.repeats // 3))
    show(small, large, args.num_prompts, args.factor)
    sizes = {"prompts": args.num_prompts, "factor": args.factor}
    record("decisions", {**sizes, "seconds": small, "seconds_larger": large})
    growth, limit = sum(large.values()) / sum(small.values()), LIMIT_S * args.num_prompts / 512
    exceeded = sum(small.values()) > limit or growth > LIMIT_GROWTH * args.factor
    print(
        f"limits: {limit * 1e3:.0f} ms, growth {LIMIT_GROWTH * args.factor:.0f} x: "
        f"{'exceeded' if exceeded else 'kept'}"
    )
    return int(args.check and exceeded)


if __name__ == "__main__":
    sys.exit(main())
