"""
What one step costs before any training: TRL's M candidates per prompt against DARTS, lengths replayed on a real
server.

    python benchmarks/first_step.py [--base-url URL]

Each candidate's length is drawn once (log-normal within and between prompts) and replayed for every row of the table,
so that all see the same tails. One trace says little, since a single candidate can decide about a step: there are
several, and the range is shown. The history that DARTS allocates by comes from other draws of the same prompts, as
from an earlier epoch. Rows alternate, and medians are printed. This is the price of a step, not the worth of the
method: what the selection does to later lengths is not in it.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import benchmark_server
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.policy import LengthTracker, allocate_redundancy
from trl_darts.scheduling import (
    GroupPlan,
    Occupancy,
    RolloutResult,
    Scheduler,
    Submit,
    bubble_ratio,
    make_policies,
)


EOS_TOKEN = "1"


@dataclass
class Trace:
    """Lengths of the step's candidates, and of an earlier epoch's."""

    lengths: np.ndarray  # (N, M_up)
    history: np.ndarray  # (N, M)


@dataclass
class Row:
    """One way to run the step: candidates per prompt, and the schedule's settings."""

    name: str
    counts: list[int]
    settings: dict


def draw_trace(num_prompts: int, num_generations: int, max_length: int, seed: int) -> Trace:
    """Log-normal: p99 / p50 is about 10; prompts differ in their mean and in their spread."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(3.3, 0.7, (num_prompts, 1))
    spread = rng.uniform(0.3, 1.4, (num_prompts, 1))
    draws = np.exp(rng.normal(mean, spread, (num_prompts, 3 * num_generations)))
    draws = np.clip(draws.astype(int), 2, max_length)
    return Trace(draws[:, : 2 * num_generations], draws[:, 2 * num_generations :])


def make_rows(trace: Trace, num_generations: int, redundancy: float) -> list[Row]:
    """The rows of the table."""
    num_prompts, most = trace.lengths.shape
    total = int(redundancy * num_prompts * num_generations)
    tracker = LengthTracker()
    for key, lengths in enumerate(trace.history.tolist()):
        tracker.update(key, lengths)
    stds = [tracker.std(key) for key in range(num_prompts)]
    adaptive = allocate_redundancy(stds, total, num_generations, most)
    uniform = allocate_redundancy([float("nan")] * num_prompts, total, num_generations, most)
    paper = {"long_end_patience": None}
    return [
        Row(f"TRL: {num_generations} per prompt", [num_generations] * num_prompts, {"schedule": "grpo"}),
        Row("darts (paper), no history", uniform, paper),
        Row("darts (paper), without tail pruning", adaptive, {**paper, "tail_pruning": False}),
        Row("darts (paper)", adaptive, paper),
        Row("darts, patience 2", adaptive, {"long_end_patience": 2.0}),
    ]


def replay(trace: Trace) -> Callable[[Submit], dict]:
    """Request fields under which the server decodes just as many tokens as the trace says, the last one an EOS."""

    def fields(command: Submit) -> dict:
        length = int(trace.lengths[command.group_id, command.index])
        return {"min_tokens": length - 1, "logit_bias": {EOS_TOKEN: 100}}

    return fields


def run(engine: VLLMServerEngine, row: Row, trace: Trace, num_generations: int, model: str) -> RolloutResult:
    """One rollout of a row."""
    settings = {"schedule": "darts", "num_longest": 1, **row.settings}
    policies = make_policies(num_generations=num_generations, max_num_generations=trace.lengths.shape[1], **settings)
    body = {"model": model, "max_tokens": int(trace.lengths.max()) + 8, "logprobs": 0, "return_token_ids": True}
    plans = [GroupPlan(index, count) for index, count in enumerate(row.counts)]
    prompts = [[ServerPrompt([60 + index % 40, 61])] for index in range(len(plans))]
    return engine.run(Scheduler(policies, num_generations), plans, prompts, body, replay(trace))


@dataclass
class Outcome:
    """A row on one trace: medians over the repeats."""

    seconds: float
    bubble: float
    candidates: int
    tokens: int
    kept: int
    aborted: int
    aborted_tokens: int

    @classmethod
    def of(cls, results: list[RolloutResult]) -> "Outcome":
        """The outcome of the repeats. Tokens differ between them only by when aborts land."""
        occupancies = [Occupancy.of(result) for result in results]
        groups = results[-1].groups
        candidates = [candidate for group in groups for candidate in group.candidates]
        aborted = [candidate for candidate in candidates if candidate.finish_reason.value == "abort"]
        return cls(
            seconds=statistics.median(occupancy.seconds for occupancy in occupancies),
            bubble=statistics.median(bubble_ratio(occupancy) for occupancy in occupancies),
            candidates=len(candidates),
            tokens=sum(candidate.length for candidate in candidates),
            kept=sum(row.length for group in groups for row in group.rows),
            aborted=len(aborted),
            aborted_tokens=sum(candidate.length for candidate in aborted),
        )


def measure(
    engine: VLLMServerEngine, trace: Trace, num_generations: int, redundancy: float, repeats: int
) -> dict[str, Outcome]:
    """All rows on one trace, alternating."""
    model = engine.query(lambda server: server.get("/v1/models"))[0]["data"][0]["id"]
    rows = make_rows(trace, num_generations, redundancy)
    results: dict[str, list[RolloutResult]] = {row.name: [] for row in rows}
    for _ in range(repeats):
        for row in rows:
            results[row.name].append(run(engine, row, trace, num_generations, model))
    return {name: Outcome.of(outcomes) for name, outcomes in results.items()}


def show(measured: list[dict[str, Outcome]], traces: list[Trace], num_generations: int) -> None:
    """Prints the table: medians over the traces, and the range of the speed."""
    flat = [trace.lengths[:, :num_generations] for trace in traces]
    tail = statistics.median(float(np.percentile(f, 99) / np.percentile(f, 50)) for f in flat)
    size = f"{len(flat[0])} prompts × {num_generations}"
    table = Table(title=f"{size}, {len(traces)} traces, p99 / p50 {tail:.1f} in the median")
    for column in ("", "seconds", "speed (range)", "candidates", "tokens", "kept", "aborted (tokens)", "bubble"):
        table.add_column(column, justify="right" if column else "left")
    baseline = next(iter(measured[0]))
    for name in measured[0]:
        speeds = sorted(outcomes[baseline].seconds / outcomes[name].seconds for outcomes in measured)

        def median(field: str, name: str = name) -> float:
            return statistics.median(getattr(outcomes[name], field) for outcomes in measured)

        table.add_row(
            name,
            f"{median('seconds'):.2f}",
            f"{statistics.median(speeds):.2f}x ({speeds[0]:.2f}-{speeds[-1]:.2f})",
            *(f"{median(field):.0f}" for field in ("candidates", "tokens", "kept")),
            f"{median('aborted'):.0f} ({median('aborted_tokens'):.0f})",
            f"{median('bubble'):.2f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="A server that runs; by default one is started.")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1500)
    parser.add_argument("--redundancy", type=float, default=1.5)
    parser.add_argument("--traces", type=int, default=7, help="draws of the lengths, one after the other")
    parser.add_argument("--repeats", type=int, default=3, help="of each row on each trace")
    args = parser.parse_args()
    shape = (args.num_prompts, args.num_generations, args.max_length)
    traces = [draw_trace(*shape, seed) for seed in range(args.traces)]
    # The server must hold all candidates at once, as a GPU would: no queue in front of the tails.
    with benchmark_server(args.base_url, max_num_seqs=1024) as (base_url, _):
        engine = VLLMServerEngine([base_url])
        measured = [measure(engine, trace, args.num_generations, args.redundancy, args.repeats) for trace in traces]
        engine.close()
    show(measured, traces, args.num_generations)


if __name__ == "__main__":
    main()
