"""
TRL's AsyncGRPOTrainer and ours on SmolLM2-135M with LoRA, on one real server of the same two cores.

    python -m benchmarks.peers_smollm2 [--arms async-4,grpo,default,continuous] [--seeds 0,1,2] [--steps 6]

Prompts of examples/smollm2, 4 × 8 rows a step, answers of up to 256 tokens, rank 8 on all linear layers; the server
holds the base in bfloat16 and gets adapters, and both trainers compute in bfloat16 where PyTorch's autocast chooses
it. AsyncGRPO gets what it lacks on a CPU (`async_grpo.py`). Nothing is paced: server and trainer share the cores, so
what runs beside a rollout slows it down, and a sync that pauses nobody gains little. The clock starts with the
training. A few steps say nothing of learning: the metrics are seconds, tokens that are trained on, and their age.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from benchmarks import training_parts
from benchmarks.async_grpo import AsyncGRPOTrainer, FileTransfer, async_args
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.peers import add_metrics, log_of, trained_tokens
from benchmarks.servers import make_trainer, training_args
from benchmarks.smollm2_rollouts import CHECKPOINT, MACHINES, TEMPERATURE, accuracy_reward, make_dataset
from benchmarks.vllm_server import start_vllm_server


NUM_GENERATIONS, PROMPTS, LIMIT, RANK, STALENESS = 8, 4, 256, 8, 4
ROWS, NUM_PROMPTS = PROMPTS * NUM_GENERATIONS, 64
BASELINE = "async-4"
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "grpo": {"schedule": "grpo"},
    "default": {"defer_unsettled_groups": None},
    "continuous": {"schedule": "grpo", "rollout_ahead": "continuous"},
}
LORA = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")


class Clock(TrainerCallback):
    """Records when each step ended, and how many tokens it trained on."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the step."""
        now = time.perf_counter() - self.begun
        self.steps.append({"now": now, "trained": trained_tokens(self.trainer, ROWS)})


@contextmanager
def server_of() -> Iterator[str]:
    """Yields the address of a server that takes adapters."""
    fields = {**MACHINES["cpu"].server, "dtype": "bfloat16", "max_num_seqs": 2 * ROWS, "enable_lora": True}
    fields["env"] = {**fields["env"], "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with start_vllm_server(CHECKPOINT, timeout_s=600, max_lora_rank=RANK, max_loras=STALENESS + 2, **fields) as server:
        yield server.base_url


def fields_of(seed: int, steps: int) -> dict[str, Any]:
    """Returns what both trainers are given."""
    return {
        "bf16": True,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": LIMIT,
        "max_steps": steps,
        "learning_rate": 1e-4,
        "seed": seed,
        "temperature": TEMPERATURE,
    }


def async_trainer(url: str, seed: int, steps: int, directory: str) -> Any:
    """Returns TRL's trainer."""
    args = async_args(
        url, directory, per_device_train_batch_size=ROWS, max_staleness=STALENESS, **fields_of(seed, steps)
    )
    data: Dataset = make_dataset(NUM_PROMPTS).shuffle(seed)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    transfer: Any = FileTransfer(url, directory)
    trainer = AsyncGRPOTrainer(
        str(CHECKPOINT),
        accuracy_reward,
        args,
        data,
        processing_class=tokenizer,
        peft_config=LORA,
        weight_transfer=transfer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def our_trainer(url: str, seed: int, steps: int, directory: str, fields: dict[str, Any]) -> Any:
    """Returns our trainer."""
    args = training_args(
        url,
        directory,
        per_device_train_batch_size=NUM_GENERATIONS,
        gradient_accumulation_steps=PROMPTS,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        weight_sync="adapter",
        **fields_of(seed, steps),
        **fields,
    )
    return make_trainer(str(CHECKPOINT), accuracy_reward, args, make_dataset(NUM_PROMPTS), peft_config=LORA)


def run(shared: Shared, seed: int, arm: str, steps: int) -> dict[str, Any]:
    """Trains one arm."""
    url = shared(server_of)
    with TemporaryDirectory() as directory:
        is_async = arm == BASELINE
        trainer = (
            async_trainer(url, seed, steps, directory)
            if is_async
            else our_trainer(url, seed, steps, directory, ARMS[arm])
        )
        clock = Clock(trainer)
        trainer.add_callback(clock)
        trainer.train()
        if not is_async:
            trainer.vllm_generation.engine.close()
    add_metrics(clock.steps, log_of(trainer))
    seconds, tokens = clock.steps[-1]["now"], sum(step["trained"] for step in clock.steps)
    by_step = {name: [step[name] for step in clock.steps] for name in clock.steps[0]}
    return {"steps": steps, "seconds": seconds, "trained_tokens": tokens, "by_step": by_step}


BENCHMARK = Benchmark(
    "peers_smollm2",
    __doc__,
    {"seed": range(3), "arm": list(ARMS)},
    run,
    training_parts.peers_smollm2,
    options={"steps": 6},
    quick={"steps": 2},
    facts=lambda run: {"settings": ARMS[run["arm"]], "steps": run["steps"]},
)

if __name__ == "__main__":
    main(BENCHMARK)
