"""
The tables of the DARTS paper in simulation: Table 3 (ablation), 4 (dual-end ratio), 5 (scale) and Figure 8 (tail
batching), beside the paper's numbers.

    python benchmarks/paper_tables.py [--steps 150] [--seeds 3] [--prompts 128]

What is simulated is rollouts: our scheduler and policies on engines that decode at an assumed latency curve. What is
assumed stands at the top of the file and was not tuned to the paper: a log-normal workload in the style of Figure 1,
an H20-like curve, a step of which GRPO's rollouts take about 70 %, and a shaping effect (`Workload.shaping`): in each
step all log-lengths move by `shaping` times the selection effect. It is shown for several values, 0 (nothing is
learned) among them, because the paper's speed-ups are averages over 500 steps in which the policy grew shorter.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from trl_darts.analysis.simulation import ClusterSpec, Estimate, LogNormalLengths, SimulatedTraining, Workload
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings, UniformAdmission


M = 8
LIMIT = 20_480  # DAPO's
# About 14 B parameters on two H20: memory-bound up to some hundred sequences.
CURVE = LatencyCurve([1, 128, 512], [0.016, 0.020, 0.036])
SHAPINGS = (0.0, 0.02, 0.05)
console = Console()


@dataclass(frozen=True)
class Scale:
    """Size of the simulated training."""

    steps: int
    seeds: int
    prompts: int
    num_engines: int = 16  # 32 GPUs, two each
    epochs: int = 10  # so that prompts are known

    def workload(self, shaping: float) -> Workload:
        """Of so many epochs at least."""
        lengths = LogNormalLengths(
            max(self.prompts, self.prompts * self.steps // self.epochs),
            median=1_000.0,
            inter_prompt_std=0.6,
            intra_prompt_std=0.45,
            endless_share=0.002,
        )
        return Workload(
            lengths,
            self.prompts,
            LIMIT,
            prompt_tokens=150,
            train_seconds_per_token=self._train_seconds_per_token,
            shaping=shaping,
            redraws=True,
        )

    @property
    def _train_seconds_per_token(self) -> float:
        """Rollouts of 1,024 responses take some 350 s on 16 engines; 150 s of training make them 70 % of a step."""
        return 150.0 / (1024 * 1_500) * 16 / self.num_engines

    @property
    def cluster(self) -> ClusterSpec:
        """Its engines."""
        return ClusterSpec(CURVE, self.num_engines)


Trainer = Callable[[Scale, float, int], float]  # seconds of a training


def trained(settings: ScheduleSettings, uniform: int | None = None) -> Trainer:
    """Trains with a schedule; `uniform` gives every prompt as many candidates."""

    def run(scale: Scale, shaping: float, seed: int) -> float:
        training = SimulatedTraining(scale.workload(shaping), settings, scale.cluster, seed)
        if uniform is not None:
            training.admission = UniformAdmission(uniform)
        return sum(training.run(scale.steps).step_seconds)

    return run


GRPO = trained(ScheduleSettings("grpo", num_generations=M))
DARTS = ScheduleSettings("darts", num_generations=M, long_end_patience=None)  # as in the paper
TAIL_BATCHING = ScheduleSettings("tail_batching", num_generations=M, prompt_oversampling=1.25)


def speedups(row: Trainer, scale: Scale, shaping: float) -> Estimate:
    """Of a row over GRPO, seed by seed. GRPO selects nothing, so shaping does nothing to it."""
    return Estimate.of([GRPO(scale, 0.0, seed) / row(scale, shaping, seed) for seed in range(scale.seeds)])


def show(title: str, rows: Sequence[tuple[str, str, Trainer, Scale]]) -> None:
    """One table: the paper's number, and ours for each shaping."""
    table = Table(title=title)
    table.add_column("setting")
    table.add_column("paper", justify="right")
    for shaping in SHAPINGS:
        table.add_column(f"ours, shaping {shaping:g}", justify="right")
    for name, paper, row, scale in rows:
        table.add_row(name, paper, *(str(speedups(row, scale, shaping)) for shaping in SHAPINGS))
    console.print(table)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=128)
    args = parser.parse_args()
    scale = Scale(args.steps, args.seeds, args.prompts)
    darts = trained(DARTS)
    bounded = trained(replace(DARTS, long_end_patience=2.0))
    show(
        "Table 3, ablation: speed-up over GRPO (the paper's include streaming, 1.09)",
        [
            ("dual-end, 12 candidates for every prompt", "1.40", trained(DARTS, uniform=12), scale),
            ("+ adaptive allocation (DARTS)", "1.63", darts, scale),
            ("+ bounded wait, patience 2 (ours)", "–", bounded, scale),
        ],
    )
    show(
        "Table 4, L : K of the dual-end selection (the paper's for 7 B and 3 B)",
        [
            (f"{longest} : {M - longest}", paper, trained(replace(DARTS, num_longest=longest)), scale)
            for longest, paper in ((1, "1.45, 1.29"), (2, "1.43, 1.35"), (4, "1.25, 1.15"))
        ],
    )
    show(
        "Table 5, GPUs (two per engine)",
        [
            (f"{2 * engines} GPUs", paper, darts, replace(scale, num_engines=engines))
            for engines, paper in ((8, "1.21"), (16, "1.44"), (32, "1.55"))
        ],
    )
    show(
        "Figure 8, throughput over GRPO (range over the paper's models)",
        [
            # It looks ahead within an epoch, and knows nothing of prompts: one epoch, as of a large data set.
            ("tail batching", "1.07 to 1.62", trained(TAIL_BATCHING), replace(scale, epochs=1)),
            ("DARTS", "1.29 to 1.77", darts, scale),
            ("DARTS, bounded wait (ours)", "–", bounded, scale),
        ],
    )


if __name__ == "__main__":
    main()
