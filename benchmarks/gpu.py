"""
Measures schedules and training on one GPU in ten minutes, without vLLM and network.

    python benchmarks/gpu.py [--size 1b] [--engine generate|continuous] [--only curve|schedules|training|padding]

The model has the size of a real one and computes attention and MLP, but their outputs have no effect: it is a Markov
chain (`chain_model`), so that the lengths of its answers are known.

- curve: seconds per token by the number of sequences, fitted as by `trl-darts profile`.
- schedules: rollouts of whole runs in which each candidate has a given length (a prompt is the number from which the
  model counts down), and the simulator's ratio for the measured latencies; see `schedules.py`.
- training: some steps of GRPO and of the default, including the optimizer, on heavy-tailed answers of random length.
- padding: a training step of TRL's class, of ours with `trim_padding=False`, and of ours; see `padding.py`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from benchmarks.models import EOS_ID, PAD_ID, chain_model, make_tokenizer, markov_transitions
from benchmarks.padding import compare, describe, tail
from benchmarks.schedules import DEFAULT, GRPO, ROWS, Replay, Size, show, train
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.analysis.simulation import ClusterSpec
from trl_darts.engines.in_process.hf_continuous import scheduled_batching
from trl_darts.engines.in_process.hf_generate import SchedulerCriterion, stopping_criterion
from trl_darts.engines.in_process.share import MainLink, Share
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import GroupPlan, Occupancy, RolloutResult, Scheduler, ScheduleSettings


SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "1b": {  # Llama-3.2-1B with a smaller vocabulary
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
    },
}
SIZES["8b"] = SIZES["1b"] | {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336}
FIRST = 2  # token of the count 1, which is followed by the end
BATCHES = (1, 4, 16, 64, 128, 256, 384)
PROFILED = (16, 80)  # tokens; the difference excludes constant costs, such as the engine's start
# Limits continuous batching on a CPU, where its cache would take most of the machine's memory.
LIMITS = {"num_blocks": 256, "max_batch_tokens": 256, "max_memory_percent": 0.1}
console = Console(width=160)


def countdown(limit: int) -> torch.Tensor:
    """Returns next-token probabilities of a chain that counts down to its end. The highest number never changes."""
    size = FIRST + limit + 1
    table = torch.zeros(size, size)
    table[:FIRST, EOS_ID], table[FIRST, EOS_ID] = 1.0, 1.0
    rest = torch.arange(FIRST + 1, size - 1)
    table[rest, rest - 1] = 1.0
    table[-1, -1] = 1.0
    return (table + 1e-9) / (table + 1e-9).sum(1, keepdim=True)


class ModelCluster:
    """
    Replaces [`SimulatedCluster`] by a real model, with transformers' `generate` or its continuous batching. Decodes a
    given number of tokens of each candidate.
    """

    def __init__(self, model: PreTrainedModel, engine: str, limit: int) -> None:
        self.model = model
        self.continuous = engine == "continuous"
        self.limit = limit

    def run(
        self, scheduler: Scheduler, plans: Sequence[GroupPlan], lengths: Sequence[Sequence[int]], max_length: int
    ) -> RolloutResult:
        """Runs one rollout."""
        link = MainLink(scheduler, plans)
        share = Share(link.slots[0], link, scheduler.needs_progress)
        numbers = (min(lengths[slot.group_id][slot.index], self.limit + 1) for slot in share.slots)
        prompts = [[FIRST - 1 + number] for number in numbers]
        config = GenerationConfig(
            max_new_tokens=max_length, do_sample=False, eos_token_id=EOS_ID, pad_token_id=PAD_ID, use_cache=True
        )
        batching = ContinuousBatchingConfig(**limits())
        with torch.no_grad():
            if self.continuous:
                with scheduled_batching(self.model, share, [EOS_ID]):
                    self.model.generate_batch(
                        prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
                    )
            else:
                criterion = SchedulerCriterion(share, [EOS_ID])
                input_ids = torch.tensor(prompts, device=self.model.device)
                with stopping_criterion(self.model, criterion):
                    out = self.model.generate(
                        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
                    )
                criterion.finish(out[:, 1:].tolist())
        share.exchange()
        return link.result()

    def curve(self, batch_sizes: Sequence[int]) -> LatencyCurve:
        """Measures seconds per token, including the overhead of rollouts."""
        latencies = []
        for size in batch_sizes:
            short, long = (min(self._seconds(size, length) for _ in range(2)) for length in PROFILED)
            latencies.append(max(1e-6, long - short) / (PROFILED[1] - PROFILED[0]))
        table = Table("sequences", *map(str, batch_sizes), title="Decoding")
        table.add_row("ms per token", *(f"{value * 1e3:.1f}" for value in latencies))
        console.print(table)
        return LatencyCurve.fit(batch_sizes, latencies)

    def _seconds(self, num_candidates: int, length: int) -> float:
        plans = [GroupPlan(index, 1, prompt_key=index) for index in range(num_candidates)]
        scheduler = Scheduler(ScheduleSettings("grpo", 1).policies(), 1)
        return Occupancy.of(self.run(scheduler, plans, [[length]] * num_candidates, length)).seconds


def schedules(cluster: ModelCluster, size: Size, curve: LatencyCurve) -> None:
    """Prints the table of `schedules.py` without schedules that keep tokens or need a queue."""
    rows = [row for row in ROWS if row.settings["schedule"] in ("grpo", "darts", "tail_batching")]
    rows = [row for row in rows if row.settings.get("long_end_patience") != 2.0]
    spec = ClusterSpec(curve)
    measured = train([Replay(row, size, spec, cluster) for row in rows], size.steps)
    predicted = train([Replay(row, size, spec) for row in rows], size.steps)
    show(f"On {device_name()}: {size}", rows, [[total] for total in measured], predicted)


def training(size: Size, sizes: dict[str, int], engine: str, steps: int) -> None:
    """Prints seconds of steps and of their rollouts. The first two steps warm up."""
    table = Table("arm", "s per step", "s per rollout", "tokens per step", "reward", title=f"{steps} steps")
    for row in (GRPO, DEFAULT):
        logs = train_steps(size, sizes, engine, steps, dict(row.settings))[2:]
        names = ("step_time", "darts/rollout/seconds", "darts/rollout/generated_tokens", "reward")
        values = [statistics.fmean(entry[name] for entry in logs) for name in names]
        table.add_row(row.name, *(f"{value:,.4g}" for value in values))
    console.print(table)


def train_steps(
    size: Size, sizes: dict[str, int], engine: str, steps: int, settings: dict[str, Any]
) -> list[dict[str, float]]:
    """Trains with the same initial model, and returns the log."""
    on_gpu = torch.cuda.is_available()
    classes = tuple((share, size.median * factor) for share, factor in ((0.6, 1.0), (0.3, 3.0), (0.1, 10.0)))
    model = make_model(markov_transitions(classes=classes), sizes)
    with tempfile.TemporaryDirectory() as directory:
        args = DARTSGRPOConfig(
            directory,
            num_generations=size.num_generations,
            per_device_train_batch_size=size.num_generations,
            gradient_accumulation_steps=size.prompts,
            max_completion_length=size.limit,
            max_steps=steps,
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=False,
            use_transformers_continuous_batching=engine == "continuous",
            transformers_continuous_batching_config=limits(),
            disable_tqdm=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            **settings,
        )
        prompts = Dataset.from_list([{"prompt": f"{index:03d}:"} for index in range(2 * size.prompts)])
        tokenizer = make_tokenizer()
        trainer = DARTSGRPOTrainer(model, length_reward, args, prompts, processing_class=tokenizer)
        trainer.train()
    return [entry for entry in trainer.state.log_history if "step_time" in entry]


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Returns rewards that differ between rows and hardly depend on the length."""
    return [float(len(ids) % 7) for ids in completion_ids]


