"""
What a weight sync costs with LoRA: the adapter alone, against the model into which it is merged.

    python -m benchmarks.adapters [--models random,smollm2] [--ranks 8] [--hidden-size 512] [--repeats 10]

Both ways sync the same model to the same servers, in turn, while an answer decodes on the first one. Stored are the
bytes written, the seconds of each sync, and the answer's stall: its longest pause between two tokens, beyond the usual
one. Afterwards 32 answers decode at once, with the adapter and with the model's own weights in turn, and the seconds
of each are stored: vLLM pays for an adapter with each token. Adapters are of all linear layers. `random` is a random
model on one server, and `smollm2` is SmolLM2-135M-Instruct in bfloat16 on two (`make smollm2`).
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from benchmarks.smollm2_rollouts import CHECKPOINT
from benchmarks.vllm_server import start_vllm_server
from trl_darts.engines import Deadlines
from trl_darts.engines.connection import ServerSettings, connect
from trl_darts.engines.preflight import AdapterNeeds, Requirements
from trl_darts.engines.vllm_api import CompletionRequest, ServerPrompt
from trl_darts.engines.vllm_generation import SyncedGeneration
from trl_darts.weights.files import WeightDirectory


ARMS = ("merged", "adapter")
NUM_TOKENS, BEFORE = 200, 50  # of an answer, and of these before the sync
NUM_ANSWERS = 32  # at once
PROMPT = [5 + i % 90 for i in range(32)]
OPTIONS = {"enable_lora": True, "max_loras": 5, "max_model_len": 512, "max_num_seqs": 64}
NUM_SERVERS = {"random": 1, "smollm2": 2}
DTYPES = {"random": "float32", "smollm2": "bfloat16"}


@contextmanager
def both_ways(name: str, rank: int, hidden_size: int, num_layers: int) -> Iterator[dict[str, SyncedGeneration]]:
    """Yields a generation for each way, of one model with the same servers."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = CHECKPOINT
        if name == "random":
            sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "intermediate_size": 2 * hidden_size}
            model_dir = make_random_model(Path(directory) / "model", make_tokenizer(), **sizes)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        env, options = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, {**OPTIONS, "dtype": DTYPES[name]}
        servers = [
            stack.enter_context(start_vllm_server(model_dir, env=env, max_lora_rank=rank, timeout_s=600, **options))
            for _ in range(NUM_SERVERS[name])
        ]
        urls = [server.base_url for server in servers]
        # First the adapter's, which refuses a server with other weights.
        made = {arm: build(urls, model_dir, model, arm) for arm in reversed(ARMS)}
        yield made
        for generation in made.values():
            generation.engine.close()


def build(base_urls: list[str], model_dir: Path, model: Any, arm: str) -> SyncedGeneration:
    """Builds a generation."""
    files, needs = WeightDirectory(), Requirements(NUM_TOKENS, None, True, None, timeout_s=60.0)
    settings = ServerSettings(base_urls, files, Deadlines(), None, needs)
    if arm == "adapter":
        needs = replace(needs, adapters=AdapterNeeds())
        settings = replace(settings, directory=None, adapters=files, requirements=needs)
    engine, facts = connect(settings)
    return SyncedGeneration(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        mode="server",
        server_base_url=base_urls[0],
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
    times: list[float] = []

    async def has_begun() -> None:
        while len(times) < BEFORE:
            await asyncio.sleep(1e-3)

    running = generation.engine.submit(answer(generation, "answer", times))
    generation.engine.call(has_begun())
    generation.sync_weights()
    running.result()
    record: Any = generation.pop_sync()
    gaps = [after - before for before, after in pairwise(times)]
    return {"bytes": record.num_bytes, "seconds": record.seconds, "stall": max(gaps) - statistics.median(gaps)}


async def answer(generation: SyncedGeneration, name: str, times: list[float], interval: int = 1) -> None:
    """Decodes an answer on the first server, with the weights of the last sync. Appends when chunks arrive."""
    member = next(iter(generation.engine.members.values()))
    options = {"model": member.model_name(member.version) or generation.facts.model, "max_tokens": NUM_TOKENS}
    request = CompletionRequest.of(name, ServerPrompt(PROMPT), [], {**options, "ignore_eos": True})
    async for _ in await member.server.open(request, interval):
        times.append(time.perf_counter())


def decode(generation: SyncedGeneration) -> float:
    """Returns the seconds of many answers at once."""

    async def answers() -> None:
        await asyncio.gather(*(answer(generation, f"answer{n}", [], NUM_TOKENS) for n in range(NUM_ANSWERS)))

    start = time.perf_counter()
    generation.engine.call(answers())
    return time.perf_counter() - start


def run(shared: Shared, model: str, rank: int, hidden_size: int, num_layers: int, repeats: int) -> dict[str, Any]:
    """Measures both ways in turn."""
    generations = shared(both_ways, model, rank, hidden_size, num_layers)
    found = alternate({arm: lambda arm=arm: sync(generations[arm]) for arm in ARMS}, repeats)
    return {
        "num_parameters": generations["adapter"].model.num_parameters(),
        "num_servers": NUM_SERVERS[model],
        **{name: {arm: [one[name] for one in found[arm]] for arm in ARMS} for name in ("bytes", "seconds", "stall")},
        "decode": alternate({arm: lambda arm=arm: decode(generations[arm]) for arm in ARMS}, repeats),
    }


BENCHMARK = Benchmark(
    "adapters",
    __doc__,
    {"model": list(NUM_SERVERS), "rank": [8]},
    run,
    parts.adapters,
    options={"hidden_size": 512, "num_layers": 8, "repeats": 10},
    usual={"model": ["random"]},
    quick={"hidden_size": 128, "num_layers": 2, "repeats": 2},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
