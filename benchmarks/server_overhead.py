"""
Measures what one request per candidate costs: generation time of TRL's server path against ours on the same server.

    python benchmarks/server_overhead.py [--base-url URL]

Both sides get the same gathered rows and return the same lists of token IDs and log-probs. They alternate, and the
geometric mean of their ratios is printed. There are three workloads: completions of equal length; heavy-tailed ones,
which a seed makes equal on both sides; and the worst case, completions of a single token, for which only requests take
time. The model is tiny, so that a token costs almost nothing and the overhead of requests is largest. Seconds are
appended to benchmarks/results/server_overhead.jsonl.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from benchmarks.cells import ratio
from benchmarks.lines import record
from benchmarks.servers import benchmark_server
from trl_darts.engines import Deadlines
from trl_darts.engines.batch import PromptBatch
from trl_darts.engines.connection import ServerSettings, connect
from trl_darts.engines.engine import RolloutPlan
from trl_darts.engines.preflight import Requirements
from trl_darts.engines.servers import ServerEngine
from trl_darts.engines.vllm_generation import SyncedGeneration
from trl_darts.scheduling import SchedulePolicies, Scheduler, UniformAdmission
from trl_darts.training.rows import KeptRows
from trl_darts.weights.files import WeightDirectory


WORKLOADS = {
    "128 tokens each": {"ignore_eos": True, "max_tokens": 128},
    "heavy-tailed, up to 512": {"seed": 11, "max_tokens": 512},
    "1 token each": {"max_tokens": 1},
}
Rows = list[list[int]]
Generate = Callable[[Rows], tuple[Rows, Any]]


def build(base_url: str, model_dir: Path) -> SyncedGeneration:
    """Builds our generation object. `VLLMGeneration.generate` called on it is TRL's path, with TRL's client."""
    accelerator, model = Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(model_dir)
    needs = Requirements(512, model.config, processed_logprobs=True, weight_transfer=None, timeout_s=60.0)
    settings = ServerSettings([base_url], WeightDirectory(), Deadlines(), None, needs)
    engine, facts = connect(settings)
    generation = SyncedGeneration(
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
    return generation


def both_sides(generation: SyncedGeneration, num_generations: int) -> dict[str, Generate]:
    """Returns TRL's call and ours, from rows to completions and their log-probs."""
    engine = ServerEngine(generation)

    def theirs(rows: Rows) -> tuple[Rows, Any]:
        return VLLMGeneration.generate(generation, rows, None, num_generations)[1:3]

    def ours(rows: Rows) -> tuple[Rows, Any]:
        batch = PromptBatch.gather(rows, num_generations, 0)
        admission = UniformAdmission(num_generations).plan(batch.infos)
        scheduler = Scheduler(SchedulePolicies(), num_generations)
        result = engine.run(RolloutPlan(admission, admission.plans(batch.infos), scheduler), batch)
        kept = KeptRows.of_result(result, num_generations)
        return kept.completion_ids, kept.logprobs

    return {"TRL": theirs, "trl_darts": ours}


def measure(
    sides: dict[str, Generate], rows: Rows, repeats: int, reset: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Alternates both sides after a warm-up. Returns the seconds and the tokens of each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens = {}
    for repeat in range(repeats + 1):
        for name in list(sides) if repeat % 2 else list(sides)[::-1]:
            reset()
            start = time.perf_counter()
            completion_ids, logprobs = sides[name](rows)
            elapsed = time.perf_counter() - start
            assert len(completion_ids) == len(rows)
            assert all(len(c) == len(p) for c, p in zip(completion_ids, logprobs, strict=True))
            tokens[name] = sum(map(len, completion_ids))
            if repeat:
                seconds[name].append(elapsed)
    return seconds, tokens


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="running server; by default, one is started")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    table = Table(title=f"{args.num_prompts} prompts × {args.num_generations}, median of {args.repeats}")
    for column in ("workload", "tokens", "TRL (s)", "trl_darts (s)", "ratio TRL / trl_darts"):
        table.add_column(column, justify="right")
    rows = [[60 + i % 40, 61 + i % 7] for i in range(args.num_prompts) for _ in range(args.num_generations)]
    with benchmark_server(args.base_url) as (base_url, model_dir):
        generation = build(base_url, model_dir)
        sides = both_sides(generation, args.num_generations)
        for name, kwargs in WORKLOADS.items():
            generation.generation_kwargs = kwargs
            seconds, tokens = measure(sides, rows, args.repeats, generation.vllm_client.reset_prefix_cache)
            size = {"prompts": args.num_prompts, "generations": args.num_generations}
            record("server_overhead", {"workload": name, **size, "seconds": seconds, "tokens": tokens})
            theirs, ours = (statistics.median(own) for own in seconds.values())
            ratios = [before / after for before, after in zip(*seconds.values(), strict=True)]
            number = " / ".join(map(str, dict.fromkeys(tokens.values())))
            table.add_row(name, number, f"{theirs:.2f}", f"{ours:.2f}", ratio(ratios))
        generation.engine.close()
    Console().print(table)


if __name__ == "__main__":
    main()
