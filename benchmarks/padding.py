"""
Compares a training step of TRL's `GRPOTrainer`, of ours with `trim_padding=False`, and of ours.

    python -m benchmarks.padding [--lengths tail,equal] [--repeats 5] [--hidden-size 128] [--num-layers 2] [--scale 96]

Completions are given, so a step only has forward and backward passes of 256 rows in micro-batches of 4, and one
optimizer step. The three trainers alternate, with the same model, rows and seed.

- tail: lengths of LLaMA-3.1-8B on DeepScaleR (log-normal, median 2,748, σ 0.885), divided by `--scale`.
- equal: all rows have the mean of these lengths, so that there is no padding to save.

Stored are seconds of a step, the share of the step that our code spends on ordering, cutting and counting rows, peak
memory of its passes above what was there before them, tokens computed over tokens there are, and by how much the
gradient differs from TRL's, relative to its norm. Two steps of equal work differ by 10 % on a shared CPU, so the ratio
can't resolve a cost of 1 %. The share can: it is measured inside each step, and with equal lengths nothing else
differs. Without a GPU, seconds are CPU time of this process, without that of other programs.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, alternate, main
from benchmarks.models import EOS_ID, make_random_model, make_tokenizer
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.training.reused_logprobs import ReusedLogprobs


NUM_ROWS, BATCH_SIZE, NUM_GENERATIONS = 256, 4, 8
PROMPT_TOKENS = 8
MEDIAN, SPREAD = 2748.0, 0.885  # of LLaMA-3.1-8B on DeepScaleR
ON_GPU = torch.cuda.is_available()
LARGEST_GRADIENT = 2**20  # numbers of a parameter's gradient that are compared
ARMS: dict[str, dict[str, Any]] = {
    "TRL": {},
    "trim_padding=False": {"trim_padding": False},
    "trim_padding=True": {"share_prompts": False},
}


class Given:
    """Replaces generation by completions of given lengths, with log-probs that are nearly those of a random model."""

    lengths: np.ndarray
    model: Any

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rng, logp = np.random.default_rng(0), -math.log(self.model.config.vocab_size)
        rows = [[*rng.integers(3, 90, length - 1).tolist(), EOS_ID] for length in self.lengths]
        return rows, [rng.normal(logp, 0.1, len(row)).tolist() for row in rows]


class TheirTrainer(Given, GRPOTrainer):
    """TRL's. Adds up the seconds of its `_prepare_inputs`."""

    theirs = ours = 0.0

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self.theirs -= seconds()
        inputs = super()._prepare_inputs(*args, **kwargs)
        self.theirs += seconds()
        return inputs


class OurTrainer(DARTSGRPOTrainer, TheirTrainer):
    """Ours. Adds up the seconds of its `_prepare_inputs` beside TRL's."""

    _generate_single_turn = Given._generate_single_turn

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self.ours -= seconds() - self.theirs
        inputs = super()._prepare_inputs(*args, **kwargs)
        self.ours += seconds() - self.theirs
        return inputs


def seconds() -> float:
    """Returns the time, on a GPU after the kernels that were launched before."""
    if not ON_GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Step(TrainerCallback):
    """
    Records the gradient and the seconds of an optimizer step, and by how many MiB its passes exceed the memory before.
    """

    gradient: torch.Tensor
    seconds: float
    memory: float

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.memory = -reset_peak()
        self.seconds = -seconds()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds += seconds()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seconds += seconds()
        # Before the optimizer's first step, which allocates its state.
        self.memory += peak()
        own = [p.grad.flatten()[:LARGEST_GRADIENT] for p in model.parameters() if p.grad is not None]
        self.gradient = torch.cat([part.float().cpu() for part in own])
        self.seconds -= seconds()


def tail(scale: float) -> np.ndarray:
    """Returns the length of each row in tokens."""
    draws = np.random.default_rng(0).lognormal(math.log(MEDIAN / scale), SPREAD, NUM_ROWS)
    return np.ceil(draws).astype(int) + 1


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Returns rewards that differ between rows."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def random_model(hidden_size: int, num_layers: int) -> PreTrainedModel:
    """Builds a Qwen2 model with random weights on the CPU."""
    with tempfile.TemporaryDirectory() as directory:
        make_random_model(directory, make_tokenizer(), hidden_size=hidden_size, num_layers=num_layers)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def describe(lengths: np.ndarray) -> str:
    """Describes the lengths for titles."""
    return f"{len(lengths)} rows by {BATCH_SIZE}, mean {lengths.mean():.0f} tokens, longest {lengths.max()}"


