"""
Does a list of servers cost time? Rollouts through `ray:NAME` against the same servers' addresses, alternating.

    python -m benchmarks.listed [--pairs 0,1,2] [--prompts 16] [--tokens 300]

A Ray cluster on this machine runs two real servers of the tiny reasoner. One engine finds and watches them by their
name, the other has their addresses. Both send the same rollout, whose answers all have the same length. The table has
the geometric mean of the ratios over all stored pairs of a size: the arithmetic mean of ratios of two equally noisy
times is above 1.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import requests
from ray.cluster_utils import Cluster

from benchmarks import parts
from benchmarks.faults import CHECKPOINT
from benchmarks.harness import Benchmark, Shared, main
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.connection import listed_urls, make_source
from trl_darts.engines.discovery import Discovery
from trl_darts.scheduling import GroupPlan, SchedulePolicies, Scheduler


NAME = "listed"
NODES = ("127.0.0.2", "127.0.0.3")
NUM_GENERATIONS = 8


@contextmanager
def cluster() -> Iterator[None]:
    """Runs a cluster with a head without CPUs and two nodes of one, to which this process is connected."""
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  # each node would count the memory of the whole machine
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for address in NODES:
        found.add_node(num_cpus=1, node_ip_address=address)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = found.address  # for the command
    try:
        yield
    finally:
        ray.shutdown()
        with suppress(Exception):  # a node is dead
            found.shutdown()


@contextmanager
def serve(log_dir: str) -> Iterator[None]:
    """Runs `trl-darts serve --on ray` with two servers, once they are healthy."""
    command = [sys.executable, "-m", "trl_darts.cli", "serve", str(CHECKPOINT), "--on", "ray", "--num-servers", "2"]
    command += ["--name", NAME, "--port", "8200", "--log-dir", log_dir]
    output = Path(log_dir, "stdout")
    with output.open("wb") as stdout:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=stdout)
    try:
        while "--use_vllm" not in output.read_text():
            if process.poll() is not None:
                raise SystemExit(f"The servers did not start; logs in {log_dir}.")
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


async def never(server: Any) -> None:
    """The servers stay the same, so none must be checked."""
    raise AssertionError(server.base_url)


@contextmanager
def engines_of(prompts: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yields both engines, warmed up."""
    with cluster(), TemporaryDirectory() as directory, serve(directory):
        urls = listed_urls(f"ray:{NAME}")
        engines = {"fixed": VLLMServerEngine(urls), "ray": VLLMServerEngine(urls)}
        engines["ray"].discover(Discovery(make_source(f"ray:{NAME}"), never, urls))
        for engine in engines.values():
            seconds(engine, prompts, tokens)
        yield engines
        for engine in engines.values():
            engine.close()


def seconds(engine: Any, num_prompts: int, tokens: int) -> float:
    """Returns the seconds of one rollout, with empty prefix caches as after a weight sync."""
    for url in engine.base_urls:
        requests.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()
    plans = [GroupPlan(index, NUM_GENERATIONS, prompt_key=index) for index in range(num_prompts)]
    prompts = {index: [ServerPrompt([5 + index % 10, 6])] for index in range(num_prompts)}
    body = {"model": str(CHECKPOINT), "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    start = time.perf_counter()
    engine.run(Scheduler(SchedulePolicies(), NUM_GENERATIONS), plans, prompts, body, None)
    return time.perf_counter() - start


def run(shared: Shared, pair: int, prompts: int, tokens: int) -> dict[str, Any]:
    """Measures both engines, in an order that alternates."""
    engines = shared(engines_of, prompts, tokens)
    names = list(engines)[:: 1 if pair % 2 else -1]
    return {"prompts": prompts, "tokens": tokens, **{name: seconds(engines[name], prompts, tokens) for name in names}}


BENCHMARK = Benchmark(
    "listed",
    __doc__,
    {"pair": range(20)},
    run,
    parts.listed,
    options={"prompts": 16, "tokens": 300},
    quick={"prompts": 2, "tokens": 20},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
