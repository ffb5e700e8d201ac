"""
Compares what the tiny reasoner learns per step, which does not depend on the load of the machine.

    python benchmarks/reasoner.py [--only ahead|drafts] [--quick]

- ahead: the default, the default with `rollout_ahead`, and the latter without importance sampling correction.
- drafts: GRPO on a server without drafts, and on one with ours, which must not change the samples.

Prints means over seeds with 95 % intervals. The arms alternate. Each run takes one to two minutes on two cores.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PrinterCallback


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.servers import training_args
from benchmarks.training import ARMS, BASELINE, DEFAULT
from benchmarks.vllm_server import V1_RUNNER, start_vllm_server
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.simulation import Estimate
from trl_darts.serving.options import SPECULATIVE


REASONER = Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"
CHECKPOINT = str(REASONER / "checkpoint")
STEPS, LAST, SEEDS = 40, 20, 5
COLUMNS = {"reward": "reward", "tokens of an answer": "completions/mean_length"}
Arm = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Fields of the config, and options of the server."""

PARTS: dict[str, dict[str, Arm]] = {
    "ahead": {name: (ARMS[name], {}) for name in (DEFAULT, "default, ahead", "ahead, uncorrected")},
    "drafts": {
        "grpo": (ARMS[BASELINE], {"env": V1_RUNNER}),
        "grpo, drafts": (ARMS[BASELINE], {"env": V1_RUNNER, "speculative_config": SPECULATIVE["suffix"]}),
    },
}


def train(url: str, fields: Mapping[str, Any], steps: int, seed: int) -> list[dict[str, float]]:
    """Returns the log of one run."""
    sys.path.insert(0, str(REASONER))
    from task import accuracy_reward, make_dataset

    sizes = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": 256}
    with tempfile.TemporaryDirectory() as directory:
        args = training_args(url, directory, **sizes, learning_rate=1e-4, max_steps=steps, seed=seed, **fields)
        trainer = DARTSGRPOTrainer(CHECKPOINT, accuracy_reward, args, make_dataset(8 * steps, seed=0))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.vllm_generation.engine.close()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def compare(arms: Mapping[str, Arm], steps: int, seeds: int) -> None:
    """Trains each arm with each seed, and prints a table."""
    logs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in arms}
    with ExitStack() as stack:
        urls: dict[str, str] = {}  # by options: arms with the same ones share a server
        for _, options in arms.values():
            if str(options) not in urls:
                server = stack.enter_context(start_vllm_server(CHECKPOINT, max_model_len=512, **options))
                urls[str(options)] = server.base_url
        for seed, (name, (fields, options)) in product(range(seeds), arms.items()):
            logs[name].append(train(urls[str(options)], fields, steps, seed))
            print(f"seed {seed}, {name}: {means(logs[name][-1:], 'reward', -LAST)}", flush=True)
    parts = [(title, metric, start) for title, metric in COLUMNS.items() for start in (0, -LAST)]
    titles = [f"{title}, {'last ' + str(LAST) if start else f'{steps} steps'}" for title, _, start in parts]
    print(f"| arm | {' | '.join(titles)} |\n| --- |{' ---: |' * len(titles)}")
    for name, runs in logs.items():
        print(f"| {name} | {' | '.join(str(means(runs, metric, start)) for _, metric, start in parts)} |")


def means(runs: Sequence[Sequence[Mapping[str, float]]], metric: str, start: int) -> Estimate:
    """Returns the mean over runs of each run's mean from step `start` on."""
    return Estimate.of([float(np.mean([entry[metric] for entry in run[start:]])) for run in runs])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="smoke test: two steps, one seed")
    options = parser.parse_args()
    for name, arms in PARTS.items():
        if options.only in (None, name):
            compare(arms, *((2, 1) if options.quick else (STEPS, SEEDS)))


if __name__ == "__main__":
    main()
