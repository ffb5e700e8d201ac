"""
How long the simulator takes for a training of 500 steps with 512 prompts × 16, on one core. The aim is 60 s.

    python benchmarks/simulator_speed.py [--steps 500]
"""

import argparse
import resource
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, SimulatedTraining, Workload
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings


CLUSTER = ClusterSpec(LatencyCurve([1, 64, 256, 1024], [0.010, 0.012, 0.020, 0.062]), num_engines=8)
WORKLOAD = Workload(LogNormalLengths(10_000, endless_share=0.005), prompts_per_step=512, max_completion_length=16_384)
ROWS = {
    "grpo, 512 × 16": ScheduleSettings("grpo", num_generations=16),
    "darts (paper), 512 × 8, up to 16": ScheduleSettings("darts", num_generations=8, long_end_patience=None),
    "darts (paper), 512 × 16, up to 32": ScheduleSettings("darts", num_generations=16, long_end_patience=None),
    "darts, 512 × 16, up to 32": ScheduleSettings("darts", num_generations=16),
}


def main() -> None:
    """Prints seconds per training, and per candidate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    table = Table("training", "candidates", "seconds", "µs per candidate", "MB", title=f"{args.steps} steps")
    for name, settings in ROWS.items():
        start = time.process_time()
        run = SimulatedTraining(WORKLOAD, settings, CLUSTER).run(args.steps)
        seconds, candidates = time.process_time() - start, sum(run.candidates)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        table.add_row(
            name, f"{candidates:,.0f}", f"{seconds:.1f}", f"{seconds / candidates * 1e6:.1f}", f"{memory:.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
