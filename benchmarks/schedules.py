"""
All schedules on the same heavy-tailed lengths: what each saves, what it wastes, and how old its tokens are.

    python benchmarks/schedules.py [--quick] [--only server|simulator]

First on a real vLLM server on CPU, then on simulated clusters of 16, 32 and 64 GPUs. In both, the same training of two
epochs runs under each schedule, as in [`SimulatedTraining`]: admission, rounds, buffer, scheduler and tracker are the
trainer's own. Lengths are drawn once per prompt, epoch and candidate, and are the same for all rows; a candidate that
begins anew has its length again, one that is resumed the rest. Nothing is trained: the versions of the policy are
counted, the weights stay.

TRL's own request, one for the whole batch with n = M, can't be given a length per candidate. The row "grpo" stands for
it: it waits for the same candidates, and `server_overhead.py` has what one request per candidate costs beside it.

Columns:

- seconds: from the first submission to the last end, over all rollouts. Also relative to grpo's, as median and range
  over repeats (server: all rows take one step in turn, so that they see the same weather on a shared machine) or over
  seeds (simulator).
- bubble: slots that stood idle (SortedRL, Eq. 4). Q is the most candidates that ran at once in a rollout. The sorted
  rows run on engines that decode no more than N × M at once, all others queue; there that is Q. In brackets:
  of the rollouts alone that ended while others were under way, without those that wait for the last ones of an epoch
  or of a group of batches.
- wasted: tokens that were decoded and never trained on. Off-policy: tokens trained on that an older policy sampled.
- simulated: the simulator's ratio for the same trace, with latencies that were measured on the server.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.schedule_rows import ROWS, Replay, Row, ServerCluster, Total
from benchmarks.servers import benchmark_server
from benchmarks.simulator import CURVE
from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, Workload
from trl_darts.policy import LatencyCurve


EPOCHS = 2  # in the first, nothing is known of any prompt
PROFILED = (1, 4, 16, 64, 192)  # as many as partial rollout has at once
MAX_MODEL_LEN = 1024
ROOM = 256  # sequences of the server whose slots are not what limits
console = Console(width=160)

Totals = Mapping[str, Sequence[Total]]  # by row, one for each repeat or seed


@dataclass(frozen=True)
class Size:
    """Of a training: N prompts per step, M rows of each, and how many steps an epoch has."""

    prompts: int
    num_generations: int
    median: float
    limit: int
    batches: int = 8

    @property
    def workload(self) -> Workload:
        """p99 / p50 is about 10. Two in 1,000 never end; half of them are of a tenth of the prompts."""
        lengths = LogNormalLengths(self.prompts * self.batches, self.median, 0.7, 0.6, endless_share=0.002)
        return Workload(lengths, self.prompts, self.limit)

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return EPOCHS * self.batches

    def __str__(self) -> str:
        lengths = self.workload.lengths.draw(np.arange(self.prompts * self.batches), self.num_generations, (0, 0))
        low, high = np.percentile(np.minimum(lengths, self.limit), (50, 99))
        return f"{self.prompts} prompts × {self.num_generations}, p50 {low:.0f}, p99 {high:.0f}, limit {self.limit}"


def train(replays: Sequence[Replay], steps: int) -> list[Total]:
    """One step of each in turn; another one begins each time."""
    running = [replay.steps() for replay in replays]
    for step in track(range(steps), "steps", console=console, transient=True):
        for training in islice(cycle(running), step, step + len(running)):
            next(training)
    return [replay.total for replay in replays]


def on_server(size: Size, rows: Sequence[Row], repeats: int) -> None:
    """The first table."""
    servers: dict[bool, ServerCluster] = {}
    with ExitStack() as stack:
        for capped in (False, True):
            slots = size.prompts * size.num_generations if capped else ROOM
            server = benchmark_server(max_model_len=MAX_MODEL_LEN, max_num_seqs=slots)
            url, _ = stack.enter_context(server)
            servers[capped] = ServerCluster(url)
            stack.callback(servers[capped].engine.close)
        num, workload = size.num_generations, size.workload
        cold = ClusterSpec(LatencyCurve([1], [0.01]))
        train([Replay(row, num, workload, cold, servers[row.capped]) for row in rows[:1] + rows[-1:]], 1)
        curve, per_request = servers[False].profile(PROFILED)
        cluster = ClusterSpec(curve, seconds_per_request=per_request)
        measured = [
            train([Replay(row, num, workload, cluster, servers[row.capped]) for row in rows], size.steps)
            for _ in range(repeats)
        ]
    predicted = train([Replay(row, num, workload, cluster) for row in rows], size.steps)
    ms = " / ".join(f"{curve(n) * 1e3:.1f}" for n in PROFILED)
    costs = f"{ms} ms per token at {PROFILED} sequences, {per_request * 1e3:.1f} ms per request"
    show(
        f"Real server: {size}, {size.steps} steps, {repeats} repeats\n{costs}",
        rows,
        {row.name: totals for row, totals in zip(rows, zip(*measured, strict=True), strict=True)},
        dict(zip([row.name for row in rows], predicted, strict=True)),
    )


def on_simulator(size: Size, rows: Sequence[Row], seeds: int, gpus: int) -> None:
    """One further table."""
    cluster = ClusterSpec(CURVE, gpus // 2)
    totals = {
        row.name: [
            train([Replay(row, size.num_generations, size.workload, cluster, seed=seed)], size.steps)[0]
            for seed in range(seeds)
        ]
        for row in rows
    }
    show(f"Simulator, {gpus} GPUs, two per engine: {size}, {size.steps} steps, {seeds} seeds", rows, totals)


def show(title: str, rows: Sequence[Row], totals: Totals, predicted: Mapping[str, Total] | None = None) -> None:
    """Prints a table. The first row is the baseline."""
    table = Table(title=title)
    names = ["seconds", "vs grpo (range)", *(["simulated"] if predicted else []), "expected"]
    for name in ("schedule", *names, "bubble (oversub.)", "wasted", "off-policy", "trained on"):
        table.add_column(name, justify="left" if name in ("schedule", "expected") else "right")
    baseline = rows[0].name
    for row in rows:
        own = Total.median(totals[row.name])
        ratios = [b.seconds / t.seconds for b, t in zip(totals[baseline], totals[row.name], strict=True)]
        cells = [f"{own.seconds:.1f}", f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"]
        if predicted:
            cells.append(f"{predicted[baseline].seconds / predicted[row.name].seconds:.2f}")
        bubbles = f"{own.bubble_ratio:.0%}" + (
            "" if math.isnan(own.oversubscribed) else f" ({own.oversubscribed:.0%})"
        )
        shares = [f"{share:.0%}" for share in (own.wasted, own.off_policy)]
        table.add_row(row.name, *cells, row.expected, bubbles, *shares, f"{own.trained:,.0f}")
    console.print(table)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="of each row on the server")
    parser.add_argument("--seeds", type=int, default=2, help="of each row on the simulator")
    parser.add_argument("--only", choices=["server", "simulator"], help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help="small and noisy: does it run?")
    args = parser.parse_args()
    server = Size(8, 4, 25.0, 200, batches=4) if args.quick else Size(16, 4, 50.0, 600)
    cluster = Size(32, 4, 250.0, 5_120, batches=4) if args.quick else Size(64, 8, 250.0, 5_120)
    if args.quick:
        args.repeats = args.seeds = 1
    if args.only != "simulator":
        on_server(server, ROWS, args.repeats)
    for gpus in () if args.only == "server" else (16, 32, 64):
        on_simulator(cluster, ROWS, args.seeds, gpus)


if __name__ == "__main__":
    main()
