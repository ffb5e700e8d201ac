"""
Compares what the tiny reasoner learns per step, which does not depend on the load of the machine.

    python benchmarks/reasoner.py [--only ahead|drafts|accuracy] [--quick]

- ahead: the default, the default with `rollout_ahead`, and the latter without importance sampling correction.
- drafts: GRPO on a server without drafts, and on one with ours, which must not change the samples.
- accuracy: does the default learn what GRPO learns? Hard chains, for which longer answers are more often right; the
  metric, named before any run, is accuracy on prompts that are not trained on, 16 answers to each of 100. The default
  is not inferior if the lower end of the 95 % interval of the paired difference, over 10 seeds, is above -0.02. Runs
  are kept in `benchmarks/results`, and a later call runs what is missing.

Prints means over seeds with 95 % intervals; runs of the first two parts are appended to
benchmarks/results/reasoner.jsonl. The arms alternate. Each run takes one to two minutes on two cores.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PrinterCallback


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cells
from benchmarks.lines import append, read, record
from benchmarks.servers import training_args
from benchmarks.training import ARMS, BASELINE, DEFAULT
from benchmarks.vllm_server import V1_RUNNER, start_vllm_server
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.simulation import Estimate
from trl_darts.serving.options import SPECULATIVE


REASONER = Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"
CHECKPOINT = str(REASONER / "checkpoint")
STEPS, LAST, SEEDS = 40, 20, 5
ACCURACY_SEEDS, MARGIN = 10, 0.02
ACCURACY_ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "default": {"defer_unsettled_groups": None},
    "unguarded": {},
}
RESULTS = Path(__file__).resolve().parent / "results" / "reasoner.accuracy.jsonl"
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


def train(
    url: str, fields: Mapping[str, Any], steps: int, seed: int, num_tests: int = 0, **data: Any
) -> list[dict[str, float]]:
    """Returns the log of one run, and at its end that of an evaluation if `num_tests` is not 0."""
    sys.path.insert(0, str(REASONER))
    from task import accuracy_reward, make_dataset

    sizes = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": 256}
    sizes |= {"num_generations_eval": 16, "per_device_eval_batch_size": 160}
    tests = make_dataset(num_tests, seed=0, split="test", **data) if num_tests else None
    with tempfile.TemporaryDirectory() as directory:
        args = training_args(url, directory, **sizes, learning_rate=1e-4, max_steps=steps, seed=seed, **fields)
        trainer = DARTSGRPOTrainer(CHECKPOINT, accuracy_reward, args, make_dataset(8 * steps, seed=0, **data), tests)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if num_tests:
            trainer.evaluate()
        trainer.vllm_generation.engine.close()
    return [entry for entry in trainer.state.log_history if "reward" in entry or "eval_reward" in entry]


def compare_accuracy(steps: int, num_seeds: int, path: Path) -> None:
    """Trains the arms of part "accuracy" that are missing in the file, and prints a table of all."""
    runs = read(path)
    done = {(run["seed"], run["arm"]) for run in runs}
    todo = [key for key in product(range(num_seeds), ACCURACY_ARMS) if key not in done]
    with start_vllm_server(CHECKPOINT, max_model_len=512) if todo else nullcontext() as server:
        for seed, arm in todo:
            log = train(server.base_url, ACCURACY_ARMS[arm], steps, seed, 100, family="chain", difficulty="hard")
            tokens = [entry["completions/mean_length"] for entry in log[:-1]]
            run = {"seed": seed, "arm": arm, "accuracy": log[-1]["eval_reward"], "tokens": tokens}
            runs.append(run | {"reward": [entry["reward"] for entry in log[:-1]]})
            append(path, runs[-1])
            print(f"seed {seed}, {arm}: {run['accuracy']:.3f}", flush=True)
    print(accuracy_table(runs))


def accuracy_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the accuracy of each arm, and its paired difference to GRPO's, over the seeds that both have."""
    found = {(run["seed"], run["arm"]): run for run in runs}
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        pairs = [(run, found[seed, "grpo"]) for (seed, own), run in found.items() if own == arm]
        accuracy = cells.mean([run["accuracy"] for run, _ in pairs])
        difference = cells.mean([run["accuracy"] - base["accuracy"] for run, base in pairs])
        tokens = cells.mean([float(np.mean(run["tokens"])) for run, _ in pairs])
        rows.append([f"{arm} ({len(pairs)})", accuracy, difference, tokens])
    return cells.table(["arm (seeds)", "accuracy", "minus GRPO's", "tokens of a row"], rows)


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
            curves = {metric: [entry[metric] for entry in logs[name][-1]] for metric in COLUMNS.values()}
            record("reasoner", {"arm": name, "seed": seed, **curves})
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
    parser.add_argument("--only", choices=[*PARTS, "accuracy"])
    parser.add_argument("--quick", action="store_true", help="smoke test: two steps, one seed")
    options = parser.parse_args()
    for name, arms in PARTS.items():
        if options.only in (None, name):
            compare(arms, *((2, 1) if options.quick else (STEPS, SEEDS)))
    if options.only in (None, "accuracy"):
        with tempfile.TemporaryDirectory() as directory:
            quick = 2, 1, Path(directory) / RESULTS.name
            compare_accuracy(*(quick if options.quick else (2 * STEPS, ACCURACY_SEEDS, RESULTS)))


if __name__ == "__main__":
    main()
