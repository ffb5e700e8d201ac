"""
What `rollout_ahead` saves, and what it costs.

    python benchmarks/ahead.py [--only seconds|rewards] [--quick]

- seconds: per step with and without it, where training takes 0.5, 1 and 2 times as long as a rollout. Expected is the
  longer of the two, and the weight sync. GRPO's trainings of `training.py` on its paced server, one after the other
  from the same checkpoint.
- rewards: of the tiny reasoner, with it and without, and without the correction for old weights, by steps: the machine
  may be busy. `training.py` has the same of the task whose tail stays.
"""

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
from transformers import PrinterCallback


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_tail import LIMIT, make_checkpoint
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, paced_server, scaled
from benchmarks.servers import training_args
from benchmarks.training import ARMS, BASELINE, DEFAULT, EPOCH, WORLDS, Training, train
from benchmarks.vllm_server import start_vllm_server
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.simulation import Estimate


AHEAD = "grpo, ahead"
SHARES = (0.5, 1.0, 2.0)  # of a rollout's seconds, in training
STEPS = 8
REASONER = Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"
REASONER_ARMS = {name: ARMS[name] for name in (DEFAULT, "default, ahead", "ahead, uncorrected")}
REASONER_STEPS, LAST, SEEDS = 80, 20, 5


def seconds(quick: bool) -> None:
    """Trains with each share, apart and ahead."""
    steps, shares = (2, SHARES[:1]) if quick else (STEPS, SHARES)
    ARMS[AHEAD] = {**ARMS[BASELINE], "rollout_ahead": 1}
    print("| train ÷ rollout | rollout (s) | step (s) | step, ahead (s) | expected (s) | ahead ÷ expected |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as directory:
        start = make_checkpoint(Path(directory) / "start", equal=False)
        curve, slots = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES), WORLDS["tail"].slots
        with paced_server(start, curve, max_num_seqs=slots, max_model_len=2 * LIMIT) as (server, pace):
            shared = train(Training("tail", 0, steps), server.base_url, pace, start, Path(directory) / "shared")
            checkpoint = Path(directory) / "shared" / f"checkpoint-{EPOCH}"
            for share in shares:
                per_token = share * sum(shared["rollout"][1:]) / sum(shared["trained"][1:])
                runs = {}
                for arm in (BASELINE, AHEAD):
                    training, output = Training("tail", 0, steps, arm), Path(directory) / f"{arm} {share}"
                    runs[arm] = train(training, server.base_url, pace, checkpoint, output, per_token, target=0.0)
                print(line(share, per_token, runs[BASELINE], runs[AHEAD]), flush=True)
            print(f"\n{steps - 1} steps each, without the first, which nobody has sampled ahead. {pace()}")


def line(share: float, per_token: float, apart: dict[str, list[float]], ahead: dict[str, list[float]]) -> str:
    """A row of the table, of means."""
    rollout, both, step = (np.mean(own[1:]) for own in (apart["rollout"], apart["real"], ahead["real"]))
    expected = max(rollout, per_token * np.mean(ahead["trained"][1:])) + np.nanmean(apart["sync"])
    return f"| {share:g} | {rollout:.2f} | {both:.2f} | {step:.2f} | {expected:.2f} | {step / expected:.2f} |"


def rewards(quick: bool) -> None:
    """Trains each arm with each seed."""
    sys.path.insert(0, str(REASONER))
    from task import accuracy_reward, make_dataset

    steps, seeds = (2, 1) if quick else (REASONER_STEPS, SEEDS)
    data = make_dataset(8 * steps, seed=0)
    found: dict[str, list[list[float]]] = {name: [] for name in REASONER_ARMS}
    sizes = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": 256}
    start = str(REASONER / "checkpoint")
    with tempfile.TemporaryDirectory() as directory, start_vllm_server(start, max_model_len=512) as server:
        for seed, (name, fields) in product(range(seeds), REASONER_ARMS.items()):
            rates = {"learning_rate": 1e-4, "max_steps": steps, "seed": seed}
            args = training_args(server.base_url, directory, **sizes, **rates, **fields)
            trainer = DARTSGRPOTrainer(start, accuracy_reward, args, data)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            trainer.vllm_generation.engine.close()
            found[name].append([entry["reward"] for entry in trainer.state.log_history if "reward" in entry])
            print(f"seed {seed}, {name}: {np.mean(found[name][-1][-LAST:]):.3f}", flush=True)
    print(f"| arm | reward, {steps} steps | reward, last {LAST} |\n| --- | ---: | ---: |")
    for name, runs in found.items():
        cells = [Estimate.of([float(np.mean(run[start:])) for run in runs]) for start in (0, -LAST)]
        print(f"| {name} | {' | '.join(map(str, cells))} |")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("seconds", "rewards"))
    parser.add_argument("--quick", action="store_true", help="two steps of one kind: does it run?")
    options = parser.parse_args()
    if options.only != "rewards":
        seconds(options.quick)
    if options.only != "seconds":
        rewards(options.quick)


if __name__ == "__main__":
    main()
