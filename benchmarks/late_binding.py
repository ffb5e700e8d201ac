"""
Compares late and early binding on servers with fewer slots than candidates: candidates wait in the scheduler and go to
the first free server, or are all submitted at the start.

    python benchmarks/late_binding.py [--only queue|slow|prefix] [--repeats 5]

- queue: a real server with 8 slots, 256 candidates, and a first-token deadline of a tenth of the rollout. No server
  may be lost, and no row may be missing.
- slow: two real servers of 16 slots at a GPU's pace, one of them three times slower, and 256 candidates. Early binding
  gives both servers equally many; late binding gives each at most two more than it has slots.
- prefix: two real servers, and prompts of 4,000 tokens with 8 short answers each. Compares all candidates of a prompt
  on one server, which shares its prefix cache, with each candidate on the server with the least work.

Both sides alternate in one run. Prints the medians of their seconds, and the geometric mean of their ratio with a 95 %
interval. Appends to benchmarks/results/late_binding.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console

from benchmarks.cells import ratio
from benchmarks.lines import record
from benchmarks.models import make_markov_model, make_random_model, make_tokenizer
from benchmarks.pacing import CURVES, SCALE, paced_server, scaled
from benchmarks.vllm_server import start_vllm_server
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.sampling import RolloutSeed
from trl_darts.engines.waiting import Deadlines
from trl_darts.scheduling import (
    Candidate,
    EngineLoad,
    GroupPlan,
    RolloutResult,
    SchedulePolicies,
    Scheduler,
)
from trl_darts.scheduling.policies import LeastLoaded


NUM_GENERATIONS = 8
FIRST_TEXT_TOKEN, NUM_TEXT_TOKENS = 3, 96  # tokens of the Markov model
PROMPT_TOKENS, ANSWER_TOKENS = 4000, 8
SLOWER = 3
console = Console(width=120)


class EarlyBinding(LeastLoaded):
    """Places each candidate on the engine with the least work, even if it has no free slot."""

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        return min(engines, key=lambda engine: engine.expected_tokens).engine_id


class Spread(LeastLoaded):
    """Places each candidate on the engine with the least work, whatever its prompt."""

    def choose(self, candidate: Candidate, engines: Sequence[EngineLoad]) -> str | None:
        free = [engine for engine in engines if engine.has_room]
        return min(free, key=lambda engine: engine.expected_tokens).engine_id if free else None


class Rollouts:
    """Runs rollouts on the same servers. Lengths are drawn for each by its seed."""

    def __init__(self, urls: Sequence[str], num_prompts: int, body: dict[str, Any], deadlines: Deadlines) -> None:
        self.engine = VLLMServerEngine(urls, deadlines)
        model = self.engine.query(lambda server: server.get("/v1/models"))[urls[0]]["data"][0]["id"]
        self.num_prompts = num_prompts
        self.body = {"model": model, "logprobs": 0, **body}

    def run(self, placement: LeastLoaded, prompts: Sequence[Sequence[int]], seed: int) -> tuple[float, RolloutResult]:
        """Returns the seconds and the result of a rollout."""
        scheduler = Scheduler(SchedulePolicies(placement=placement), NUM_GENERATIONS)
        plans = [GroupPlan(index, NUM_GENERATIONS) for index in range(self.num_prompts)]
        own = [[ServerPrompt(prompt)] for prompt in prompts]
        begin = time.perf_counter()
        result = self.engine.run(scheduler, plans, own, self.body, seed=RolloutSeed(seed, always=True))
        seconds = time.perf_counter() - begin
        assert all(len(group.rows) == NUM_GENERATIONS for group in result.groups)
        return seconds, result


def short_prompts(num_prompts: int) -> list[list[int]]:
    """Returns distinct prompts."""
    return [[FIRST_TEXT_TOKEN + place for place in divmod(index, NUM_TEXT_TOKENS)] for index in range(num_prompts)]


def compare(names: Sequence[str], sides: Sequence[Callable[[int], float]], repeats: int, title: str) -> None:
    """Alternates two sides, and prints the speed of the second relative to the first."""
    seconds: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        for side, run in enumerate(sides):
            took = run(repeat)
            if repeat:  # the first one warms up
                seconds[side].append(took)
    record("late_binding", {"part": title, "seconds": dict(zip(names, seconds, strict=True))})
    ratios = [before / after for before, after in zip(*seconds, strict=True)]
    medians = ", ".join(f"{name} {statistics.median(own):.1f} s" for name, own in zip(names, seconds, strict=True))
    console.print(f"{title}: {medians}; {names[1]} is {ratio(ratios)} times as fast, {repeats} repeats")


@contextmanager
def markov_model() -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        yield make_markov_model(Path(directory) / "markov", make_tokenizer())


def queue() -> None:
    """Runs the part as described above."""
    with markov_model() as model_dir, start_vllm_server(model_dir, max_num_seqs=8) as server:
        prompts, body = short_prompts(32), {"max_tokens": 512}
        usual = Rollouts([server.base_url], 32, body, Deadlines())
        seconds, _ = usual.run(LeastLoaded(), prompts, 0)
        usual.engine.close()
        deadline = seconds / 10
        hasty = Rollouts([server.base_url], 32, body, Deadlines(first_token_s=deadline))
        seconds, result = hasty.run(LeastLoaded(), prompts, 1)
        console.print(
            f"queue: 256 candidates, 8 slots, {seconds:.1f} s, deadline of first tokens {deadline:.1f} s: "
            f"{hasty.engine.num_losses} servers lost, {result.num_resumed} candidates resumed"
        )
        counts = {"lost": hasty.engine.num_losses, "resumed": result.num_resumed}
        record("late_binding", {"part": "queue", "rollout_s": seconds, "deadline_s": deadline, **counts})
        lost = hasty.engine.num_losses or result.num_resumed
        hasty.engine.close()
        if lost:
            sys.exit(1)


def slow(repeats: int) -> None:
    """Runs the part as described above."""
    curve = scaled(CURVES["llama-8b"], SCALE)
    with markov_model() as model_dir, ExitStack() as stack:
        urls = [
            stack.enter_context(paced_server(model_dir, scaled(curve, factor), max_num_seqs=16))[0].base_url
            for factor in (1, SLOWER)
        ]
        rollouts = Rollouts(urls, 32, {"max_tokens": 128}, Deadlines())
        prompts = short_prompts(32)
        kinds = (EarlyBinding, LeastLoaded)
        sides = [lambda seed, kind=kind: rollouts.run(kind(), prompts, seed)[0] for kind in kinds]
        compare(("early binding", "late binding"), sides, repeats, f"one of two servers {SLOWER} times slower")
        rollouts.engine.close()


def prefix(repeats: int) -> None:
    """Runs the part as described above. Each rollout has new prompts."""
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = make_random_model(Path(directory) / "random", make_tokenizer())
        servers = [
            stack.enter_context(start_vllm_server(model_dir, max_model_len=PROMPT_TOKENS + 64)) for _ in range(2)
        ]
        body = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        rollouts = Rollouts([server.base_url for server in servers], 8, body, Deadlines())

        def side(kind: type[LeastLoaded]) -> Callable[[int], float]:
            def run(seed: int) -> float:
                return rollouts.run(kind(), rng.integers(3, 99, (8, PROMPT_TOKENS)).tolist(), seed)[0]

            return run

        compare(("spread", "together"), [side(Spread), side(LeastLoaded)], repeats, "prompts of 4,000 tokens")
        rollouts.engine.close()


def main() -> None:
    """Runs the benchmark. Exits with 1 if a server was lost because of its queue."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("queue", "slow", "prefix"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.only in (None, "queue"):
        queue()
    if args.only in (None, "slow"):
        slow(args.repeats)
    if args.only in (None, "prefix"):
        prefix(args.repeats)


if __name__ == "__main__":
    main()
