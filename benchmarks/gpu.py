"""
Measures rollouts and whole steps on one GPU in ten minutes, with a real vLLM server and a model of real size.

    python -m benchmarks.gpu [--parts rollouts,steps] [--arms trl,grpo,paper,default] [--size 1b] [--steps 8]

The model computes attention and MLP, but their outputs have no effect: it is a Markov chain (`chain_model`), so the
lengths of its answers are known, up to `--limit` tokens.

- rollouts: seconds per token by the number of sequences; then rollouts in which each candidate has a given length, as
  in `schedules.py`. Rows take turns step by step on the same lengths, and run in virtual time with the measured
  latencies.
- steps: whole steps, with rewards, passes, optimizer and weight sync: TRL's class, with our connection to the server,
  and ours as GRPO, as in the paper and by default. The first two steps warm up.

Without a GPU, the size is tiny, and the CPU build of vLLM decodes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.models import chain_model, make_tokenizer, markov_transitions, save_model
from benchmarks.schedules import DEFAULT, GRPO, PAPER, Replay, ServerCluster, Size, train
from benchmarks.servers import StepSeconds, TRLTrainer, make_trainer, training_args
from benchmarks.vllm_server import VLLMServer, start_vllm_server
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.simulation import ClusterSpec
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import GroupPlan, Occupancy, Scheduler, ScheduleSettings


ON_GPU = torch.cuda.is_available()
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "1b": {  # Llama-3.2-1B with a smaller vocabulary
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": 16_384,
    },
}
SIZES["8b"] = SIZES["1b"] | {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336}
ARMS: dict[str, dict[str, Any]] = {
    "trl": {"schedule": "grpo", "trim_padding": False},
    "grpo": {"schedule": "grpo"},
    "paper": {"long_end_patience": None},
    "default": {"defer_unsettled_groups": None},
}
ROWS = [GRPO, PAPER, DEFAULT]
PROFILED = (32, 128)  # tokens; the difference excludes the prefill
GRAPHS = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 512, 64), *range(512, 1025, 128)]
# Whole steps as CUDA graphs without `torch.compile`, whose first start takes a minute.
COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPHS}
# A part of the memory, because the trainer is on the same GPU. NCCL refuses two processes there: weights are files.
SERVER: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.4, "weight_transfer": None}
SERVER |= {"enforce_eager": None, "compilation_config": COMPILATION, "max_num_seqs": 1024}


class Cluster(ServerCluster):
    """A server whose latency can be measured."""

    def latency(self, num_sequences: int) -> float:
        """Measures seconds per token."""
        short, long = (min(self._seconds(num_sequences, tokens) for _ in range(2)) for tokens in PROFILED)
        return max(1e-6, long - short) / (PROFILED[1] - PROFILED[0])

    def _seconds(self, num_sequences: int, tokens: int) -> float:
        plans = [GroupPlan(0, num_sequences, prompt_key=0)]
        grpo = ScheduleSettings("grpo", num_sequences).policies()
        result = self.run(Scheduler(grpo, num_sequences), plans, [[tokens] * num_sequences], tokens)
        return Occupancy.of(result).seconds


@contextmanager
def server_of(name: str, limit: int) -> Iterator[VLLMServer]:
    """Yields a server of the chain, whose answers have a tail up to the limit."""
    sizes = SIZES[name]
    classes = tuple((share, max(2.0, limit / 80 * factor)) for share, factor in ((0.6, 1.0), (0.3, 3.0), (0.1, 20.0)))
    with TemporaryDirectory() as directory:
        with torch.device("cuda" if ON_GPU else "cpu"):
            dtype = torch.bfloat16 if ON_GPU else torch.float32
            model = chain_model(markov_transitions(classes=classes), dtype=dtype, **sizes)
        path = save_model(model, make_tokenizer(sizes.get("vocab_size", 128)), directory)
        del model
        options = SERVER if ON_GPU else {}
        with start_vllm_server(path, timeout_s=400, max_model_len=limit + 256, **options) as server:
            yield server


def run(shared: Shared, part: str, arm: str, size: str, prompts: int, limit: int, steps: int) -> dict[str, Any]:
    """Measures rollouts of all rows, or steps of one arm."""
    server, lengths = shared(server_of, size, limit), Size(prompts, 8, max(8.0, limit / 40), limit, batches=2)
    facts = {"size": size, "lengths": str(lengths)}
    return facts | (steps_of(server, arm, lengths, steps) if part == "steps" else rollouts_of(server, lengths))


def rollouts_of(server: VLLMServer, size: Size) -> dict[str, Any]:
    """Returns the latencies, and the seconds of each row's rollouts, on the server and in virtual time."""
    cluster = Cluster(server.base_url)
    batches = [2**power for power in range(0, size.rows.bit_length() + 1, 2)]
    cluster.latency(batches[-1])  # warms up
    latencies = [cluster.latency(batch) for batch in batches]
    curve = LatencyCurve(batches, np.maximum.accumulate(latencies).tolist())
    spec = ClusterSpec(curve, seconds_per_request=cluster.seconds_per_request(size.rows, curve(size.rows)))
    found: dict[str, Any] = {"latencies": dict(zip(map(str, batches), latencies, strict=True))}
    for name, own in (("seconds", cluster), ("simulated", None)):
        replays = [Replay(row, size, replace(spec), own) for row in ROWS]
        train(replays, size.steps)
        found[name] = {row.name: replay.outcome.rollout_seconds for row, replay in zip(ROWS, replays, strict=True)}
    cluster.engine.close()
    return found


