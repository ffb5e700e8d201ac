"""
What does a weight sync in the middle of a rollout cost inside the engine, and is each token of the version it says?

    python -m benchmarks.in_flight [--steps 40] [--kvs recompute,keep] [--schedules grpo,darts]

Trains on a real vLLM server with `rollout_ahead="continuous"`. A plugin in the server writes down each engine step,
with the tokens that it sampled, and each load of weights. Afterwards the versions of each candidate are compared with
the server's own, token by token, and the age of each row with `max_staleness`. The stall of a sync is the time without
tokens, from the end of the last engine step before it to the end of the first one after it. A lower bound is the load
of the weights, vLLM's pause and resume, and one engine step; `report_update` asks how many tokens each request has.

Exits with 1 if a version differs or a row is too old. Of an aborted candidate, what was received is compared.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from benchmarks import parts
from benchmarks.engine_record import RECORD
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.servers import benchmark_server, make_trainer, training_args
from benchmarks.vllm_server import plugin_environment
from trl_darts.engines.pool import ServerPool
from trl_darts.scheduling import FinishReason
from trl_darts.weights import calls


MAX_STALENESS = 4
# The default would soon sample no spare candidates, since few slots make them dear.
SCHEDULES: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "darts": {"schedule": "darts", "min_num_generations": 10, "max_num_generations": 16, "target_redundancy": 1.5},
}


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Differs between answers."""
    return [len(ids) % 7.0 for ids in completion_ids]


def train(
    url: str, model_dir: Path, output_dir: str, steps: int, **fields: Any
) -> tuple[list[Any], dict[str, list[float]]]:
    """Returns candidates with the number of steps when their batch was taken, and the seconds of each call."""
    args = training_args(
        url,
        output_dir,
        rollout_ahead="continuous",
        max_staleness=MAX_STALENESS,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=512,
        max_steps=steps,
        learning_rate=1e-4,
        **fields,
    )
    data = Dataset.from_list([{"prompt": f"{number:03d}"} for number in range(64)])
    trainer = make_trainer(str(model_dir), length_reward, args, data)
    taken: list[Any] = []
    original = trainer._batches.taken

    def kept(result: Any) -> Any:
        for group in result.groups:
            rows = {row.candidate_id for row in group.rows}
            taken.extend((trainer.state.global_step, own, own.candidate_id in rows) for own in group.candidates)
        return original(result)

    trainer._batches.taken = kept
    seconds: dict[str, list[float]] = {}
    for room, name in ((calls, "pause"), (ServerPool, "report_update"), (calls, "resume")):
        time_calls(room, name, seconds.setdefault(name, []))
    trainer.train()
    trainer.vllm_generation.engine.close()
    return taken, seconds


def time_calls(room: Any, name: str, seconds: list[float]) -> None:
    """Appends what each call of an async function takes."""
    call = getattr(room, name)

    async def timed(*arguments: Any) -> Any:
        start = time.monotonic()
        try:
            return await call(*arguments)
        finally:
            seconds.append(time.monotonic() - start)

    setattr(room, name, timed)


# What the server wrote


Versions = tuple[tuple[int, int], ...]
"""`(version, number of tokens in a row)`."""


def versions_of(lines: Sequence[dict[str, Any]]) -> Counter[tuple[tuple[int, ...], Versions]]:
    """Counts requests by their tokens and these tokens' versions."""
    version, tokens = -1, dict[str, list[tuple[int, int]]]()
    for line in lines:
        version += "loaded" in line
        for name, new in line.get("tokens", {}).items():
            tokens.setdefault(name, []).extend((version, token) for token in new)
    return Counter(
        (tuple(token for _, token in own), tuple((v, len(list(run))) for v, run in groupby(v for v, _ in own)))
        for own in tokens.values()
    )


def stalls_of(lines: Sequence[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each stall, of its load, and of each step that follows another one directly."""
    stalls, loads, steps = [], [], []
    for before, after in pairwise(lines):
        if "end" in before and "end" in after and (running := before["tokens"].keys() & after["tokens"].keys()):
            steps.append(after["end"] - before["end"])
    for first, load, last in zip(lines, lines[1:], lines[2:], strict=False):
        if "loaded" in load and "end" in first and "end" in last:
            running = first["tokens"].keys() & last["tokens"].keys()
            if running:  # else nothing waited
                stalls.append(last["end"] - first["end"])
                loads.append(load["loaded"] - load["start"])
    return stalls, loads, steps


def versions_found(
    taken: Sequence[tuple[int, Any, bool]], known: Counter[tuple[tuple[int, ...], Versions]]
) -> dict[str, int]:
    """
    Compares candidates with what the server wrote, and returns the age of the oldest row. Of an aborted candidate, the
    server may have written tokens that nobody has received.
    """
    own = [(tuple(one.tokens), one.versions, one.finish_reason) for _, one, _ in taken if one.tokens]
    aborted = [(tokens, versions) for tokens, versions, reason in own if reason is FinishReason.ABORT]
    ended = Counter((tokens, versions) for tokens, versions, reason in own if reason is not FinishReason.ABORT)
    not_begun = [one for one in aborted if not any(begins(other, one) for other in known)]
    return {
        "candidates": len(own),
        "tokens": sum(len(tokens) for tokens, _, _ in own),
        "mixed": sum(len(versions) > 1 for _, versions, _ in own),
        "aborted": len(aborted),
        "wrong": (ended - known).total() + len(not_begun),
        "oldest": max(step - one.versions[0][0] for step, one, is_row in taken if is_row and one.tokens),
    }


def begins(whole: tuple[tuple[int, ...], Versions], part: tuple[tuple[int, ...], Versions]) -> bool:
    """Whether tokens begin with others, of the same versions."""
    count = len(part[0])
    if whole[0][:count] != part[0]:
        return False
    versions = [version for version, number in whole[1] for _ in range(number)][:count]
    return versions == [version for version, number in part[1] for _ in range(number)]


def run(shared: Shared, schedule: str, kv: str, steps: int) -> dict[str, Any]:
    """Trains, and compares."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record.jsonl"
        env = plugin_environment(Path(directory), "benchmarks.engine_record:register") | {RECORD: str(path)}
        # Few slots, so that the server always has something to decode.
        with benchmark_server(env=env, no_async_scheduling=True, max_num_seqs=4) as (url, model_dir):
            taken, waits = train(url, model_dir, directory, steps, kv_after_update=kv, **SCHEDULES[schedule])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    stalls, loads, between = stalls_of(lines)
    milliseconds = {
        name: {"quartiles": np.percentile(1e3 * np.array(seconds), (25, 50, 75)).tolist(), "number": len(seconds)}
        for name, seconds in {"stall": stalls, "load": loads, "engine step": between, **waits}.items()
    }
    return {"steps": steps, **versions_found(taken, versions_of(lines)), "ms": milliseconds}


def check(line: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a run."""
    if line["wrong"] or line["oldest"] > MAX_STALENESS:
        return f"{line['wrong']} candidates have wrong versions, and the oldest token is {line['oldest']} steps old."
    return None


BENCHMARK = Benchmark(
    "in_flight",
    __doc__,
    {"schedule": list(SCHEDULES), "kv": ["recompute", "keep"]},
    run,
    parts.in_flight,
    options={"steps": 40},
    quick={"steps": 12, "schedule": ["grpo"], "kv": ["recompute"]},
    check=check,
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
