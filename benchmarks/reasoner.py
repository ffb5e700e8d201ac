"""
Does the default learn what GRPO learns, on a model that generalises?

    python -m benchmarks.reasoner [--seeds 0,1] [--arms grpo,default]

The tiny reasoner trains on hard chains, for which longer answers are more often right, on a real server. The metric,
named before any run, is accuracy on prompts that are not trained on, 16 answers to each of 100. The default is not
inferior if the lower end of the 95 % interval of the paired difference, over 10 seeds, is above -0.02. Each run takes
two to four minutes on two cores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import cells
from benchmarks.cells import Columns, Run
from benchmarks.faults import CHECKPOINT
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.lines import read
from benchmarks.servers import make_trainer, training_args
from benchmarks.vllm_server import start_vllm_server
from trl_darts.tiny_reasoner.task import accuracy_reward, make_dataset


ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "default": {"defer_unsettled_groups": None},
    "unguarded": {},
}
DATA = {"family": "chain", "difficulty": "hard"}


@contextmanager
def server_of() -> Iterator[str]:
    """Yields the address of a server."""
    with start_vllm_server(CHECKPOINT, max_model_len=512) as server:
        yield server.base_url


def run(shared: Shared, seed: int, arm: str, steps: int, tests: int) -> dict[str, Any]:
    """Trains one arm, and evaluates it."""
    sizes = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": 256}
    sizes |= {"num_generations_eval": 16, "per_device_eval_batch_size": 160}
    with TemporaryDirectory() as directory:
        args = training_args(
            shared(server_of), directory, **sizes, learning_rate=1e-4, max_steps=steps, seed=seed, **ARMS[arm]
        )
        trainer = make_trainer(str(CHECKPOINT), accuracy_reward, args, make_dataset(8 * steps, seed=0, **DATA))
        trainer.train()
        accuracy = trainer.evaluate(make_dataset(tests, seed=0, split="test", **DATA))["eval_reward"]
        trainer.vllm_generation.engine.close()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    curves = {"tokens": "completions/mean_length", "reward": "reward"}
    return {"accuracy": accuracy, **{name: [entry[key] for entry in log] for name, key in curves.items()}}


ACCURACY: Columns = {
    "accuracy": (lambda own, base: own["accuracy"], cells.mean),
    "minus GRPO's": (lambda own, base: own["accuracy"] - base["accuracy"], cells.mean),
    "tokens of a row": (lambda own, base: float(np.mean(own["tokens"])), cells.mean),
}


def accuracy_table(runs: Sequence[Run]) -> str:
    """Returns the accuracy of each arm, and its paired difference to GRPO's, over the seeds that both have."""
    return cells.compare("arm (seeds)", {"": runs}, ACCURACY, ARMS)


BENCHMARK = Benchmark(
    "reasoner.accuracy",
    __doc__,
    {"seed": range(10), "arm": list(ARMS)},
    run,
    lambda results: accuracy_table(read(results / "reasoner.accuracy.jsonl")),
    options={"steps": 80, "tests": 100},
    quick={"steps": 2, "tests": 10, "arm": ["grpo", "default"]},
    baseline="grpo",
)

if __name__ == "__main__":
    main(BENCHMARK)
