"""
Compares all schedules on the same heavy-tailed lengths: seconds, wasted tokens, and the age of trained tokens.

    python benchmarks/schedules.py [--quick] [--only shares|schedules|order|simulator] [--curve llama-8b] [--virtual]

The first three parts run on a real vLLM server at a GPU's pace (see `pacing.py`), and also print the simulator's ratio
for the same trace; `--virtual` prints this alone. The last part runs on simulated clusters of 16, 32 and 64 GPUs.
Tables are appended to benchmarks/results/schedules.jsonl.

- shares: the default against grpo, with and without M_low (`min_num_generations`), for several shares of endless
  answers; and two controls: equal lengths, and a full engine that decodes a sixteenth of a batch at once.
- schedules: every schedule, with 0.2 % of endless answers.
- order: the sorted schedule with the shortest or the longest first, on engines with half a batch of slots.

All rows run the same training loop, see [`SimulatedTraining`], with the trainer's admission, rounds, buffer, scheduler
and tracker. Lengths are drawn once per prompt, epoch and candidate, and are the same for all rows. A restarted
candidate has the same length again. The weights don't change: only the versions of the policy are counted.

TRL's request for a whole batch with n = M can't have a length per candidate. The row "grpo" represents it: it waits
for the same candidates. `server_overhead.py` measures what one request per candidate costs in comparison.

Columns:

- seconds: from the first submission to the last end, over all rollouts. The ratio to grpo's is given as median and
  range over repeats (server: rows alternate step by step, so that the load of a shared machine affects all) or over
  seeds (simulator).
- bubble: share of idle slots (SortedRL, Eq. 4). Q is the largest number of candidates that ran at once in a rollout.
  Engines of the sorted rows decode at most N × M at once, which is their Q, and queue all others. In brackets: only
  rollouts that ended while other prompts were unfinished, so without the last ones of an epoch or a group of batches.
- wasted: share of decoded tokens that are never trained on. Off-policy: share of trained tokens that an older policy
  sampled.
- spread: standard deviation of the batches' mean lengths over their mean.
- simulated: the simulator's ratio for the same trace, at the server's pace.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import requests
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.lines import record
from benchmarks.models import EOS_ID, make_markov_model, make_tokenizer
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, Pace, paced_server, scaled
from benchmarks.simulator import CURVE
from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, SimulatedRun, SimulatedTraining, Workload
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import GroupPlan, Occupancy, RolloutResult, Scheduler, ScheduleSettings, Submit


EPOCHS = 3  # in the first, prompts have no history
MAX_MODEL_LEN = 1024
ROOM = 1024  # slots of a server that never queues
FIRST_TEXT_TOKEN, NUM_TEXT_TOKENS = 3, 96  # tokens of the Markov model that prompts consist of
AUTO = {"long_end_patience": "auto"}
ORDERS = ("shortest", "longest")
BOTH_ENDS = {"selection": "dual_end", **AUTO}
console = Console(width=160)


@dataclass(frozen=True)
class Row:
    """One line of the tables. `capped` rows run on engines that decode at most N × M at once."""

    name: str
    settings: Mapping[str, Any]

    @property
    def capped(self) -> bool:
        """Whether the schedule needs a queue."""
        return str(self.settings["schedule"]) == "sorted"


GRPO, DEFAULT = Row("grpo", {"schedule": "grpo"}), Row("default", {"schedule": "darts"})
ROWS = [
    GRPO,
    Row("darts (paper)", {"schedule": "darts", "long_end_patience": None}),
    Row("darts, patience 2", {"schedule": "darts", "long_end_patience": 2.0}),
    DEFAULT,
    Row("uniform, auto", {"schedule": "darts", "selection": "uniform", **AUTO}),
    Row("tail batching", {"schedule": "tail_batching"}),
    Row("tail batching, dual-end, auto", {"schedule": "tail_batching", **BOTH_ENDS}),
    Row("partial rollout", {"schedule": "partial_rollout"}),
    Row("partial rollout, dual-end, auto", {"schedule": "partial_rollout", **BOTH_ENDS}),
    Row("sorted, on-policy", {"schedule": "sorted", "sorted_mode": "on_policy"}),
    Row("sorted, partial", {"schedule": "sorted", "sorted_mode": "partial"}),
]


@dataclass(frozen=True)
class Size:
    """Size of a run: N prompts per step, M rows of each, steps per epoch, and the distribution of lengths."""

    prompts: int
    num_generations: int
    median: float
    limit: int
    batches: int = 8
    endless_share: float = 0.002  # half of these answers belong to a tenth of the prompts
    equal: bool = False  # whether all lengths are equal; otherwise, p99 / p50 is about 10

    @property
    def workload(self) -> Workload:
        """Returns the workload with these lengths."""
        spread = (0.0, 0.0) if self.equal else (0.7, 0.6)
        lengths = LogNormalLengths(self.prompts * self.batches, self.median, *spread, endless_share=self.endless_share)
        return Workload(lengths, self.prompts, self.limit)

    @property
    def rows(self) -> int:
        """N × M."""
        return self.prompts * self.num_generations

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return EPOCHS * self.batches

    def __str__(self) -> str:
        lengths = self.workload.lengths.draw(np.arange(self.prompts * self.batches), self.num_generations, (0, 0))
        low, high = np.percentile(np.minimum(lengths, self.limit), (50, 99))
        size = f"{self.prompts} prompts × {self.num_generations}, p50 {low:.0f}, p99 {high:.0f}, limit {self.limit}"
        return f"{size}, {self.endless_share:.1%} never end, {self.steps} steps"


class ServerCluster:
    """
    Replaces [`SimulatedCluster`] by real servers, which decode a given number of tokens of each candidate.
    Tail servers take over the last ones.
    """

    eos_id = EOS_ID
    sampling: Mapping[str, Any] = {}

    def __init__(self, *urls: str, tail_urls: Sequence[str] = ()) -> None:
        self.engine = VLLMServerEngine([*urls, *tail_urls], tail_urls=tail_urls)
        self.model = self.engine.query(lambda server: server.get("/v1/models"))[urls[0]]["data"][0]["id"]

    def prompt(self, key: int) -> list[int]:
        """Returns the tokens of a prompt of the workload."""
        return [FIRST_TEXT_TOKEN + place for place in divmod(key, NUM_TEXT_TOKENS)]

    def of_length(self, tokens: int, max_length: int) -> dict[str, Any]:
        """Returns the parameters of an answer with this length. Endless ones are truncated by `max_tokens`."""
        return {"min_tokens": min(tokens - 1, max_length), "logit_bias": {str(self.eos_id): 100}}

    def run(
        self, scheduler: Scheduler, plans: Sequence[GroupPlan], lengths: Sequence[Sequence[int]], max_length: int
    ) -> RolloutResult:
        """Runs one rollout after resetting the prefix cache, as a weight sync does."""

        def fixed(command: Submit) -> dict[str, Any]:
            return self.of_length(lengths[command.group_id][command.index], max_length)

        for url in self.engine.base_urls:
            requests.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()
        prompts = [[ServerPrompt(self.prompt(plan.prompt_key))] for plan in plans]
        body = {
            "model": self.model,
            "max_tokens": max_length,
            "logprobs": 0,
            "return_token_ids": True,
            **self.sampling,
        }
        return self.engine.run(scheduler, plans, prompts, body, fixed)

    def seconds_per_request(self, num_candidates: int, step_seconds: float) -> float:
        """Measures the overhead of a request, with rollouts of one token per candidate."""
        plans = [GroupPlan(index, 1, prompt_key=index) for index in range(num_candidates)]
        grpo = ScheduleSettings("grpo", 1).policies()
        rollouts = (self.run(Scheduler(grpo, 1), plans, [[1]] * num_candidates, 1) for _ in range(4))
        seconds = min(Occupancy.of(result).seconds for result in rollouts)
        return max(0.0, seconds - step_seconds) / num_candidates


@dataclass(frozen=True)
class Total:
    """Totals over all steps of a row's run."""

    seconds: float
    bubble_ratio: float
    oversubscribed: float  # bubble ratio of rollouts that ended while other prompts were unfinished; NaN without any
    wasted: float  # share of decoded tokens that are not trained on
    off_policy: float  # share of trained tokens that an older policy sampled
    trained: float  # tokens
    spread: float  # standard deviation of the batches' mean lengths over their mean

    @classmethod
    def median(cls, totals: Sequence["Total"]) -> "Total":
        """Returns the median of each field."""
        return cls(**{name: statistics.median(getattr(t, name) for t in totals) for name in cls.__annotations__})


