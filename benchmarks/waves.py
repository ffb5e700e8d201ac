"""
Training while the tail decodes: how long a step takes beside the longer one of its rollout and its training.

    python -m benchmarks.waves [--shares 0.2,0.5,1] [--arms grpo,waves] [--seeds 0,1,2,3,4] [--steps 8]

Task and engine are those of `training.py`: 32 × 8 rows a step, and a real vLLM server at the published pace of an 8 B
model. A step has 8 micro-batches of four groups, and 32 of one in *waves of 1*. Each pass also sleeps for `share`
of GRPO's seconds of rollout per token that it trains on, which were measured before with no such sleep, as a GPU would
train. The arms of a seed follow each other, from the same model, with the same prompts.

Stored are means over all steps but the first: seconds of a step, of its rollout, of waiting for it, of scoring, of
weight sync, and of passes. Trainers have one thread for PyTorch, as in `peers.py`. A step of *grpo* takes rollout and
passes one after the other. The table compares each arm with the longer one of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import training_parts
from benchmarks.async_grpo import FileTransfer
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.long_tail import TOKENIZER, load_model, make_dataset
from benchmarks.peers import MICRO_BATCHES, PacedPasses, grade
from benchmarks.servers import StepSeconds, make_trainer
from benchmarks.training import NUM_GENERATIONS, PROMPTS, Server, server_of, task_args


ROWS = PROMPTS * NUM_GENERATIONS
GROUPS = PROMPTS // MICRO_BATCHES  # in a micro-batch
CALIBRATION_STEPS = 4
WAVES = {"stream_training": True}


def micro_batches(groups: int) -> dict[str, int]:
    """Returns the settings of micro-batches of so many groups."""
    return {"per_device_train_batch_size": groups * NUM_GENERATIONS, "gradient_accumulation_steps": PROMPTS // groups}


ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "waves": {"schedule": "grpo", **WAVES},
    "ahead": {"schedule": "grpo", "rollout_ahead": 1},
    "darts": {"schedule": "darts"},
    "darts waves": {"schedule": "darts", **WAVES},
    "waves of 1": {"schedule": "grpo", **WAVES, **micro_batches(1)},
}
METRICS = {
    "seconds": "step_seconds",
    "rollout": "darts/rollout/seconds",
    "waited": "darts/rollout/wait_seconds",
    "scoring": "darts/score/seconds",
    "sync": "darts/sync/seconds",
    "passes": "darts/train/seconds",
    "trained": "completions/mean_length",
    "kept_over_pool": "darts/selection/kept_vs_pool_length_ratio",
}


def train(server: Server, seed: int, arm: str, steps: int, seconds_per_token: float) -> dict[str, float]:
    """Returns the means of an arm's steps."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        FileTransfer(server.url, directory).load(server.start)
        args = task_args(server, directory, seed, steps, **{**micro_batches(GROUPS), **ARMS[arm]})
        trainer = make_trainer(
            load_model(server.start), grade, args, make_dataset(PROMPTS * steps), TOKENIZER, PacedPasses
        )
        trainer.seconds_per_token = seconds_per_token
        trainer.add_callback(StepSeconds())
        trainer.train()
        trainer.vllm_generation.engine.close()
    entries = [entry for entry in trainer.state.log_history if "step_seconds" in entry][1:]
    found = {name: [entry[key] for entry in entries if key in entry] for name, key in METRICS.items()}
    return {name: float(np.mean(values)) for name, values in found.items() if values}


@contextmanager
def calibrated(server: Server) -> Iterator[float]:
    """Yields GRPO's seconds of rollout per token that is trained on."""
    found = train(server, 0, "grpo", CALIBRATION_STEPS, 0.0)
    yield found["rollout"] / (found["trained"] * ROWS)


def run(shared: Shared, share: float, seed: int, arm: str, steps: int) -> dict[str, Any]:
    """Trains one arm."""
    server = shared(server_of, "tail")
    seconds_per_token = share * shared(calibrated, server)
    return {"steps": steps, "per_token": seconds_per_token, **train(server, seed, arm, steps, seconds_per_token)}


BENCHMARK = Benchmark(
    "waves",
    __doc__,
    {"share": [0.2, 0.5, 1.0], "seed": range(5), "arm": list(ARMS)},
    run,
    training_parts.waves,
    options={"steps": 8},
    quick={"steps": 2, "share": [0.5], "seed": [0], "arm": ["grpo", "waves"]},
    facts=lambda run: {"steps": run["steps"]},
)

if __name__ == "__main__":
    main(BENCHMARK)
