"""
Does a list of servers cost time? Rollouts through `ray:NAME` against the same servers' addresses, alternating.

    python benchmarks/listed.py [--repeats 20]

A Ray cluster on this machine runs two real servers of the tiny reasoner. One engine finds and watches them by their
name, the other has their addresses. Both send the same rollout, whose answers all have the same length. Each pair of
seconds is appended to `benchmarks/results/listed.jsonl`. Printed is the geometric mean of the ratios over all stored
pairs of this size, with a 95 % interval: the arithmetic mean of ratios of two equally noisy times is above 1.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import requests

from benchmarks.cells import ratio
from benchmarks.faults import CHECKPOINT
from benchmarks.lines import append, read
from benchmarks.nodes import NAME, cluster, serve
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.connection import listed_urls, make_source
from trl_darts.engines.discovery import Discovery
from trl_darts.scheduling import GroupPlan, SchedulePolicies, Scheduler


NUM_GENERATIONS = 8
PATH = Path(__file__).parent / "results" / "listed.jsonl"


def seconds(engine: Any, num_prompts: int, tokens: int) -> float:
    """Returns the seconds of one rollout, with empty prefix caches as after a weight sync."""
    for url in engine.base_urls:
        requests.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()
    plans = [GroupPlan(index, NUM_GENERATIONS, prompt_key=index) for index in range(num_prompts)]
    prompts = [[ServerPrompt([5 + index % 10, 6])] for index in range(num_prompts)]
    body = {"model": str(CHECKPOINT), "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    start = time.perf_counter()
    engine.run(Scheduler(SchedulePolicies(), NUM_GENERATIONS), plans, prompts, body, None)
    return time.perf_counter() - start


async def never(server: Any) -> None:
    """The servers stay the same, so none must be checked."""
    raise AssertionError(server.base_url)


def show(size: dict[str, int]) -> None:
    """Prints the ratio over all stored pairs of this size."""
    pairs = [pair for pair in read(PATH) if {name: pair[name] for name in size} == size]
    ratios = [pair["ray"] / pair["fixed"] for pair in pairs]
    usual = np.median([pair["fixed"] for pair in pairs])
    print(f"ray / fixed, {len(pairs)} pairs: {ratio(ratios)}, median of {usual:.2f} s", flush=True)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    size = {"prompts": args.prompts, "tokens": args.tokens}
    with cluster(), tempfile.TemporaryDirectory() as directory, serve(directory):
        urls = listed_urls(f"ray:{NAME}")
        engines = {"fixed": VLLMServerEngine(urls), "ray": VLLMServerEngine(urls)}
        engines["ray"].discover(Discovery(make_source(f"ray:{NAME}"), never, urls))
        for repeat in range(args.repeats + 1):
            order = list(engines)[:: 1 if repeat % 2 else -1]
            pair = {name: round(seconds(engines[name], args.prompts, args.tokens), 4) for name in order}
            if repeat:  # after a warm-up
                append(PATH, size | pair)
                show(size)
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
