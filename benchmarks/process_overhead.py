"""
What our decisions cost the engines inside the trainer's process: the same rows decoded by TRL's own call and by ours.

    python benchmarks/process_overhead.py

`schedule="grpo"`, so that both sides decode the same rows and none is aborted: what is left is the price of asking
for decisions after each step (transformers' `generate`, colocated vLLM) or while waiting for results (continuous
batching). Both sides alternate, and the ratio of medians is printed. The model is tiny, so a step is short and a
question weighs as much as it ever can.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from trl.generation.vllm_generation import VLLMGeneration

from tests.engines.settings import prepare_colocated
from tests.models import EOS_ID, PAD_ID, make_markov_model, make_tokenizer
from trl_darts.distributed import DirectLink, Director, Share
from trl_darts.engines.hf_continuous import scheduled_batching
from trl_darts.engines.hf_generate import SchedulerCriterion, stopping_criterion
from trl_darts.generation import RolloutGeneration
from trl_darts.rollout import RolloutConductor, Turn
from trl_darts.scheduling import GroupPlan, SchedulePolicies, Scheduler, ScheduleSettings, UniformAdmission


Rows = list[list[int]]
Sides = tuple[Callable[[Rows], Any], Callable[[Rows], Any]]
MAX_TOKENS = 256


def new_share(rows: Rows, num_generations: int) -> Share:
    """All rows on this process, and nothing to decide."""
    plans = [GroupPlan(index, num_generations) for index in range(len(rows) // num_generations)]
    director = Director(Scheduler(SchedulePolicies(), num_generations), plans, num_engines=1)
    return Share(director.slots[0], DirectLink(director), needs_progress=False)


def transformers_generate(model: Any, num_generations: int) -> Sides:
    """One `generate` call, without and with our criterion."""
    config = GenerationConfig(
        max_new_tokens=MAX_TOKENS, do_sample=True, top_k=0, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )

    def theirs(rows: Rows) -> None:
        ids = torch.tensor(rows)
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)

    def ours(rows: Rows) -> None:
        with stopping_criterion(model, SchedulerCriterion(new_share(rows, num_generations), [EOS_ID])):
            theirs(rows)

    return theirs, ours


def continuous_batching(model: Any, num_generations: int) -> Sides:
    """One `generate_batch` call, with transformers' manager and with ours."""
    config = GenerationConfig(
        max_new_tokens=MAX_TOKENS, do_sample=True, top_k=0, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    limits = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=512)

    def theirs(rows: Rows) -> None:
        model.generate_batch(rows, generation_config=config, continuous_batching_config=limits, progress_bar=False)

    def ours(rows: Rows) -> None:
        with scheduled_batching(model, new_share(rows, num_generations), [EOS_ID]):
            theirs(rows)

    return theirs, ours


def vllm_colocated(model: Any, tokenizer: Any, num_generations: int) -> Sides:
    """TRL's colocated generation, and ours on the same engine."""
    prepare_colocated()
    generation = RolloutGeneration(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=tokenizer,
        mode="colocate",
        max_model_length=512,
        max_completion_length=MAX_TOKENS,
        settings=None,
        engine=None,
        facts=None,
    )
    generation.conductor = RolloutConductor(
        generation.accelerator,
        ScheduleSettings("grpo", num_generations),
        UniformAdmission(num_generations),
        num_generations,
        False,
    )
    generation.conductor.turn = Turn.TRAINING

    def side(function: Callable[..., Any]) -> Callable[[Rows], Any]:
        return lambda rows: function(generation, rows, None, num_generations, nullcontext())

    return side(VLLMGeneration.generate), side(RolloutGeneration.generate)


def measure(sides: Sides, rows: Rows, repeats: int) -> tuple[float, float]:
    """Median seconds of both, alternating, after a warm-up, each pair with a seed of its own."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for index in (0, 1) if repeat % 2 else (1, 0):
            torch.manual_seed(repeat)
            start = time.perf_counter()
            sides[index](rows)
            if repeat:
                seconds[index].append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def engines(model_dir: Path, num_generations: int) -> Iterator[tuple[str, Sides]]:
    """By name, each made when its turn comes."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    yield "transformers generate", transformers_generate(model, num_generations)
    yield "continuous batching", continuous_batching(model, num_generations)
    yield "vLLM colocated", vllm_colocated(model, tokenizer, num_generations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    rows = [[60 + i % 40, 61 + i % 7] for i in range(args.num_prompts) for _ in range(args.num_generations)]
    table = Table(title=f"{args.num_prompts} prompts × {args.num_generations}, median of {args.repeats}")
    for column in ("engine", "TRL (s)", "trl_darts (s)", "ratio TRL / trl_darts"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_markov_model(Path(directory) / "markov", make_tokenizer())
        for name, sides in engines(model_dir, args.num_generations):
            theirs, ours = measure(sides, rows, args.repeats)
            table.add_row(name, f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