def reset_peak() -> float:
    """Has the peak of memory begin here. Returns the memory in MiB."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak on Linux
    return _status("VmRSS") / 2**10


def peak() -> float:
    """Returns the peak of memory in MiB."""
    return torch.cuda.max_memory_allocated() / 2**20 if ON_GPU else _status("VmHWM") / 2**10


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1])


def step(
    model: PreTrainedModel,
    lengths: np.ndarray,
    out: str,
    is_ours: bool,
    data: Dataset | None = None,
    corrects: bool = False,
    reuses: bool = False,
    **fields: Any,
) -> tuple[dict[str, float], torch.Tensor]:
    """
    Runs one optimizer step. Returns its costs and its gradient. With `corrects`, the loss is corrected for the
    sampling log-probs, as with vLLM, with `reuses` by the log-probs of the training pass.
    """
    settings = {
        "output_dir": out,
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": len(lengths) // BATCH_SIZE,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": int(max(lengths)),
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "gradient_checkpointing": ON_GPU,
        **fields,
    }
    if is_ours:
        cls, args = OurTrainer, DARTSGRPOConfig(**settings, schedule="grpo")
    else:
        cls, args = TheirTrainer, GRPOConfig(**settings)
    if data is None:
        data = Dataset.from_dict({"prompt": ["x" * PROMPT_TOKENS] * len(lengths)})
    measured = Step()
    trainer = cls(model, reward, args, data, processing_class=make_tokenizer(), callbacks=[measured])
    trainer.lengths, trainer.use_vllm = lengths, corrects
    if isinstance(trainer, OurTrainer):
        trainer.args.reuse_logprobs = reuses  # after `use_vllm`, without which there is nothing to reuse
        trainer._reused = ReusedLogprobs.of(trainer)
    with open(os.devnull, "w") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere  # hides the logs that transformers prints
        try:
            trainer.train()
        finally:
            sys.stdout = stdout
    log = trainer.state.log_history[0]
    ratio = log.get("darts/train/padding_ratio", math.nan)
    cost = {"seconds": measured.seconds, "memory": measured.memory, "padding": ratio}
    return cost | {"share": trainer.ours / measured.seconds}, measured.gradient


def run(
    shared: Shared, lengths: str, repeats: int, hidden_size: int, num_layers: int, scale: float, rows: int
) -> dict[str, Any]:
    """Measures all three trainers in turn."""
    own = tail(scale)[:rows]
    own = own if lengths == "tail" else np.full(rows, round(own.mean()))
    make_model = partial(random_model, hidden_size, num_layers)
    found = compare(lambda arm, out: step(make_model(), own, out, arm != "TRL", **ARMS[arm]), ARMS, repeats)
    return {"rows": describe(own), "hidden_size": hidden_size, "num_layers": num_layers, **found}


def compare(
    step_of: Callable[[str, str], tuple[dict[str, float], torch.Tensor]], arms: Iterable[str], repeats: int
) -> dict[str, Any]:
    """Measures the arms in turn, each in a new folder. Returns their costs, and how far gradients are from TRL's."""
    gradients: dict[str, torch.Tensor] = {}

    def measured(arm: str) -> dict[str, float]:
        gc.collect()  # a trainer refers to itself, and keeps its model's memory
        with tempfile.TemporaryDirectory() as out:
            cost, gradients[arm] = step_of(arm, out)
        return cost

    runs = alternate({arm: partial(measured, arm) for arm in arms}, repeats)
    whole = gradients["TRL"]
    apart = {arm: ((gradient - whole).norm() / whole.norm()).item() for arm, gradient in gradients.items()}
    return {"runs": runs, "gradient": apart}


BENCHMARK = Benchmark(
    "padding",
    __doc__,
    {"lengths": ["tail", "equal"]},
    run,
    parts.padding,
    options={"repeats": 5, "hidden_size": 128, "num_layers": 2, "scale": 96.0, "rows": NUM_ROWS},
    quick={"repeats": 1, "rows": 16},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