def steps_of(server: VLLMServer, arm: str, size: Size, steps: int) -> dict[str, Any]:
    """Returns the seconds of an arm's steps, of their rollouts and of their syncs."""
    with TemporaryDirectory() as directory:
        args = training_args(
            server.base_url,
            directory,
            num_generations=size.num_generations,
            per_device_train_batch_size=size.num_generations,
            gradient_accumulation_steps=size.prompts,
            max_completion_length=size.limit,
            max_steps=steps + 2,
            use_cpu=not ON_GPU,
            bf16=ON_GPU,
            gradient_checkpointing=ON_GPU,
            weight_sync="filesystem" if ON_GPU else "auto",
            **ARMS[arm],
        )
        prompts = Dataset.from_list([{"prompt": f"{index:03d}:"} for index in range(2 * size.prompts)])
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        model = AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=dtype)
        tokenizer = make_tokenizer(model.config.vocab_size)
        kind = TRLTrainer if arm == "trl" else DARTSGRPOTrainer
        trainer = make_trainer(model, length_reward, args, prompts, tokenizer, kind)
        trainer.add_callback(StepSeconds())
        trainer.train()
        trainer.vllm_generation.engine.close()
    log = [entry for entry in trainer.state.log_history if "step_seconds" in entry][2:]
    names = {"seconds": "step_seconds", "rollout": "darts/rollout/seconds", "sync": "darts/sync/seconds"}
    found = {name: [entry.get(key, float("nan")) for entry in log] for name, key in names.items()}
    return found | {"memory": torch.cuda.max_memory_allocated() / 2**20 if ON_GPU else 0.0}


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Returns rewards that differ between rows and hardly depend on the length."""
    return [float(len(ids) % 7) for ids in completion_ids]


BENCHMARK = Benchmark(
    "gpu",
    __doc__,
    {"part": ["rollouts", "steps"], "arm": list(ARMS)},
    run,
    parts.gpu,
    options={"size": "1b" if ON_GPU else "tiny", "prompts": 32, "limit": 8192, "steps": 8},
    quick={"size": "tiny", "prompts": 4, "limit": 64, "steps": 1},
    exists=lambda run: run["part"] == "steps" or run["arm"] == "grpo",  # rollouts are of all rows at once
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
