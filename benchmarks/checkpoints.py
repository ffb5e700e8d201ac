"""
Kills trainers while they write checkpoints, and checks that runs resume and train on each prompt once per epoch.

    python -m benchmarks.checkpoints [--continuous] [--kills 50]

The schedule is `partial_rollout` on a real vLLM server, with tokens of unfinished prompts in the buffer, or GRPO in
rollouts that never end, whose unfinished prompts are sampled again. Each trainer resumes from the last complete
checkpoint, saves after every step, and is killed with SIGKILL at a random moment of its first, second or third
checkpoint; only the last trainer is not killed. After each kill, a complete checkpoint must exist. In each epoch, each
prompt must be trained on once, not counting steps that a later trainer repeated. Epochs overlap in rollouts that never
end, so there it is once per epoch over the whole training.
"""

import json
import multiprocessing
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.servers import benchmark_server, make_trainer, training_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.training.resume import BUFFER_FILE, last_checkpoint


PROMPTS = [f"{i} + {i} =" for i in range(32)]
BATCH, ROWS = 4, 2  # prompts per step, rows per prompt
STEPS = len(PROMPTS) // BATCH  # per epoch
LOG = "trained.jsonl"
MOST = 3  # checkpoints of a trainer that is killed
SCHEDULES: dict[str, dict[str, Any]] = {
    "partial_rollout": {"schedule": "partial_rollout"},
    "continuous": {"schedule": "grpo", "rollout_ahead": "continuous"},
}


def train(url: str, model_dir: str, schedule: str, directory: str, max_steps: int, saving: Any) -> None:
    """Trains in a process of its own. Notifies `saving` of the start and end of checkpoints, and logs prompts."""

    class Trainer(DARTSGRPOTrainer):
        def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any) -> Any:
            entry = self.state.global_step, [row["prompt"] for row in inputs[::ROWS]]
            with Path(directory, LOG).open("a") as file:
                file.write(json.dumps(entry) + "\n")
            return super()._calculate_rewards(inputs, *args)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            saving.send(True)
            super()._save_checkpoint(model, trial)
            saving.send(False)

    fields = {**SCHEDULES[schedule], "num_generations": ROWS, "seed": 0}
    fields |= {"per_device_train_batch_size": BATCH * ROWS}
    fields |= {"max_completion_length": 256, "max_steps": max_steps, "learning_rate": 1e-6}
    fields |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "logging_strategy": "no"}
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    tokenizer, args = AutoTokenizer.from_pretrained(model_dir), training_args(url, directory, **fields)
    trainer = make_trainer(model_dir, length_reward, args, data, tokenizer, Trainer)
    trainer.train(resume_from_checkpoint="true" if last_checkpoint(directory) else None)


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Differs between answers."""
    return [float(len(ids)) for ids in completion_ids]


def start(*arguments: Any, kill_at: int = 0, delay_s: float = 0.0) -> float:
    """
    Starts a trainer, and kills it `delay_s` after the start of its `kill_at`-th checkpoint. Returns the seconds of a
    checkpoint.
    """
    context = multiprocessing.get_context("forkserver")
    saving, other = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(*arguments, other))
    process.start()
    other.close()
    seconds: list[float] = []
    with suppress(EOFError):  # raised when the process exits
        for number in range(1, sys.maxsize):
            saving.recv()
            start = time.perf_counter()
            if number == kill_at:
                time.sleep(delay_s)
                process.kill()
                break
            saving.recv()
            seconds.append(time.perf_counter() - start)
    process.join()
    if process.exitcode != (-signal.SIGKILL if kill_at else 0):
        raise SystemExit("A trainer failed; see above.")
    return statistics.median(seconds or [0.0])


def last_state(directory: Path) -> tuple[int, str, int]:
    """Returns the last complete step, the newest file of the next checkpoint, and the tokens in the buffer."""
    whole = last_checkpoint(str(directory))
    assert whole is not None, "no checkpoint is complete"
    step = int(whole.name.rpartition("-")[2])
    files = list((directory / f"checkpoint-{step + 1}").glob("*"))
    newest = max(files, key=lambda path: path.stat().st_mtime_ns).name if files else "none or all"
    with np.load(whole / BUFFER_FILE) as arrays:
        return step, newest, len(arrays["tokens"])


def wrong_prompts(directory: Path, max_steps: int, period: int) -> list[tuple[int, str]]:
    """
    Returns first steps of periods of so many steps, and prompts that were not trained on once per epoch in them. The
    later of two entries of a step counts.
    """
    steps = dict(map(json.loads, (directory / LOG).read_text().splitlines()))
    wrong = []
    for first in range(0, max_steps, period):
        counts = Counter(prompt for step in range(first, first + period) for prompt in steps[step])
        wrong += [(first, prompt) for prompt in PROMPTS if counts[prompt] != period // STEPS]
    return wrong


def run(shared: Shared, arm: str, kills: int) -> dict[str, Any]:
    """Kills trainers, and lets the last one end."""
    rng, newest, tokens = random.Random(0), Counter[str](), []
    multiprocessing.set_forkserver_preload(["trl_darts.trainer", "datasets"])
    with benchmark_server() as (url, model_dir), tempfile.TemporaryDirectory() as output:
        directory = Path(output)
        arguments = url, str(model_dir), arm, output
        seconds = start(*arguments, MOST)
        max_steps = (MOST + MOST * kills) // STEPS * STEPS + STEPS  # more than the killed trainers take
        for _ in range(kills):
            delay_s = rng.uniform(0, 1.1 * seconds)
            start(*arguments, max_steps, kill_at=rng.randint(1, MOST), delay_s=delay_s)
            step, name, num_tokens = last_state(directory)
            newest[name] += 1
            tokens.append(num_tokens)
            print(f"step {step} is complete, {num_tokens} tokens in its buffer; last file: {name}", flush=True)
        start(*arguments, max_steps)
        wrong = wrong_prompts(directory, max_steps, max_steps if arm == "continuous" else STEPS)
    found = {"kills": kills, "steps": max_steps, "epochs": max_steps // STEPS, "checkpoint_s": seconds}
    return {**found, "tokens": tokens, "last_file": dict(newest), "wrong": wrong}


def check(line: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a run."""
    return f"Prompts were lost or trained on twice: {line['wrong']}" if line["wrong"] else None


BENCHMARK = Benchmark(
    "checkpoints",
    __doc__,
    {"arm": list(SCHEDULES)},
    run,
    parts.checkpoints,
    options={"kills": 50},
    usual={"arm": ["partial_rollout"]},
    quick={"kills": 2},
    check=check,
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
