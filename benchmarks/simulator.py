"""
Compares the simulator with a real server and with the paper, and measures its speed.

    python benchmarks/simulator.py parity [--steps 12]
    python benchmarks/simulator.py paper [--steps 40] [--seeds 3]
    python benchmarks/simulator.py spare [--steps 50] [--seeds 5]
    python benchmarks/simulator.py slots [--steps 24] [--seeds 3]
    python benchmarks/simulator.py engines [--steps 50] [--seeds 5]
    python benchmarks/simulator.py speed [--steps 500]

parity: replays rollouts that a trainer recorded, with a curve measured on the same server. Profile and run alternate,
so that the load of a shared machine affects both. The trainer runs with a learning rate of 0. Only the cost of a
request is fitted, with rollouts of one token per candidate.

paper: Tables 3 (ablation), 4 (dual-end ratio), 5 (scale) and Figure 8 (tail batching) of the DARTS paper, for several
shares of endless answers. The assumptions were not tuned to the paper: a log-normal workload similar to Figure 1, an
H20-like curve, GRPO's rollouts taking about 70 % of a step, and `Workload.shaping`, because the paper's speed-ups are
averages over 500 steps in which answers became shorter.

spare: the default without a guard over GRPO, by `min_num_generations` and the share of endless answers, on published
lengths and latencies.

slots: the same by the number of sequences that are decoded at once, also where all lengths are equal.

engines: the same by the number of engines, on published lengths. With few engines all are full by their latency, and
no limit tells the budget.

speed: a run of 512 prompts × 16 per step on one core. The target for 500 steps is 60 s.

Results are appended to benchmarks/results/simulator.jsonl, from which `python -m benchmarks.report` makes the tables.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets import Dataset
from rich.console import Console

from benchmarks.cells import geometric, ratio, table
from benchmarks.lines import latest, record
from benchmarks.pacing import CURVES
from benchmarks.servers import benchmark_server, training_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.profile import ProfileOptions, profile_servers
from trl_darts.analysis.simulation import (
    ASSUMED_CLUSTER,
    LLAMA_8B_NIM,
    WORKLOADS,
    ClusterSpec,
    LogNormalLengths,
    RecordedRun,
    SimulatedTraining,
    Workload,
    compare,
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
    """Records real and predicted seconds, and how many groups have the same rows."""
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
            keep("parity", schedule=name, **replayed(run_dir, trainer.args, spec))
            before = after


def replayed(run_dir: Path, settings: ScheduleSettings, spec: ClusterSpec) -> dict[str, Any]:
    """Replays a run, and returns real and predicted seconds, and how many groups have the same rows."""
    real, predicted, same, groups = [], [], 0, 0
    for rollout in list(RecordedRun(run_dir).rollouts())[1:]:  # the first one warms up
        result = rollout.replay(settings, spec, LIMIT)
        real.append(rollout.seconds)
        predicted.append(result.timeline.times[-1] - result.timeline.times[0])
        same += sum(g.selected == kept for g, kept in zip(result.groups, rollout.selected, strict=True))
        groups += len(rollout.plans)
    return {"real": real, "predicted": predicted, "same": same, "groups": groups}


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
    """Records speed-ups of whole steps over GRPO, by the share of endless answers."""
    cases = list(product(SHAPINGS, SHARES))
    with ProcessPoolExecutor() as pool:
        every = pool.map(partial(speedups, steps, seeds), *zip(*cases, strict=True))
        for (shaping, share), found in zip(cases, every, strict=True):
            keep("paper", steps=steps, seeds=seeds, shaping=shaping, share=share, speedups=found)


def keep(part: str, **line: Any) -> None:
    """Prints and appends a result."""
    console.print({"part": part, **line})
    record("simulator", {"part": part, **line})


def speedups(steps: int, seeds: int, shaping: float, share: float) -> dict[str, list[float]]:
    """Returns the speed-ups of each row over GRPO on the same engines and prompts, seed by seed."""
    found: dict[str, list[float]] = {}
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
        found |= {outcome.name: outcome.speedups for outcome in outcomes}
    return {row.name: found[row.name] for row in PAPER}


SPARE = (8, 9, 10, 11, 12)  # `min_num_generations`
DEFAULT = ScheduleSettings("darts", num_generations=M)


def spare(steps: int, seeds: int) -> None:
    """Records speed-ups of rollouts over GRPO by `min_num_generations`, for some shares of endless answers."""
    settings = {str(least): replace(DEFAULT, min_num_generations=least) for least in SPARE}
    for share in (0.0, 0.002, 0.01):
        lengths = replace(WORKLOADS["llama_8b_deepscaler"], endless_share=share)
        workload = Workload(lengths, 128, 32_768, redraws=True)
        outcomes = compare(workload, {"grpo": GRPO, **settings}, ASSUMED_CLUSTER, steps, seeds)
        found = {outcome.name: outcome.speedups for outcome in outcomes[1:]}
        keep("spare", steps=steps, seeds=seeds, share=share, speedups=found)


SLOT_PROMPTS, SLOT_ENGINES = 64, 4
SLOTS = {"N·M/16": 32, "N·M/4": 128, "N·M": 512, "no limit": None}
LENGTHS = {  # deviations of log-lengths between and within prompts, and the share of endless answers
    "all equal": (0.0, 0.0, 0.0),
    "equal within a prompt": (0.7, 0.0, 0.0),
    "heavy tails": (0.7, 0.6, 0.0),
    "0.2 % never end": (0.7, 0.6, 0.002),
    "1 % never end": (0.7, 0.6, 0.01),
}


def slots(steps: int, seeds: int) -> None:
    """Records speed-ups of the default's rollouts over GRPO, by lengths and slots."""
    for name, (between, within, endless) in LENGTHS.items():
        lengths = LogNormalLengths(1_024, 2_748.0, between, within, endless_share=endless)
        workload, found = Workload(lengths, SLOT_PROMPTS, 32_768, redraws=True), {}
        for label, limit in SLOTS.items():
            cluster = ClusterSpec(LLAMA_8B_NIM, SLOT_ENGINES, max_num_seqs=limit and limit // SLOT_ENGINES)
            settings = {"grpo": GRPO, "default": DEFAULT}
            found[label] = compare(workload, settings, cluster, steps, seeds)[1].speedups
        keep("slots", steps=steps, seeds=seeds, lengths=name, speedups=found)


def engines(steps: int, seeds: int) -> None:
    """Records speed-ups of the default's rollouts over GRPO, by published lengths and the number of engines."""
    for name, lengths in WORKLOADS.items():
        found = {}
        for number in (1, 2, 4, 8):
            cluster = ClusterSpec(LLAMA_8B_NIM, number)
            settings = {"grpo": GRPO, "default": DEFAULT}
            outcomes = compare(Workload(lengths, 128, 32_768, redraws=True), settings, cluster, steps, seeds)
            found[str(number)] = outcomes[1].speedups
        keep("engines", steps=steps, seeds=seeds, lengths=name, speedups=found)


def speed(steps: int) -> None:
    """Records processor seconds and candidates of a run of each schedule."""
    curve = LatencyCurve([1, 64, 256, 1024], [0.010, 0.012, 0.020, 0.062])
    workload = Workload(LogNormalLengths(10_000, endless_share=0.005), 512, 16_384)
    for name, fields in ROWS.items():
        start = time.process_time()
        settings = ScheduleSettings(num_generations=16, **fields)
        run = SimulatedTraining(workload, settings, ClusterSpec(curve, num_engines=8)).run(steps)
        seconds = time.process_time() - start
        keep("speed", schedule=name, steps=steps, seconds=seconds, candidates=int(sum(run.candidates)))


# The report


def paper_tables(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table for each shaping: rows of the paper, speed-ups by the share of endless answers."""
    own = [*latest(lines, "shaping", "share", part="paper").values()]
    parts = [f"{own[0]['steps']} steps of 128 prompts × {M}, {own[0]['seeds']} seeds."]
    for shaping in dict.fromkeys(line["shaping"] for line in own):
        by_share = {line["share"]: line["speedups"] for line in own if line["shaping"] == shaping}
        parts += [
            f"Shaping {shaping:g}:" if shaping else "Without shaping:",
            shares_table(by_share),
            where_table(by_share),
        ]
    return "\n\n".join(parts)


SHOWN = (0.0, 0.0003, 0.002, 0.01)


def shares_table(by_share: Mapping[float, Mapping[str, Sequence[float]]]) -> str:
    """Speed-ups of all rows."""
    shares = [share for share in SHOWN if share in by_share]
    rows = [[row.name, *(ratio(by_share[share][row.name]) for share in shares)] for row in PAPER]
    return table(["never-ending answers", *(f"{share:.2%}" for share in shares)], rows)


def where_table(by_share: Mapping[float, Mapping[str, Sequence[float]]]) -> str:
    """The paper's numbers, and the shares of endless answers that give them."""
    rows = []
    for row in [row for row in PAPER if row.paper]:
        means = {share: geometric(found[row.name])[0] for share, found in by_share.items()}
        where = ", ".join(share_of(number / row.streaming, means) for number in row.paper)
        rows.append([row.name, ", ".join(f"{number:.2f}" for number in row.paper), where])
    return table(["row", "the paper's speed-up", "share that gives it"], rows)


def share_of(target: float, means: Mapping[float, float]) -> str:
    """Interpolates the share that gives a speed-up."""
    for (low, left), (high, right) in pairwise(means.items()):
        if left != right and (left - target) * (target - right) >= 0:
            return f"{low + (high - low) * (left - target) / (left - right):.2%}"
    return "none" if target > max(means.values()) else f"over {max(means):.1%}"


def spare_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for each `min_num_generations`."""
    own = [*latest(lines, "share", part="spare").values()]
    rows = [[least, *(ratio(line["speedups"][least]) for line in own)] for least in own[0]["speedups"]]
    return table(["`min_num_generations`", *(f"{line['share']:.1%} never end" for line in own)], rows)


def slots_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for each kind of lengths."""
    own = [*latest(lines, "lengths", part="slots").values()]
    return table(["lengths", *SLOTS], [[line["lengths"], *map(ratio, line["speedups"].values())] for line in own])


def engines_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for each workload."""
    own = [*latest(lines, "lengths", part="engines").values()]
    header = ["lengths", *(f"{number} engines" for number in own[0]["speedups"])]
    return table(header, [[line["lengths"], *map(ratio, line["speedups"].values())] for line in own])


def main() -> None:
    """Runs one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timed: dict[str, tuple[Callable[[int], None], int]] = {"parity": (parity, 12), "speed": (speed, 500)}
    virtual = {"paper": (paper, 40, 3), "spare": (spare, 50, 5), "slots": (slots, 24, 3), "engines": (engines, 50, 5)}
    parser.add_argument("part", choices=[*timed, *virtual])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, help="of the parts in virtual time")
    args = parser.parse_args()
    if args.part in timed:
        run, steps = timed[args.part]
        run(args.steps or steps)
    else:
        compute, steps, seeds = virtual[args.part]
        compute(args.steps or steps, args.seeds or seeds)


if __name__ == "__main__":
    main()
