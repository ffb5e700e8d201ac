"""
Conversations with tools: seconds of a step with TRL's loop, with each conversation by itself, and with spare ones.

    python -m benchmarks.agents [--arms lockstep,grpo,default,unguarded] [--seeds 0,1,2] [--steps 1] [--rows 128]

A chain on a real vLLM server at the published pace of an 8 B model thinks for some tokens in each turn, and then calls
a tool three times in four, for six turns at most. The tool sleeps for 0.05 to 5 seconds (log-normal, median 0.5).
16 prompts × 8 rows a step.

- lockstep: TRL's loop, on the same server: the tools of all rows one after the other, then the next turn of all.
- grpo: each conversation by itself, from its first turn on.
- default: also with spare candidates, of which those that are held up by tools or by their length are left out. One
  rollout in four waits for all, so this arm has four times as many steps.
- unguarded: none does.

The arms of a seed follow each other. Stored are the mean seconds of a step, calls per row, and calls and
tokens of the kept rows. The primary metric, named before any run, is the ratio of the seconds of a step.
"""

import math
import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import training_parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.models import VOCAB_SIZE, chain_model, save_model
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, paced_server, scaled
from benchmarks.servers import StepSeconds, make_trainer, training_args
from benchmarks.tool_calls import RESPONSE_TEMPLATE, make_chat_tokenizer, tool_call
from trl_darts.buffer.sources import LoaderSource
from trl_darts.scheduling.schedule_fields import GUARD_EVERY


NUM_GENERATIONS = 8
MAX_TURNS = 6
CALL = tool_call("wait", job=1)
THINKING = 24  # mean tokens of a turn
CALL_SHARE = 0.75  # of the turns
MEDIAN_S, SIGMA, SHORTEST_S, LONGEST_S = 0.5, 1.2, 0.05, 5.0  # of a tool
ARMS: dict[str, dict[str, Any]] = {
    "lockstep": {"schedule": "grpo"},
    "grpo": {"schedule": "grpo"},
    "default": {"defer_unsettled_groups": None},
    "unguarded": {},
}
LIMIT = 600  # tokens of a conversation after its prompt


class Waiter:
    """A tool that takes its time, by a random generator of its own, and then says an answer."""

    def __init__(self, seed: int, longest_s: float = LONGEST_S, answer: str = "done") -> None:
        self._rng, self._lock, self._longest_s = random.Random(seed), threading.Lock(), longest_s
        self._answer = answer
        self.num_calls = 0

    def tool(self) -> Any:
        """Returns the tool."""

        def wait(job: int) -> str:
            """
            Waits for a job.

            Args:
                job: Its number.
            """
            with self._lock:
                seconds = MEDIAN_S * math.exp(SIGMA * self._rng.gauss(0, 1))
                self.num_calls += 1
            time.sleep(min(max(seconds, SHORTEST_S), self._longest_s))
            return self._answer

        return wait


def make_caller(directory: Path, thinking: int = THINKING, **sizes: int) -> Path:
    """Saves a chain that thinks for a mean number of tokens, and then calls the tool or ends."""
    tokenizer = make_chat_tokenizer([CALL], tools=True)
    # Without the space, which decoding drops: each turn would call again what the turns before it called.
    tokenizer.response_template = {**RESPONSE_TEMPLATE, "start_anchor": "assistant:"}
    x, call, end = tokenizer.convert_tokens_to_ids(["x", CALL, "<eos>"])
    table = torch.full((VOCAB_SIZE, VOCAB_SIZE), 1e-7)  # row = last token
    table[:, x] = 1.0
    leaves = 1 / thinking
    table[x, x], table[x, call], table[x, end] = 1 - leaves, CALL_SHARE * leaves, (1 - CALL_SHARE) * leaves
    table[call, x], table[call, end] = 1e-7, 1.0
    return save_model(chain_model(table / table.sum(1, keepdim=True), **sizes), tokenizer, directory)


@contextmanager
def server_of() -> Iterator[tuple[str, Path]]:
    """Yields the address of a paced server, and the model's directory."""
    curve = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES)
    with TemporaryDirectory() as directory:
        model_dir = make_caller(Path(directory) / "caller")
        with paced_server(model_dir, curve, max_model_len=1024, max_num_seqs=256) as (server, _):
            yield server.base_url, model_dir


def take_lockstep(trainer: Any) -> None:
    """Has a trainer take all conversations through each turn together, as TRL does."""
    trainer._engine.turns = lambda num_conversations: nullcontext()
    trainer._sources = LoaderSource(weakref.proxy(trainer)), trainer._sources[1]


def tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward with a spread."""
    return [float(len(ids) % 7) for ids in completion_ids]


def run(shared: Shared, arm: str, seed: int, steps: int, rows: int) -> dict[str, Any]:
    """Trains an arm."""
    url, model_dir = shared(server_of)
    waiter = Waiter(seed)
    steps *= GUARD_EVERY if arm == "default" else 1
    prompts = [{"prompt": [{"role": "user", "content": f"task {i}"}]} for i in range(rows // NUM_GENERATIONS * steps)]
    with TemporaryDirectory() as directory:
        fields = {
            **ARMS[arm],
            "num_generations": NUM_GENERATIONS,
            "per_device_train_batch_size": rows,
            "max_completion_length": LIMIT,
            "max_tool_calling_iterations": MAX_TURNS,
            "max_concurrent_tools": rows,
            "max_steps": steps,
            "learning_rate": 0.0,
            "seed": seed,
        }
        model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
        args = training_args(url, directory, **fields)
        trainer = make_trainer(model, tokens, args, Dataset.from_list(prompts), tokenizer, tools=[waiter.tool()])
        if arm == "lockstep":
            take_lockstep(trainer)
        trainer.add_callback(StepSeconds())
        trainer.train()
        trainer.vllm_generation.engine.close()
    log = [entry for entry in trainer.state.log_history if "step_seconds" in entry]
    logged = {
        name: fmean(float(entry[metric]) for entry in trainer.state.log_history if metric in entry)
        for name, metric in (("kept_calls", "tools/call_frequency"), ("kept_tokens", "completions/mean_length"))
    }
    calls = waiter.num_calls / (rows * steps)
    return {"seconds": fmean(own["step_seconds"] for own in log), "calls_per_row": calls, **logged}


BENCHMARK = Benchmark(
    "agents",
    __doc__,
    {"seed": range(5), "arm": list(ARMS)},
    run,
    training_parts.agents,
    options={"steps": 1, "rows": 128},
    usual={"seed": [0, 1, 2]},
    quick={"rows": 16},
    facts=lambda run: {"steps": run["steps"], "rows": run["rows"]},
)

if __name__ == "__main__":
    main(BENCHMARK)
