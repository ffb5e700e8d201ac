"""
What does a weight sync in the middle of a rollout cost inside the engine, and is each token of the version it says?

    python benchmarks/in_flight.py [--steps 200] [--kv recompute|keep] [--schedule grpo|darts]

Trains on a real vLLM server with `rollout_ahead="continuous"`. A plugin in the server writes down each engine step,
with the tokens that it sampled, and each load of weights. Afterwards the versions of each candidate are compared with
the server's own, token by token, and the age of each row with `max_staleness`. The stall of a sync is the time without
tokens, from the end of the last engine step before it to the end of the first one after it. A lower bound is the load
of the weights, vLLM's pause and resume, and one engine step; `report_update` asks how many tokens each request has.

Exits with 1 if a version differs or a row is too old. Appends to benchmarks/results/in_flight.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vllm_server import plugin_environment
from trl_darts.weights.plugin import when_imported


RECORD = "IN_FLIGHT_RECORD"  # environment variable of the server: the file that its engine writes
MAX_STALENESS = 4


# In the server


def register() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    when_imported("vllm.v1.engine.core", _record)


def _record(module: ModuleType) -> None:
    """Has the engine write a line for each step with tokens, and for each load of weights."""
    step, call = module.EngineCore.step, module.EngineCore.collective_rpc
    if hasattr(step, "recorded"):
        return
    file = open(os.environ[RECORD], "a", buffering=1)  # noqa: SIM115  (as long as the engine)

    def recorded_step(self: Any) -> Any:
        outputs, executed = step(self)
        tokens = {row.request_id: row.new_token_ids for own in outputs.values() for row in own.outputs}
        if any(tokens.values()):
            file.write(json.dumps({"end": time.monotonic(), "tokens": {k: v for k, v in tokens.items() if v}}) + "\n")
        return outputs, executed

    @functools.wraps(call)  # vLLM reads its signature
    def recorded_call(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return call(self, method, *args, **kwargs)
        finally:
            if method == "reload_weights":
                file.write(json.dumps({"start": start, "loaded": time.monotonic()}) + "\n")

    recorded_step.recorded = True  # type: ignore[attr-defined]
    module.EngineCore.step, module.EngineCore.collective_rpc = recorded_step, recorded_call


# In the trainer


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Differs between answers."""
    return [len(ids) % 7.0 for ids in completion_ids]


def train(
    url: str, model_dir: Path, output_dir: str, steps: int, **fields: Any
) -> tuple[list[Any], dict[str, list[float]]]:
    """Returns candidates with the number of steps when their batch was taken, and the seconds of each call."""
    from datasets import Dataset
    from transformers import PrinterCallback

    from benchmarks.servers import training_args
    from trl_darts import DARTSGRPOTrainer
    from trl_darts.engines.pool import ServerPool
    from trl_darts.weights import calls

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
    trainer = DARTSGRPOTrainer(str(model_dir), length_reward, args, data)
    trainer.remove_callback(PrinterCallback)
    taken: list[Any] = []
    original = trainer._batches.taken

    def record(result: Any) -> Any:
        taken.extend((trainer.state.global_step, row) for group in result.groups for row in group.candidates)
        return original(result)

    trainer._batches.taken = record
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


def check(taken: Sequence[tuple[int, Any]], known: Counter[tuple[tuple[int, ...], Versions]]) -> dict[str, int]:
    """Compares candidates with what the server wrote, and prints and returns the result."""
    rows = [(step, tuple(row.tokens), row.versions) for step, row in taken if row.tokens]
    wrong = Counter((tokens, versions) for _, tokens, versions in rows) - known
    oldest = max(step - versions[0][0] for step, _, versions in rows)
    num_tokens, num_mixed = sum(len(row[1]) for row in rows), sum(len(row[2]) > 1 for row in rows)
    print(
        f"{len(rows)} candidates, {num_tokens} tokens, {num_mixed} candidates of several versions; {wrong.total()} "
        f"with other versions than the server's; the oldest token was {oldest} steps old where {MAX_STALENESS} are "
        "allowed"
    )
    return {
        "candidates": len(rows),
        "tokens": num_tokens,
        "mixed": num_mixed,
        "wrong": wrong.total(),
        "oldest": oldest,
    }


def main() -> None:
    """Trains, compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kv", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--schedule", choices=["grpo", "darts"], default="grpo")
    options = parser.parse_args()
    from benchmarks.servers import benchmark_server

    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record.jsonl"
        env = plugin_environment(Path(directory), "benchmarks.in_flight:register") | {RECORD: str(record)}
        # Few slots, so that the server always has something to decode.
        with benchmark_server(env=env, no_async_scheduling=True, max_num_seqs=4) as (url, model_dir):
            fields = {"kv_after_update": options.kv, "schedule": options.schedule}
            taken, calls = train(url, model_dir, directory, options.steps, **fields)
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    found = check(taken, versions_of(lines))
    stalls, loads, steps = stalls_of(lines)
    print("median (quartiles; number)")
    milliseconds = {}
    for name, seconds in {"stall": stalls, "load": loads, "engine step": steps, **calls}.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        milliseconds[name] = {"quartiles": [low, middle, high], "number": len(seconds)}
        print(f"{name}: {middle:.1f} ms ({low:.1f} to {high:.1f}; {len(seconds)})")
    record("in_flight", {"options": vars(options), **found, "ms": milliseconds})
    sys.exit(1 if found["wrong"] or found["oldest"] > MAX_STALENESS else 0)


if __name__ == "__main__":
    main()