class Replay(SimulatedTraining):
    """
    Runs a row step by step, on simulated engines or on `server`. Equal workloads and seeds give equal lengths to all
    rows. A capped row needs a server with as many slots as the batch has rows.
    """

    def __init__(
        self, row: Row, size: Size, spec: ClusterSpec, server: ServerCluster | None = None, seed: int = 0
    ) -> None:
        self.slots = spec.max_num_seqs or (size.rows // spec.num_engines if row.capped else None)
        settings = ScheduleSettings(num_generations=size.num_generations, **row.settings)
        super().__init__(size.workload, settings, replace(spec, max_num_seqs=self.slots), seed)
        if server is not None:
            self.cluster = server  # type: ignore[assignment]
        self.num_engines = spec.num_engines
        self.slot_seconds: list[tuple[float, float, bool]] = []  # per rollout: used, available, oversubscribed
        self.outcome = SimulatedRun()

    def steps(self) -> Iterator[None]:
        """Yields after each optimizer step, endlessly."""
        for step in self.optimizer_steps():
            self.outcome.add(step, self.workload)
            yield

    @property
    def total(self) -> Total:
        """Returns the totals so far. The buffer must be empty, as at the end of an epoch."""
        run = self.outcome
        decoded, trained = sum(run.pool_tokens), sum(run.kept_tokens)
        stale = sum(share * kept for share, kept in zip(run.off_policy_share, run.kept_tokens, strict=True))
        wasted, off_policy = 1 - trained / decoded, stale / trained
        bubbles = self._bubbles(), self._bubbles(True)
        spread = float(np.std(run.mean_kept) / np.mean(run.mean_kept))
        return Total(sum(run.rollout_seconds), *bubbles, wasted, off_policy, trained, spread)

    def _bubbles(self, oversubscribed: bool = False) -> float:
        used, available, _ = np.array([[0, 0, 1], *(own for own in self.slot_seconds if own[2] >= oversubscribed)]).T
        return float(1 - used.sum() / available.sum()) if available.any() else math.nan

    def rollout(self, *args: Any, **kwargs: Any) -> RolloutResult:
        result = super().rollout(*args, **kwargs)
        occupancy = Occupancy.of(result)
        available = (self.slots * self.num_engines if self.slots else occupancy.peak) * occupancy.seconds
        self.slot_seconds.append((slots_used(result, self.slots), available, bool(result.deferred)))
        return result


def slots_used(result: RolloutResult, slots: int | None) -> float:
    """
    Returns the slot-seconds in which candidates were decoded. On an engine with `slots`, others wait in its queue,
    which the scheduler's timeline does not distinguish.
    """
    changes: dict[str, list[tuple[float, int]]] = {}
    for group in [*result.groups, *result.deferred]:
        for candidate in group.candidates:
            if candidate.engine_id is not None:  # otherwise, it was complete before or never submitted
                changes.setdefault(candidate.engine_id, []).extend([(candidate.started, 1), (candidate.ended, -1)])
    area = 0.0
    for own in changes.values():
        times, steps = np.array(sorted(own)).T
        area += float(np.minimum(np.cumsum(steps)[:-1], slots or np.inf) @ np.diff(times))
    return area


def train(replays: Sequence[Replay], steps: int) -> list[Total]:
    """Runs one step of each in turn. The order rotates."""
    running = [replay.steps() for replay in replays]
    for step in track(range(steps), "steps", console=console, transient=True):
        for training in islice(cycle(running), step, step + len(running)):
            next(training)
    return [replay.total for replay in replays]


@contextmanager
def server_of(curve: LatencyCurve, slots: int | None, size: Size) -> Iterator[tuple[ServerCluster, ClusterSpec]]:
    """Yields a warm paced server with `slots`, and its description for the simulator. Prints its pace at the end."""
    with TemporaryDirectory() as directory:
        model_dir = make_markov_model(Path(directory) / "markov", make_tokenizer())
        with paced_server(model_dir, curve, max_model_len=MAX_MODEL_LEN, max_num_seqs=slots or ROOM) as (server, pace):
            cluster = ServerCluster(server.base_url)
            cost = cluster.seconds_per_request(size.rows, curve(min(slots or ROOM, size.rows)))
            before: Pace = pace()
            yield cluster, ClusterSpec(curve, max_num_seqs=slots, seconds_per_request=cost)
            console.print(f"{pace().since(before)}; {cost * 1e3:.1f} ms per request")
            cluster.engine.close()


@dataclass(frozen=True)
class Extent:
    """How often a table is run: on a server, and in the simulator, whose first run has the server's lengths."""

    repeats: int
    seeds: int = 1


def on_server(
    title: str, rows: Sequence[Row], size: Size, curve: LatencyCurve, slots: int | None, extent: Extent
) -> None:
    """Runs all rows on a server, unless there are no repeats, and in the simulator. Prints and records a table."""
    measured, spec = [], ClusterSpec(curve, max_num_seqs=slots)
    if extent.repeats:
        with server_of(curve, slots, size) as (cluster, spec):
            for _ in range(extent.repeats):
                measured.append(train([Replay(row, size, spec, cluster) for row in rows], size.steps))
    predicted = [
        train([Replay(row, size, spec, seed=seed) for row in rows], size.steps) for seed in range(extent.seeds)
    ]
    keep(title, size, rows, measured=measured, simulated=predicted)
    totals = list(zip(*(measured or predicted), strict=True))
    show(f"{title}: {size}, {extent}", rows, totals, predicted[0] if measured else None)


def keep(title: str, size: Size, rows: Sequence[Row], **runs: Sequence[Sequence[Total]]) -> None:
    """Appends a table to the results: of each row the totals of each run, on a server and in the simulator."""
    totals = {
        kind: {
            row.name: [asdict(total) for total in own] for row, own in zip(rows, zip(*every, strict=True), strict=True)
        }
        for kind, every in runs.items()
        if every
    }
    record("schedules", {"title": title, "size": str(size), **totals})


def shares(size: Size, curve: LatencyCurve, extent: Extent) -> None:
    """Runs the default against grpo for growing shares of endless answers, and on the controls."""
    bare = Row("default, M_low = M", {**DEFAULT.settings, "min_num_generations": size.num_generations})
    for share in (0.0, 0.002, 0.01):
        own = replace(size, endless_share=share)
        on_server(f"At a GPU's pace, {share:.1%} never end", [GRPO, DEFAULT, bare], own, curve, None, extent)
    equal = replace(size, median=4 * size.median, endless_share=0.0, equal=True)
    on_server("Control, equal lengths", [GRPO, DEFAULT], equal, curve, None, extent)
    on_server("Control, a full engine", [GRPO, DEFAULT], size, curve, size.rows // 16, extent)


def schedules(size: Size, curve: LatencyCurve, extent: Extent) -> None:
    """Runs every schedule."""
    for capped in (False, True):
        rows = [GRPO, *(row for row in ROWS if row.capped == capped and row is not GRPO)]
        title = "Every schedule" + (", with a queue" if capped else "")
        on_server(title, rows, size, curve, size.rows if capped else None, extent)


def order(size: Size, curve: LatencyCurve, extent: Extent) -> None:
    """Runs the sorted schedule with the shortest and with the longest candidates first."""
    rows = [Row(f"sorted, {first} first", {"schedule": "sorted", "submit_order": first}) for first in ORDERS]
    on_server("Half a batch of slots", [GRPO, *rows], size, curve, size.rows // 2, extent)


def on_simulator(size: Size, seeds: int, gpus: int) -> None:
    """Prints the table of a simulated cluster."""
    spec = ClusterSpec(CURVE, gpus // 2)
    runs = [train([Replay(row, size, spec, seed=seed) for row in ROWS], size.steps) for seed in range(seeds)]
    keep(f"{gpus} GPUs", size, ROWS, simulated=runs)
    show(f"Simulator, {gpus} GPUs, two per engine: {size}, {seeds} seeds", ROWS, list(zip(*runs, strict=True)))


def show(
    title: str, rows: Sequence[Row], totals: Sequence[Sequence[Total]], predicted: Sequence[Total] | None = None
) -> None:
    """Prints a table with the first row as the baseline."""
    table = Table(title=title)
    columns = ["seconds", "vs grpo (range)", "bubble (oversub.)", "wasted", "off-policy", "trained on", "spread"]
    for name in ("schedule", *columns, *(["simulated"] if predicted else [])):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for index, row in enumerate(rows):
        own = Total.median(totals[index])
        ratios = [b.seconds / t.seconds for b, t in zip(totals[0], totals[index], strict=True)]
        over = "" if math.isnan(own.oversubscribed) else f" ({own.oversubscribed:.0%})"
        cells = [
            f"{own.seconds:.1f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{own.bubble_ratio:.0%}{over}",
            f"{own.wasted:.0%}",
            f"{own.off_policy:.0%}",
            f"{own.trained:,.0f}",
            f"{own.spread:.2f}",
        ]
        table.add_row(
            row.name, *cells, *([f"{predicted[0].seconds / predicted[index].seconds:.2f}"] if predicted else [])
        )
    console.print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("shares", "schedules", "order", "simulator")
    parser.add_argument("--repeats", type=int, default=2, help="repeats of each row on the server")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each row on the simulator")
    parser.add_argument("--only", choices=parts, help="run one part")
    parser.add_argument("--curve", choices=CURVES, default="llama-8b", help="latency curve of the server")
    parser.add_argument("--scale", type=float, default=SCALE, help="slowdown factor of that curve")
    parser.add_argument("--virtual", action="store_true", help="simulate alone, without a server")
    parser.add_argument("--quick", action="store_true", help="smoke test: small and noisy")
    args = parser.parse_args()
    server = Size(8, 4, 25.0, 100, batches=2) if args.quick else Size(32, 8, 25.0, 300, batches=4)
    cluster = Size(32, 4, 250.0, 5_120, batches=4) if args.quick else Size(64, 8, 250.0, 5_120)
    if args.quick:
        args.repeats = args.seeds = 1
    extent = Extent(0, args.seeds) if args.virtual else Extent(args.repeats)
    curve = scaled(CURVES[args.curve], args.scale, NUM_ENGINES)
    for part in (args.only,) if args.only else parts:
        if part == "shares":
            shares(server, curve, extent)
        elif part == "schedules":
            schedules(server, curve, extent)
        elif part == "order":
            order(server, curve, extent)
        for gpus in (16, 32, 64) if part == "simulator" else ():
            on_simulator(cluster, args.seeds, gpus)


if __name__ == "__main__":
    main()
