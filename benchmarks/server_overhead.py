"""
Measures what streams of single candidates cost: generation time of TRL's server path against ours on the same server.

    python -m benchmarks.server_overhead [--prompts 64] [--generations 8] [--repeats 5]

All sides get the same gathered rows and return the same lists of token IDs and log-probs, and alternate: TRL's path,
ours, and ours with a request for each candidate. There are three workloads: completions of equal length; heavy-tailed
ones, which a seed makes equal on all sides, and with which candidates can't share requests; and the worst case,
completions of a single token, for which only requests take time. The model is tiny, so that a token costs almost
nothing and the overhead of requests is largest.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, alternate, main
from benchmarks.servers import benchmark_server
from trl_darts.engines import Deadlines, opener
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


@contextmanager
def generation_of() -> Iterator[SyncedGeneration]:
    """Yields our generation object on a server. `VLLMGeneration.generate` called on it is TRL's path and client."""
    with benchmark_server() as (base_url, model_dir):
        generation = build(base_url, model_dir)
        yield generation
        generation.engine.close()


def build(base_url: str, model_dir: Path) -> SyncedGeneration:
    """Builds it."""
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


def sides_of(generation: SyncedGeneration, num_generations: int) -> dict[str, Generate]:
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

    def apart(rows: Rows) -> tuple[Rows, Any]:
        with patch.object(opener, "MAX_SHARED", 1):
            return ours(rows)

    return {"TRL": theirs, "trl_darts": ours, "a request each": apart}


def timed(generate: Generate, rows: Rows, reset: Callable[[], None]) -> tuple[float, int]:
    """Returns seconds and tokens of one call."""
    reset()
    start = time.perf_counter()
    completion_ids, logprobs = generate(rows)
    seconds = time.perf_counter() - start
    assert len(completion_ids) == len(rows)
    assert all(len(c) == len(p) for c, p in zip(completion_ids, logprobs, strict=True))
    return seconds, sum(map(len, completion_ids))


def run(shared: Shared, workload: str, prompts: int, generations: int, repeats: int) -> dict[str, Any]:
    """Measures all sides in turn."""
    generation = shared(generation_of)
    generation.generation_kwargs = WORKLOADS[workload]
    rows = [[60 + i % 40, 61 + i % 7] for i in range(prompts) for _ in range(generations)]
    reset = generation.vllm_client.reset_prefix_cache
    sides = sides_of(generation, generations)
    found = alternate({name: partial(timed, side, rows, reset) for name, side in sides.items()}, repeats)
    seconds = {name: [own for own, _ in runs] for name, runs in found.items()}
    tokens = {name: runs[-1][1] for name, runs in found.items()}
    return {"prompts": prompts, "generations": generations, "seconds": seconds, "tokens": tokens}


BENCHMARK = Benchmark(
    "server_overhead",
    __doc__,
    {"workload": list(WORKLOADS)},
    run,
    parts.server_overhead,
    options={"prompts": 64, "generations": 8, "repeats": 5},
    quick={"prompts": 4, "repeats": 1},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
