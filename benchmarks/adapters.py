"""
What a weight sync costs with LoRA: the adapter alone, against the model into which it is merged.

    python -m benchmarks.adapters [--rank 8] [--hidden-size 512] [--num-layers 8] [--repeats 10]

Both ways sync the same model to the same server, in turn, while an answer decodes there. Stored are the bytes written,
the seconds of each sync, and the answer's stall: its longest pause between two tokens, beyond the usual one. The model
is random, with an adapter of all linear layers.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, alternate, main
from benchmarks.models import make_random_model, make_tokenizer
from benchmarks.vllm_server import start_vllm_server
from trl_darts.engines import Deadlines
from trl_darts.engines.connection import ServerSettings, connect
from trl_darts.engines.preflight import AdapterNeeds, Requirements
from trl_darts.engines.vllm_api import CompletionRequest, ServerPrompt
from trl_darts.engines.vllm_generation import SyncedGeneration
from trl_darts.weights.files import WeightDirectory


ARMS = ("merged", "adapter")
NUM_TOKENS, BEFORE = 200, 50  # of an answer, and of these before the sync
PROMPT = [5 + i % 90 for i in range(32)]


@contextmanager
def both_ways(rank: int, hidden_size: int, num_layers: int) -> Iterator[dict[str, SyncedGeneration]]:
    """Yields a generation for each way, of one model with one server."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "intermediate_size": 2 * hidden_size}
        model_dir = make_random_model(Path(directory) / "model", make_tokenizer(), **sizes)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        options = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 5, "max_model_len": 512}
        with start_vllm_server(model_dir, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, **options) as server:
            # First the adapter's, which refuses a server with other weights.
            made = {arm: build(server.base_url, model_dir, model, arm) for arm in reversed(ARMS)}
            yield made
            for generation in made.values():
                generation.engine.close()


def build(base_url: str, model_dir: Path, model: Any, arm: str) -> SyncedGeneration:
    """Builds a generation."""
    files, needs = WeightDirectory(), Requirements(NUM_TOKENS, None, True, None, timeout_s=60.0)
    settings = ServerSettings([base_url], files, Deadlines(), None, needs)
    if arm == "adapter":
        needs = replace(needs, adapters=AdapterNeeds())
        settings = replace(settings, directory=None, adapters=files, requirements=needs)
    engine, facts = connect(settings)
    return SyncedGeneration(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        mode="server",
        server_base_url=base_url,
        settings=settings,
        engine=engine,
        facts=facts,
    )


def sync(generation: SyncedGeneration) -> dict[str, float]:
    """Changes the adapter, and syncs it in the middle of an answer."""
    with torch.no_grad():
        for name, param in generation.model.named_parameters():
            if "lora_B" in name:
                param.add_(torch.randn_like(param), alpha=1e-3)
    (member,) = generation.engine.members.values()
    options = {"model": member.model_name(member.version) or generation.facts.model, "max_tokens": NUM_TOKENS}
    request = CompletionRequest.of("answer", ServerPrompt(PROMPT), [], {**options, "ignore_eos": True})
    times: list[float] = []

    async def answer() -> None:
        async for _ in await member.server.open(request, 1):
            times.append(time.perf_counter())

    async def has_begun() -> None:
        while len(times) < BEFORE:
            await asyncio.sleep(1e-3)

    running = generation.engine.submit(answer())
    generation.engine.call(has_begun())
    generation.sync_weights()
    running.result()
    record: Any = generation.pop_sync()
    gaps = [after - before for before, after in pairwise(times)]
    return {"bytes": record.num_bytes, "seconds": record.seconds, "stall": max(gaps) - statistics.median(gaps)}


def run(shared: Shared, rank: int, hidden_size: int, num_layers: int, repeats: int) -> dict[str, Any]:
    """Measures both ways in turn."""
    generations = shared(both_ways, rank, hidden_size, num_layers)
    found = alternate({arm: lambda arm=arm: sync(generations[arm]) for arm in ARMS}, repeats)
    return {
        "num_parameters": generations["adapter"].model.num_parameters(),
        **{name: {arm: [one[name] for one in found[arm]] for arm in ARMS} for name in ("bytes", "seconds", "stall")},
    }


BENCHMARK = Benchmark(
    "adapters",
    __doc__,
    {"rank": [8]},
    run,
    parts.adapters,
    options={"hidden_size": 512, "num_layers": 8, "repeats": 10},
    quick={"hidden_size": 128, "num_layers": 2, "repeats": 2},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
