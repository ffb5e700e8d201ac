"""
Measures the processor time of one training step's decisions on one core.

    python -m benchmarks.decisions [--prompts 512] [--factor 8] [--repeats 15]

Each stage in `STAGES` is a function that makes a part of the decisions for a `Batch`, and may read the results of
earlier stages in it. The step is measured again with `--factor` times the prompts, to show that nothing is quadratic.
Medians are stored.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, main
from trl_darts.policy import BudgetController, LatencyCurve, LengthTracker, allocate_redundancy
from trl_darts.scheduling import CandidateEnded, EngineLoad, FinishReason, GroupPlan, Scheduler, ScheduleSettings


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


def run(shared: Shared, prompts: int, factor: int, repeats: int) -> dict[str, Any]:
    """Measures both sizes."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    larger = measure(prompts * factor, max(3, repeats // 3))
    return {"factor": factor, "seconds": measure(prompts, repeats), "seconds_larger": larger}


BENCHMARK = Benchmark(
    "decisions",
    __doc__,
    {"prompts": (512,)},
    run,
    parts.decisions,
    options={"factor": 8, "repeats": 15},
    quick={"prompts": (64,), "repeats": 3},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
