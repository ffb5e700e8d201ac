"""
What turns of conversations find in the prefix cache: with a home, and where each turn goes to the least loaded server.

    python -m benchmarks.homes [--arms homes,least_loaded] [--seeds 0,1,2]

Two real servers, 64 conversations with up to eight turns of some hundred tokens and a tool of 0.05 to 0.5 seconds.
Stored is the share of prompt tokens that the servers had in their caches, over a rollout.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import agent_audit, parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.vllm_server import VLLMServer, start_vllm_server
from trl_darts.engines import turns
from trl_darts.scheduling.placement import Homes
from trl_darts.scheduling.policies import LeastLoaded


COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
FIELDS = {"max_steps": 2, "per_device_train_batch_size": 64, "max_tool_calling_iterations": 8}


@contextmanager
def pair() -> Iterator[tuple[list[VLLMServer], Path]]:
    """Yields two servers, and the model's directory."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = agent_audit.make_model(Path(directory) / "caller")
        options = {"max_model_len": 4096, "max_num_seqs": 64, "block_size": 32}
        yield [stack.enter_context(start_vllm_server(model_dir, **options)) for _ in range(2)], model_dir


class NoHomes(LeastLoaded):
    """Takes no account of what a conversation's beginning is."""

    def __init__(self, num_conversations: int) -> None:
        super().__init__()


def counted(servers: list[VLLMServer]) -> list[float]:
    """Returns the tokens that were looked up in the servers' caches, and those that were found."""
    return [sum(server.metric(name) for server in servers) for name in COUNTERS]


def run(shared: Shared, arm: str, seed: int) -> dict[str, Any]:
    """Trains for two steps."""
    servers, model_dir = shared(pair)
    before = counted(servers)
    turns.Homes = Homes if arm == "homes" else NoHomes  # type: ignore[misc, assignment]
    with TemporaryDirectory() as directory:
        urls = [server.base_url for server in servers]
        audit = agent_audit.audited_trainer(urls, model_dir, seed, directory, **FIELDS)
        audit.trainer.train()
        audit.trainer.vllm_generation.engine.close()
    queried, hit = (after - own for after, own in zip(counted(servers), before, strict=True))
    return {"queried": queried, "hit": hit, "turns": audit.counts["turns"], "nothing_lost": audit.nothing_lost}


BENCHMARK = Benchmark(
    "homes",
    __doc__,
    {"seed": range(5), "arm": ["homes", "least_loaded"]},
    run,
    parts.homes,
    usual={"seed": [0, 1, 2]},
)

if __name__ == "__main__":
    main(BENCHMARK)
