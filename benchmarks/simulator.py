"""
Speed-ups in virtual time: the paper's tables, spare candidates, slots and engines.

    python -m benchmarks.simulator [--parts paper,spare,slots,engines] [--steps 40] [--seeds 3]

paper: Tables 3 (ablation), 4 (dual-end ratio), 5 (scale) and Figure 8 (tail batching) of the DARTS paper, for several
shares of endless answers. The assumptions were not tuned to the paper: a log-normal workload similar to Figure 1, an
H20-like curve, GRPO's rollouts taking about 70 % of a step, and `Workload.shaping`, because the paper's speed-ups are
averages over 500 steps in which answers became shorter.

spare: the default without a guard over GRPO, by `min_num_generations` and the share of endless answers, on published
lengths and latencies.

slots: the same by the number of sequences that are decoded at once, also where all lengths are equal.

engines: the same by the number of engines, on published lengths. With few engines all are full by their latency, and
no limit tells the budget.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.cells import geometric, ratio, table
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.lines import latest, read
from benchmarks.pacing import CURVES
from trl_darts.analysis.simulation import (
    ASSUMED_CLUSTER,
    LLAMA_8B_NIM,
    WORKLOADS,
    ClusterSpec,
    LogNormalLengths,
    Workload,
    compare,
)
from trl_darts.scheduling import ScheduleSettings


M = 8
Lines = list[dict[str, Any]]
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


def paper(steps: int, seeds: int) -> Lines:
    """Speed-ups of whole steps over GRPO, by the share of endless answers."""
    cases = list(product(SHAPINGS, SHARES))
    with ProcessPoolExecutor() as pool:
        every = pool.map(partial(speedups, steps, seeds), *zip(*cases, strict=True))
        return [
            {"shaping": shaping, "share": share, "speedups": found}
            for (shaping, share), found in zip(cases, every, strict=True)
        ]


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
BOTH = {"grpo": GRPO, "default": DEFAULT}


def spare(steps: int, seeds: int) -> Lines:
    """Speed-ups of rollouts over GRPO by `min_num_generations`, for some shares of endless answers."""
    settings = {"grpo": GRPO, **{str(least): replace(DEFAULT, min_num_generations=least) for least in SPARE}}
    lines = []
    for share in (0.0, 0.002, 0.01):
        lengths = replace(WORKLOADS["llama_8b_deepscaler"], endless_share=share)
        workload = Workload(lengths, 128, 32_768, redraws=True)
        outcomes = compare(workload, settings, ASSUMED_CLUSTER, steps, seeds)
        lines.append({"share": share, "speedups": {outcome.name: outcome.speedups for outcome in outcomes[1:]}})
    return lines


SLOT_PROMPTS, SLOT_ENGINES = 64, 4
SLOTS = {"N·M/16": 32, "N·M/4": 128, "N·M": 512, "no limit": None}
LENGTHS = {  # deviations of log-lengths between and within prompts, and the share of endless answers
    "all equal": (0.0, 0.0, 0.0),
    "equal within a prompt": (0.7, 0.0, 0.0),
    "heavy tails": (0.7, 0.6, 0.0),
    "0.2 % never end": (0.7, 0.6, 0.002),
    "1 % never end": (0.7, 0.6, 0.01),
}


def slots(steps: int, seeds: int) -> Lines:
    """Speed-ups of the default's rollouts over GRPO, by lengths and slots."""
    lines = []
    for name, (between, within, endless) in LENGTHS.items():
        lengths = LogNormalLengths(1_024, 2_748.0, between, within, endless_share=endless)
        workload, found = Workload(lengths, SLOT_PROMPTS, 32_768, redraws=True), {}
        for label, limit in SLOTS.items():
            cluster = ClusterSpec(LLAMA_8B_NIM, SLOT_ENGINES, max_num_seqs=limit and limit // SLOT_ENGINES)
            found[label] = compare(workload, BOTH, cluster, steps, seeds)[1].speedups
        lines.append({"lengths": name, "speedups": found})
    return lines


def engines(steps: int, seeds: int) -> Lines:
    """Speed-ups of the default's rollouts over GRPO, by published lengths and the number of engines."""
    lines = []
    for name, lengths in WORKLOADS.items():
        workload = Workload(lengths, 128, 32_768, redraws=True)
        clusters = {str(number): ClusterSpec(LLAMA_8B_NIM, number) for number in (1, 2, 4, 8)}
        found = {number: compare(workload, BOTH, own, steps, seeds)[1].speedups for number, own in clusters.items()}
        lines.append({"lengths": name, "speedups": found})
    return lines


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


def tables(results: Path) -> str:
    """Returns the tables of the parts that have lines."""
    lines = read(results / "simulator.jsonl")
    kinds = {"paper": paper_tables, "spare": spare_table, "slots": slots_table, "engines": engines_table}
    return "\n\n".join(kinds[part](lines) for part in kinds if any(line["part"] == part for line in lines))


PARTS = {"paper": (paper, 40, 3), "spare": (spare, 50, 5), "slots": (slots, 24, 3), "engines": (engines, 50, 5)}


def run(shared: Shared, part: str, steps: int, seeds: int) -> Lines:
    """Computes a part."""
    compute, usual_steps, usual_seeds = PARTS[part]
    size = {"steps": steps or usual_steps, "seeds": seeds or usual_seeds}
    return [{**size, **line} for line in compute(**size)]


BENCHMARK = Benchmark(
    "simulator",
    __doc__,
    {"part": list(PARTS)},
    run,
    tables,
    options={"steps": 0, "seeds": 0},
    quick={"steps": 2, "seeds": 1},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
