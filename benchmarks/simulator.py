"""
Compares the simulator with a real server and with the paper, and measures its speed.

    python benchmarks/simulator.py parity [--steps 12]
    python benchmarks/simulator.py paper [--steps 40] [--seeds 5]
    python benchmarks/simulator.py speed [--steps 500]

parity: replays rollouts that a trainer recorded, with a curve measured on the same server. Profile and run alternate,
so that the load of a shared machine affects both. The trainer runs with a learning rate of 0. Only the cost of a
request is fitted, with rollouts of one token per candidate.

paper: Tables 3 (ablation), 4 (dual-end ratio), 5 (scale) and Figure 8 (tail batching) of the DARTS paper, for several
shares of endless answers. Writes the results into docs/evidence.md. The assumptions were not tuned to the paper: a
log-normal workload similar to Figure 1, an H20-like curve, GRPO's rollouts taking about 70 % of a step, and
`Workload.shaping`, because the paper's speed-ups are averages over 500 steps in which answers became shorter.

speed: a run of 512 prompts × 16 per step on one core. The target for 500 steps is 60 s.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets import Dataset
from rich.console import Console
from rich.table import Table

from benchmarks.pacing import CURVES
from benchmarks.page import PAGE, put
from benchmarks.servers import benchmark_server, training_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.profile import ProfileOptions, profile_servers
from trl_darts.analysis.simulation import (
    ClusterSpec,
    Estimate,
    LogNormalLengths,
    SimulatedTraining,
    Workload,
    compare,
    recorded_rollouts,
)
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings


M = 8
console = Console()

PROMPTS, LIMIT = 16, 768
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_NUM_SEQS = BATCHES[-1]  # DARTS submits more, so that some wait in the server's queue
ROWS: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "darts (paper)": {"schedule": "darts", "long_end_patience": None},
    "darts": {"schedule": "darts"},
}


def parity(steps: int) -> None:
    """Prints predicted over real seconds, and how many groups have the same rows."""
    table = Table(title=f"{steps} rollouts of {PROMPTS} prompts × {M}, replayed")
    for name in ("schedule", "real (s)", "predicted (s)", "predicted / real", "worst rollout", "same rows"):
        table.add_column(name, justify="right")
    with (
        benchmark_server(max_model_len=1024, max_num_seqs=MAX_NUM_SEQS) as (url, model_dir),
        tempfile.TemporaryDirectory() as out,
    ):
        before = measured_curve(url)
        for name, fields in ROWS.items():
            run_dir = Path(out) / name
            trainer = train(url, model_dir, run_dir, fields, steps)
            after = measured_curve(url)
            curve = LatencyCurve.fit(BATCHES, [(before(size) + after(size)) / 2 for size in BATCHES])
            request = seconds_per_request(url, trainer.vllm_generation.facts.model)
            spec = ClusterSpec(curve, max_num_seqs=MAX_NUM_SEQS, seconds_per_request=request)
            table.add_row(name, *replayed(run_dir, trainer.args.schedule_settings, spec))
            before = after
    console.print(table)


def replayed(run_dir: Path, settings: ScheduleSettings, spec: ClusterSpec) -> list[str]:
    """Replays a run, and returns a row of the table."""
    ratios, real, predicted, same, groups = [], 0.0, 0.0, 0, 0
    for rollout in list(recorded_rollouts(run_dir))[1:]:  # the first one warms up
        result = rollout.replay(settings, spec, LIMIT)
        seconds = result.timeline.times[-1] - result.timeline.times[0]
        ratios.append(seconds / rollout.seconds)
        real, predicted = real + rollout.seconds, predicted + seconds
        same += sum(g.selected == kept for g, kept in zip(result.groups, rollout.selected, strict=True))
        groups += len(rollout.plans)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    shares = [f"{statistics.median(ratios):.2f}", f"{worst:.2f}"]
    return [f"{real:.2f}", f"{predicted:.2f}", *shares, f"{same} of {groups}"]


def measured_curve(url: str) -> LatencyCurve:
    """Measures the curve up to the largest batch of the rollouts."""
    options = ProfileOptions((url,), batch_sizes=BATCHES, context_lengths=(128,), repeats=2)
    return profile_servers(options).profile.curve


def seconds_per_request(url: str, model: str) -> float:
    """Measures the cost of a request, with rollouts of one token per candidate."""
    engine = VLLMServerEngine([url])
    body = {"model": model, "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
    prompts = [[ServerPrompt([60 + index % 40, 61])] for index in range(PROMPTS)]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        scheduler = Scheduler(ScheduleSettings("grpo", M).policies(), M)
        engine.run(scheduler, [GroupPlan(index, M) for index in range(PROMPTS)], prompts, body)
        times.append((time.perf_counter() - start) / (PROMPTS * M))
    engine.close()
    return min(times)


def train(url: str, model_dir: Path, out: Path, fields: dict[str, Any], steps: int) -> DARTSGRPOTrainer:
    """Runs the trainer on the server, and records its rollouts."""
    args = training_args(
        url,
        out,
        **fields,
        num_generations=M,
        per_device_train_batch_size=PROMPTS * M,
        max_completion_length=LIMIT,
        max_steps=steps,
        learning_rate=0.0,
        save_rollout_trace=True,
    )
    prompts = Dataset.from_list([{"prompt": f"{index}:"} for index in range(PROMPTS)])
    trainer = DARTSGRPOTrainer(str(model_dir), reward_funcs=length_reward, args=args, train_dataset=prompts)
    trainer.train()
    return trainer


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Returns rewards that differ between rows."""
    return [float(len(ids) % 7) for ids in completion_ids]


