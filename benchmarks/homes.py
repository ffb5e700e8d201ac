"""
What turns of conversations find in the prefix cache: with a home, and where each turn goes to the least loaded server.

    python -m benchmarks.homes [--arms homes,least_loaded,small,long] [--seeds 0,1,2]

Two real servers, 64 conversations with up to eight turns of some hundred tokens and a tool of 0.05 to 0.5 seconds.
Stored is the share of prompt tokens that the servers had in their caches, over a rollout, and its seconds. The arms
with *small* have homes, and a cache of 4,608 tokens on each server, which a dozen conversations fill; the number
behind it is `max_concurrent_conversations`. Those with *long* have answers of a thousand tokens, and a cache of 32,768
tokens on each server, which a dozen conversations fill too; they are not trained on.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks import agent_audit, training_parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.vllm_server import VLLMServer, start_vllm_server
from trl_darts.engines import turns, vllm_api
from trl_darts.scheduling.placement import Homes
from trl_darts.scheduling.policies import LeastLoaded


COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
BLOCKS = {"small": 144, "long": 1024}  # of each server's cache
LONGEST = {"long": 13_000}  # tokens of a conversation, otherwise 4096
BOUNDS = {f"{kind} {most or ''}".strip(): most for kind in BLOCKS for most in (None, 32, 16, 8)}
LONG_ANSWER = "y" * 1000
FIELDS = {"max_steps": 2, "per_device_train_batch_size": 64, "max_tool_calling_iterations": 8}


class Sampled(Exception):
    """Ends a training after its first rollout."""


@contextmanager
def pair(kind: str) -> Iterator[tuple[list[VLLMServer], Path]]:
    """Yields two servers with the caches of a kind of arms, and the model's directory."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = agent_audit.make_model(Path(directory) / "caller", max_position_embeddings=max(LONGEST.values()))
        options = {"max_num_seqs": 64, "block_size": 32, "enable_prompt_tokens_details": True}
        options["max_model_len"] = LONGEST.get(kind, 4096)
        if kind in BLOCKS:
            options["num_gpu_blocks_override"] = BLOCKS[kind]
        yield [stack.enter_context(start_vllm_server(model_dir, **options)) for _ in range(2)], model_dir


class NoHomes(LeastLoaded):
    """Takes no account of what a conversation's beginning is."""

    def __init__(self, num_conversations: int) -> None:
        super().__init__()


class ByTurn:
    """Tokens of prompts, and those of them that were found in a cache, by turn."""

    def __init__(self) -> None:
        self.tokens: Counter[int] = Counter()
        self.found: Counter[int] = Counter()
        self._turns: dict[str, int] = {}  # by request, without its segment

    @contextmanager
    def of(self, engine: Any) -> Iterator[None]:
        """Has the servers say what they found, and notes it."""
        open_turns = engine.open_turns
        read, stream_of = vllm_api._server_sent_events, vllm_api.CompletionRequest.stream

        def opened(num_conversations: int, *args: Any) -> Any:
            run, future = open_turns(num_conversations, *args)
            add = run.scheduler.add

            def added(plans: Any, now: float) -> Any:
                commands = add(plans, now)
                if plans:  # none at the start
                    candidate = run.scheduler.ledger.candidates[-1]
                    self._turns[f"{run.run_id}-{candidate.candidate_id}"] = candidate.group_id // num_conversations
                return commands

            run.scheduler.add = added
            return run, future

        async def observed(stream: Any) -> AsyncIterator[bytes]:
            async for data in read(stream):
                if b'"usage":{' in data:
                    self._note(json.loads(data))
                yield data

        def with_usage(request: Any, interval: int) -> Any:
            request.body["stream_options"] = {"include_usage": True}
            return stream_of(request, interval)

        with (
            patch.object(engine, "open_turns", opened),
            patch.object(vllm_api, "_server_sent_events", observed),
            patch.object(vllm_api.CompletionRequest, "stream", with_usage),
        ):
            yield

    def _note(self, message: dict[str, Any]) -> None:
        """Notes the usage of a request, whose ID ends with its run, candidate and segment."""
        turn, usage = self._turns[message["id"].split("-", 2)[2].rsplit("-", 1)[0]], message["usage"]
        self.tokens[turn] += usage["prompt_tokens"]
        self.found[turn] += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def counted(servers: list[VLLMServer]) -> list[float]:
    """Returns the tokens that were looked up in the servers' caches, and those that were found."""
    return [sum(server.metric(name) for server in servers) for name in COUNTERS]


def audited(
    urls: list[str], model_dir: Path, seed: int, directory: str, is_long: bool, fields: dict[str, Any]
) -> agent_audit.AgentAudit:
    """Returns the audit of a trainer, which only samples if answers are long."""
    if not is_long:
        return agent_audit.audited_trainer(urls, model_dir, seed, directory, **fields)
    fields = {**fields, "max_completion_length": LONGEST["long"] - 1000}
    audit = agent_audit.audited_trainer(urls, model_dir, seed, directory, LONG_ANSWER, **fields)

    def stop(*args: Any) -> None:
        raise Sampled

    source: Any = audit.trainer._sources[0]
    source.collect = stop
    return audit


def run(shared: Shared, arm: str, seed: int) -> dict[str, Any]:
    """Trains for two steps. With long answers, samples for one."""
    kind = arm.split()[0]
    servers, model_dir = shared(pair, kind if kind in BLOCKS else "")
    before, by_turn = counted(servers), ByTurn()
    turns.Homes = NoHomes if arm == "least_loaded" else Homes  # type: ignore[misc, assignment]
    fields = FIELDS | {"max_concurrent_conversations": BOUNDS.get(arm)}
    with TemporaryDirectory() as directory:
        urls = [server.base_url for server in servers]
        audit = audited(urls, model_dir, seed, directory, kind == "long", fields)
        with by_turn.of(audit.trainer.vllm_generation.engine), suppress(Sampled):
            audit.trainer.train()
        audit.trainer.vllm_generation.engine.close()
    queried, hit = (after - own for after, own in zip(counted(servers), before, strict=True))
    shares = [by_turn.found[turn] / by_turn.tokens[turn] for turn in sorted(by_turn.tokens)]
    seconds = [end - begin for begin, end in audit.rollouts]
    found = {"queried": queried, "hit": hit, "turns": audit.counts["turns"], "found_by_turn": shares}
    return {**found, "seconds": sum(seconds) / len(seconds)}


BENCHMARK = Benchmark(
    "homes",
    __doc__,
    {"seed": range(5), "arm": ["homes", "least_loaded", *BOUNDS]},
    run,
    training_parts.homes,
    usual={"seed": [0, 1, 2]},
)

if __name__ == "__main__":
    main(BENCHMARK)