def make_model(transitions: torch.Tensor, sizes: dict[str, int]) -> PreTrainedModel:
    """Builds the model on the GPU, or on the CPU without one."""
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = chain_model(transitions, dtype=torch.bfloat16 if on_gpu else torch.float32, **sizes)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model.eval()


def limits() -> dict[str, Any]:
    """Returns fields for the config of continuous batching."""
    return {} if torch.cuda.is_available() else LIMITS


def device_name() -> str:
    """Returns the device's name for titles."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("curve", "schedules", "training", "padding")
    parser.add_argument("--size", choices=SIZES, default="1b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--engine", choices=("generate", "continuous"), default="generate", help="of transformers")
    parser.add_argument("--only", choices=parts, help="run one part; schedules need the curve")
    parser.add_argument("--steps", type=int, default=6, help="steps of each short run")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    size = Size(4, 4, 8.0, 48, batches=2) if tiny else Size(32, 8, 40.0, 400, batches=2)
    start = time.perf_counter()
    if args.only not in ("training", "padding"):
        model = make_model(countdown(100 if tiny else size.limit), SIZES[args.size])
        cluster = ModelCluster(model, args.engine, 100 if tiny else size.limit)
        curve = cluster.curve(BATCHES[:3] if tiny else BATCHES)
        if args.only != "curve":
            schedules(cluster, size, curve)
        del model, cluster
    if args.only in (None, "training"):
        training(size, SIZES[args.size], args.engine, args.steps)
    if args.only in (None, "padding"):
        lengths = tail(scale=512 if tiny else 8)[: 16 if tiny else None]
        model = partial(make_model, markov_transitions(), SIZES[args.size])
        compare(f"On {device_name()}: {describe(lengths)}", model, lengths, repeats=1 if tiny else 3)
    console.print(f"{device_name()}, size {args.size}, {args.engine}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
