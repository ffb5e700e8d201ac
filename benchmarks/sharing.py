"""
Two LoRA trainings on one server, one after the other and together.

    python -m benchmarks.sharing [--seeds 0,1,2] [--steps 16] [--training-seconds 4]

Two runs of a sweep, which differ in the learning rate, train the tiny reasoner on hard chains. Each has a process and
adapters of its own. vLLM is real, and follows the published curve of an 8 B model, eight times as slow (`pacing.py`),
because two trainers and a server share the CPU. What a step takes beside its rollout is paced too, as if each trainer
had a GPU of its own: the server is idle meanwhile, unless another run decodes. Stored are the seconds, rewards and
rollouts of each run, alone and together.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks import parts
from benchmarks.faults import CHECKPOINT, LORA
from benchmarks.harness import Benchmark, Shared, main, quiet
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, Pace, paced_server, scaled
from benchmarks.servers import make_trainer, training_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.tiny_reasoner.task import accuracy_reward, make_dataset


LEARNING_RATES = {"low": 3e-4, "high": 1e-3}
ROWS, NUM_GENERATIONS, LIMIT = 64, 8, 256  # of a step; tokens of an answer
SERVER = {"enable_lora": True, "max_lora_rank": LORA.r, "max_loras": 5, "max_num_seqs": 256, "max_model_len": 512}
START_TIMEOUT_S = 300.0  # of the other training
METRICS = {"reward": "reward", "rollout": "darts/rollout/seconds", "sync": "darts/sync/seconds"}


class PacedTraining(TrainerCallback):
    """Has each step take `seconds` beside its rollout. A step for which the CPU was too slow counts as late."""

    def __init__(self, trainer: Any, seconds: float) -> None:
        self.trainer, self.seconds = trainer, seconds
        self.num_late = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sleeps for what is left of the step."""
        rollout = sum(self.trainer._metrics["train"][METRICS["rollout"]])  # of this step alone: each is logged
        left = self.begun + rollout + self.seconds - time.perf_counter()
        self.num_late += left < 0
        time.sleep(max(0.0, left))


def train(url: str, name: str, seed: int, steps: int, training_seconds: float, barrier: Any) -> dict[str, Any]:
    """Trains one run, which begins with those that it shares the server with. Times are of one clock."""
    torch.set_num_threads(1)
    with quiet(), TemporaryDirectory() as directory:
        args = training_args(
            url,
            directory,
            schedule="grpo",
            weight_sync="adapter",
            num_generations=NUM_GENERATIONS,
            per_device_train_batch_size=ROWS,
            max_completion_length=LIMIT,
            learning_rate=LEARNING_RATES[name],
            max_steps=steps,
            seed=seed,
        )
        data = make_dataset(steps * ROWS // NUM_GENERATIONS, seed, family="chain", difficulty="hard")
        kind = partial(DARTSGRPOTrainer, peft_config=LORA)
        trainer = make_trainer(str(CHECKPOINT), accuracy_reward, args, data, kind=kind)
        paced = PacedTraining(trainer, training_seconds)
        trainer.add_callback(paced)
        barrier.wait(START_TIMEOUT_S)
        begin = time.monotonic()
        trainer.train()
        end = time.monotonic()
        trainer.vllm_generation.engine.close()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    found = {key: [entry[metric] for entry in log] for key, metric in METRICS.items()}
    return {"begin": begin, "end": end, "late_steps": paced.num_late, **found}


@dataclass(frozen=True)
class Server:
    """A paced server, and processes that train on it."""

    url: str
    pace: Callable[[], Pace]
    trainings: Executor
    barrier: Callable[[int], Any]

    def train(self, names: list[str], *arguments: Any) -> dict[str, dict[str, Any]]:
        """Trains runs together."""
        barrier = self.barrier(len(names))
        futures = {name: self.trainings.submit(train, self.url, name, *arguments, barrier) for name in names}
        return {name: future.result() for name, future in futures.items()}


@contextmanager
def server_of() -> Iterator[Server]:
    """Yields the server."""
    curve, context = scaled(CURVES["llama-8b"], 2 * SCALE, NUM_ENGINES), get_context("spawn")
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with (
        paced_server(CHECKPOINT, curve, env=env, **SERVER) as (server, pace),
        context.Manager() as manager,
        ProcessPoolExecutor(len(LEARNING_RATES), context) as trainings,
    ):
        yield Server(server.base_url, pace, trainings, manager.Barrier)


def run(shared: Shared, seed: int, steps: int, training_seconds: float) -> dict[str, Any]:
    """Trains both runs alone, and then together."""
    server = shared(server_of)
    arguments = (seed, steps, training_seconds)
    paces, found = [server.pace()], {}
    found["alone"] = {name: server.train([name], *arguments)[name] for name in LEARNING_RATES}
    paces.append(server.pace())
    found["together"] = server.train([*LEARNING_RATES], *arguments)
    paces.append(server.pace())
    late = [after.since(before) for before, after in pairwise(paces)]
    return {
        "steps": steps,
        "training_seconds": training_seconds,
        "ratio": sum(map(seconds_of, found["alone"].values())) / together_seconds(found["together"]),
        "late_engine_steps": [pace.late / max(1, pace.steps) for pace in late],
        **found,
    }


def seconds_of(training: Mapping[str, Any]) -> float:
    """Returns the seconds of one training."""
    return float(training["end"] - training["begin"])


def together_seconds(trainings: Mapping[str, Mapping[str, Any]]) -> float:
    """Returns the seconds from the first start to the last end."""
    begin = min(training["begin"] for training in trainings.values())
    return float(max(training["end"] for training in trainings.values()) - begin)


BENCHMARK = Benchmark(
    "sharing",
    __doc__,
    {"seed": range(3)},
    run,
    parts.sharing,
    options={"steps": 16, "training_seconds": 4.0},
    quick={"steps": 2, "training_seconds": 2.0},
)

if __name__ == "__main__":
    main(BENCHMARK)