CURVE = CURVES["darts"]
SHARES = (0.0, 0.0003, 0.001, 0.002, 0.01)
SHAPINGS = (0.0, 0.05)
GRPO = ScheduleSettings("grpo", num_generations=M)


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's tables with its settings and speed-ups."""

    name: str
    paper: tuple[float, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    num_engines: int = 16  # 32 GPUs, two each
    epochs: int = 10  # so that prompts have a history
    streaming: float = 1.09  # the paper's speed-up by streaming (Table 3), which is not simulated

    @property
    def settings(self) -> ScheduleSettings:
        """The paper's settings with the row's fields."""
        return ScheduleSettings(**{"long_end_patience": None, "num_generations": M, **self.fields})


EVERYWHERE_12 = {"min_num_generations": 12, "max_num_generations": 12, "tail_pruning": False}
PAPER = [
    PaperRow("Table 3: dual-end, 12 for every prompt", (1.40,), EVERYWHERE_12),
    PaperRow("Tables 3, 4, 5: DARTS, L : K = 1 : 7, 32 GPUs", (1.63, 1.45, 1.44)),
    PaperRow("Table 4: 2 : 6", (1.43,), {"num_longest": 2}),
    PaperRow("Table 4: 4 : 4", (1.25,), {"num_longest": 4}),
    PaperRow("Table 5: 16 GPUs", (1.21,), num_engines=8),
    PaperRow("Table 5: 64 GPUs", (1.55,), num_engines=32),
    # Tail batching takes prompts ahead within an epoch, and needs no history: one epoch, as with a large data set.
    PaperRow("Figure 8: tail batching, at most", (1.62,), {"schedule": "tail_batching"}, epochs=1, streaming=1.0),
    PaperRow("our default", (), {"long_end_patience": "auto"}),
    PaperRow("our default, M_low = M", (), {"long_end_patience": "auto", "min_num_generations": M}),
]


def paper(steps: int, seeds: int) -> None:
    """Writes speed-ups of whole steps over GRPO into the page, by the share of endless answers."""
    with ProcessPoolExecutor() as pool:
        tables = [list(pool.map(partial(speedups, steps, seeds, shaping), SHARES)) for shaping in SHAPINGS]
    lines = [f"{steps} steps of 128 prompts × {M}, {seeds} seeds."]
    for shaping, columns in zip(SHAPINGS, tables, strict=True):
        lines += ["", f"Shaping {shaping:g}:" if shaping else "Without shaping:", "", *markdown(columns)]
    PAGE.write_text(put(PAGE.read_text(), "simulated", "simulator.py", "\n".join(lines)))


def speedups(steps: int, seeds: int, shaping: float, share: float) -> list[Estimate]:
    """Returns the speed-up of each row over GRPO on the same engines and prompts."""
    found: dict[str, Estimate] = {}
    for num_engines, epochs in {(row.num_engines, row.epochs) for row in PAPER}:
        # GRPO's rollouts of 1,024 responses take some 350 s on 16 engines; 150 s of training make them 70 % of a step.
        workload = Workload(
            LogNormalLengths(max(128, 128 * steps // epochs), 1_000.0, 0.6, 0.45, endless_share=share),
            128,
            20_480,
            prompt_tokens=150,
            train_seconds_per_token=150.0 / (1024 * 1_500) * 16 / num_engines,
            shaping=shaping,
            redraws=True,
        )
        rows = {row.name: row.settings for row in PAPER if (row.num_engines, row.epochs) == (num_engines, epochs)}
        outcomes = compare(workload, {"grpo": GRPO, **rows}, ClusterSpec(CURVE, num_engines), steps, seeds)
        found |= {outcome.name: outcome.speedup for outcome in outcomes}
    return [found[row.name] for row in PAPER]


def markdown(columns: Sequence[Sequence[Estimate]]) -> list[str]:
    """Formats a table with one column per share, and the share that gives the paper's number."""
    shares = " | ".join(f"{share:.2%}" for share in SHARES)
    lines = [f"| never-ending answers | {shares} | gives the paper's |", f"|---|{'---:|' * (len(SHARES) + 1)}"]
    for row, own in zip(PAPER, zip(*columns, strict=True), strict=True):
        cells = " | ".join(f"{estimate.mean:.2f} ± {estimate.half_width:.2f}" for estimate in own)
        paper = f" (**{', '.join(f'{number:.2f}' for number in row.paper)}**)" if row.paper else ""
        means = [estimate.mean for estimate in own]
        reached = ", ".join(share_of(number / row.streaming, means) for number in row.paper) or "–"
        lines.append(f"| {row.name}{paper} | {cells} | {reached} |")
    return lines


def share_of(target: float, means: Sequence[float]) -> str:
    """Interpolates the share that gives a speed-up."""
    for (low, left), (high, right) in pairwise(zip(SHARES, means, strict=True)):
        if left != right and (left - target) * (target - right) >= 0:
            return f"{low + (high - low) * (left - target) / (left - right):.2%}"
    return "none" if target > max(means) else f"over {SHARES[-1]:.1%}"


def speed(steps: int) -> None:
    """Prints processor seconds per run and per candidate."""
    curve = LatencyCurve([1, 64, 256, 1024], [0.010, 0.012, 0.020, 0.062])
    workload = Workload(LogNormalLengths(10_000, endless_share=0.005), 512, 16_384)
    table = Table("run", "candidates", "seconds", "µs per candidate", title=f"{steps} steps of 512 × 16")
    for name, fields in ROWS.items():
        start = time.process_time()
        settings = ScheduleSettings(num_generations=16, **fields)
        run = SimulatedTraining(workload, settings, ClusterSpec(curve, num_engines=8)).run(steps)
        seconds, candidates = time.process_time() - start, sum(run.candidates)
        table.add_row(name, f"{candidates:,.0f}", f"{seconds:.1f}", f"{seconds / candidates * 1e6:.1f}")
    console.print(table)


def main() -> None:
    """Runs one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[..., None]] = {"parity": parity, "paper": paper, "speed": speed}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the paper's tables")
    args = parser.parse_args()
    steps = args.steps or {"parity": 12, "paper": 40, "speed": 500}[args.part]
    parts[args.part](steps, *([args.seeds] if args.part == "paper" else []))


if __name__ == "__main__":
    main()
