"""
What one request per candidate costs: generation time of TRL's own server path against ours, same server, same work.

    python benchmarks/server_overhead.py [--base-url URL]

Both sides start from the same gathered rows and end with the same lists of token IDs and log-probs. They alternate,
and the ratio of medians is printed. Three workloads: all completions of one length; heavy-tailed ones, which a seed
makes equal on both sides; and the worst case, completions of a single token, where only the requests themselves are
left. The model is tiny, so a token costs the server next to nothing and a request weighs as much as it ever can.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from benchmarks.servers import benchmark_server
from trl_darts.engines import Deadlines
from trl_darts.engines.preflight import Requirements
from trl_darts.generation import RolloutGeneration
from trl_darts.rollout import RolloutConductor, Turn
from trl_darts.scheduling import ScheduleSettings, UniformAdmission
from trl_darts.servers import ServerSettings, connect


WORKLOADS = {
    "128 tokens each": {"ignore_eos": True, "max_tokens": 128},
    "heavy-tailed, up to 512": {"seed": 11, "max_tokens": 512},
    "1 token each": {"max_tokens": 1},
}


def build(base_url: str, model_dir: Path, num_generations: int) -> RolloutGeneration:
    """Our generation object. `VLLMGeneration.generate` called on it is TRL's path, with TRL's client."""
    accelerator, model = Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(model_dir)
    needs = Requirements(512, model.config, processed_logprobs=True, weight_transfer=None, timeout_s=60.0)
    settings = ServerSettings([base_url], "filesystem", None, Deadlines(), None, needs)
    engine, facts = connect(settings)
    generation = RolloutGeneration(
        model=model,
        accelerator=accelerator,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        mode="server",
        server_base_url=base_url,
        max_completion_length=512,
        settings=settings,
        engine=engine,
        facts=facts,
    )
    generation.vllm_client = VLLMClient(base_url)
    generation.conductor = RolloutConductor(
        accelerator,
        ScheduleSettings("grpo", num_generations),
        UniformAdmission(num_generations),
        num_generations,
        show_progress=False,
    )
    generation.conductor.turn = Turn.TRAINING
    return generation


def measure(generation: RolloutGeneration, rows: list[list[int]], num_generations: int, repeats: int) -> dict:
    """Seconds of each side, alternating, after one warm-up of both."""
    sides = {"TRL": VLLMGeneration.generate, "trl_darts": RolloutGeneration.generate}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens = {}
    for repeat in range(repeats + 1):
        order = list(sides) if repeat % 2 else list(sides)[::-1]
        for name in order:
            generation.vllm_client.reset_prefix_cache()
            start = time.perf_counter()
            _, completion_ids, logprobs, _ = sides[name](generation, rows, None, num_generations)
            elapsed = time.perf_counter() - start
            assert len(completion_ids) == len(rows)
            assert all(len(c) == len(p) for c, p in zip(completion_ids, logprobs, strict=True))
            tokens[name] = sum(map(len, completion_ids))
            if repeat:
                seconds[name].append(elapsed)
    return {name: (statistics.median(seconds[name]), tokens[name]) for name in sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="A server that runs; by default one is started.")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with benchmark_server(args.base_url) as (base_url, model_dir):
        generation = build(base_url, model_dir, args.num_generations)
        rows = [[60 + i % 40, 61 + i % 7] for i in range(args.num_prompts) for _ in range(args.num_generations)]
        table = Table(title=f"{args.num_prompts} prompts × {args.num_generations}, median of {args.repeats}")
        for column in ("workload", "tokens", "TRL (s)", "trl_darts (s)", "ratio TRL / trl_darts"):
            table.add_column(column, justify="right")
        for name, kwargs in WORKLOADS.items():
            generation.generation_kwargs = kwargs
            result = measure(generation, rows, args.num_generations, args.repeats)
            (theirs, their_tokens), (ours, our_tokens) = result["TRL"], result["trl_darts"]
            tokens = f"{our_tokens}" if our_tokens == their_tokens else f"{their_tokens} / {our_tokens}"
            table.add_row(name, tokens, f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.3f}")
        generation.engine.close()
    Console().print(table)


if __name__ == "__main__":
    main()
