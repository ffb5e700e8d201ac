"""
What does the default gain when fewer engines share the same batch, so that one more candidate costs more?

    python benchmarks/engines.py [--steps 50] [--seeds 5]

Rollouts of 128 prompts × 8 in virtual time, with the published lengths and latencies of `trl-darts simulate`. Deferral
is off, since it depends on rewards. A line for each number of engines is appended to benchmarks/results/engines.jsonl.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lines import record
from trl_darts.analysis.simulation import ASSUMED_CLUSTER, WORKLOADS, Workload, compare
from trl_darts.scheduling import ScheduleSettings


NUM_ENGINES = (1, 2, 4, 8, 16)
SETTINGS = {name: ScheduleSettings(name, num_generations=8) for name in ("grpo", "darts")}


def main() -> None:
    """Records the speed-ups over GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    workload = Workload(WORKLOADS["llama_8b_deepscaler"], 128, 32_768, redraws=True)
    for num_engines in NUM_ENGINES:
        cluster = replace(ASSUMED_CLUSTER, num_engines=num_engines)
        _, default = compare(workload, SETTINGS, cluster, args.steps, args.seeds)
        record("engines", {**vars(args), "engines": num_engines, "speedups": {"default": default.speedups}})
        print(num_engines, default.speedup, flush=True)


if __name__ == "__main__":
    main()
