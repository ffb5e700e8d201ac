"""
Measures the client's load with many servers: 64 stubs of 1,000 tokens a second each, and 10,000 candidates at once.

    python -m benchmarks.load [--servers 64] [--candidates 10000] [--schedules darts,grpo] [--interval 16]

The stubs run in another process. They accept vLLM's requests, and stream a chunk of `interval` tokens of one candidate
after another, each with the time at which it was sent, in place of its first token. Printed are the share of a core
that the engine's thread takes while all candidates decode, tokens a second, how long after a chunk was sent the
scheduler has handled it, and the memory of the client. Decoding at half the speed shows whether delays are the
client's: they then shrink. No model, no GPU: what is measured is ours, aiohttp's, and the kernel's.
"""

import asyncio
import multiprocessing
import random
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import psutil

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, main
from trl_darts.engines import ServerPrompt, VLLMServerEngine, opener
from trl_darts.scheduling import CandidateEnded, GroupPlan, Scheduler, ScheduleSettings, TokensArrived


TICK_S = 0.02
NUM_GENERATIONS, NUM_CANDIDATES = 8, 12  # per prompt
MEDIAN, SPREAD, MAX_TOKENS = 300, 0.8, 2000  # log-normal lengths
LOGPROBS = [-0.1234] * 64
EPOCH = 1_790_000_000  # tokens are milliseconds since then


class Stub:
    """One server: a queue of candidates, which it serves in turn at a fixed number of tokens a second."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self.active: dict[str, tuple[asyncio.StreamWriter, int, int]] = {}  # writer, tokens left, interval
        self.credit = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                length = next((int(x[15:]) for x in head.split("\r\n") if x.lower().startswith("content-length:")), 0)
                body = orjson.loads(await reader.readexactly(length)) if length else {}
                path = head.split(" ", 2)[1]
                if path == "/v1/completions":
                    self._begin(writer, body)
                elif path == "/abort_requests":
                    for name in body["request_ids"]:
                        self._end(name, "abort")
                    self._answer(writer, {})
                elif path.startswith("/server_info"):
                    self._answer(writer, {"vllm_config": {"scheduler_config": {"max_num_seqs": 512}}})
                else:
                    self._answer(writer, {})
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, payload: dict[str, Any]) -> None:
        data = orjson.dumps(payload)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))

    def _begin(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        name = f"cmpl-{body['request_id']}-0"
        length = int(random.Random(body["seed"]).lognormvariate(0, SPREAD) * MEDIAN) + 1
        self.active[name] = (writer, min(length, MAX_TOKENS), body["stream_interval"])

    def _send(self, writer: asyncio.StreamWriter, count: int, reason: str | None) -> None:
        tokens = [int((time.time() - EPOCH) * 1000), *[7] * (count - 1)] if count else []
        logprobs = {"token_logprobs": LOGPROBS[:count] if count <= len(LOGPROBS) else [-0.1] * count}
        choice = {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, "text": ""}
        data = b"data: %s\n\n" % orjson.dumps({"choices": [choice]})
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        if reason is not None:
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _end(self, name: str, reason: str) -> None:
        if name in self.active:
            self._send(self.active.pop(name)[0], 0, reason)

    def tick(self, seconds: float) -> None:
        self.credit += seconds * self.tokens_per_s
        while self.active and self.credit > 0:
            name = next(iter(self.active))
            writer, left, interval = self.active.pop(name)
            if writer.is_closing():
                continue
            count = min(left, interval)
            self._send(writer, count, "stop" if left <= interval else None)
            if left > interval:
                self.active[name] = (writer, left - interval, interval)  # at the end of the turn
            self.credit -= count
        if not self.active:
            self.credit = 0.0


def run_stubs(num: int, tokens_per_s: float, pipe: Any) -> None:
    """Serves all stubs in one process, and sends their addresses."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    async def serve() -> None:
        stubs = [Stub(tokens_per_s) for _ in range(num)]
        servers = [await asyncio.start_server(stub.serve, "127.0.0.1", 0, backlog=4096) for stub in stubs]
        pipe.send([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers])
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            for stub in stubs:
                stub.tick(now - last)
            last = now

    asyncio.run(serve())


class Meter(threading.Thread):
    """Samples the CPU time of the engine's thread and of the stubs once a second."""

    def __init__(self, engine: VLLMServerEngine, stubs: int) -> None:
        super().__init__(daemon=True)
        self.own, self.stubs, self.id = psutil.Process(), psutil.Process(stubs), engine._thread.native_id
        self.samples: list[tuple[float, float, float, int]] = []  # time, client, stubs, tokens
        self.num_tokens, self.over = 0, threading.Event()
        self.delays: list[float] = []

    def run(self) -> None:
        while not self.over.wait(1.0):
            client = next(x.user_time + x.system_time for x in self.own.threads() if x.id == self.id)
            stubs = sum(self.stubs.cpu_times()[:2])
            self.samples.append((time.perf_counter(), client, stubs, self.num_tokens))

    def watch(self, handle: Any) -> Any:
        def handled(event: Any) -> Any:
            commands = handle(event)
            if isinstance(event, TokensArrived | CandidateEnded) and event.tokens:
                self.num_tokens += len(event.tokens)
                self.delays.append((time.time() - EPOCH) * 1000 - event.tokens[0])
            return commands

        return handled


def measure(urls: list[str], stubs: int, num_candidates: int, schedule: str) -> dict[str, float]:
    """Runs one rollout and returns what was measured in its first half, while nearly all candidates decode."""
    engine = VLLMServerEngine(urls)
    meter = Meter(engine, stubs)
    before = psutil.Process().memory_info().rss
    each = NUM_CANDIDATES if schedule == "darts" else NUM_GENERATIONS
    num_prompts = num_candidates // each
    plans = [GroupPlan(index, each) for index in range(num_prompts)]
    scheduler = Scheduler(ScheduleSettings(schedule, NUM_GENERATIONS).policies(), NUM_GENERATIONS)
    scheduler.handle = meter.watch(scheduler.handle)  # type: ignore[method-assign]
    prompts = {index: [ServerPrompt([5] * 100)] for index in range(num_prompts)}
    body = {"model": "m", "max_tokens": MAX_TOKENS, "logprobs": 0, "seed": 0}
    meter.start()
    start = time.perf_counter()
    result = engine.run(scheduler, plans, prompts, body, lambda command: {"seed": command.candidate_id})
    seconds = time.perf_counter() - start
    num_losses = engine.num_losses
    meter.over.set()
    engine.close()
    samples = meter.samples[: max(2, len(meter.samples) // 2)]
    (t0, client0, stubs0, tokens0), (t1, client1, stubs1, tokens1) = samples[0], samples[-1]
    delays = sorted(meter.delays)
    return {
        "rollout (s)": seconds,
        "tokens / s": (tokens1 - tokens0) / (t1 - t0),
        "client (cores)": (client1 - client0) / (t1 - t0),
        "stubs (cores)": (stubs1 - stubs0) / (t1 - t0),
        "delay p50 (ms)": statistics.median(delays),
        "delay p99 (ms)": delays[int(0.99 * len(delays))],
        "late, over 1 s (%)": 100 * sum(delay > 1000 for delay in delays) / len(delays),
        "lost servers": num_losses,
        "resumed candidates": result.num_resumed,
        "memory (MiB)": (psutil.Process().memory_info().rss - before) / 2**20,
    }


@contextmanager
def stubs_of(servers: int, tokens_per_s: float) -> Iterator[tuple[list[str], int]]:
    """Yields addresses and process of stubs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_stubs, args=(servers, tokens_per_s, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv(), process.pid or 0
    finally:
        process.terminate()


def run(shared: Shared, schedule: str, **sizes: Any) -> dict[str, Any]:
    """Runs one rollout with a new engine."""
    opener.STREAM_INTERVAL = sizes["interval"]
    urls, stubs = shared(stubs_of, sizes["servers"], sizes["tokens_per_s"])
    return sizes | measure(urls, stubs, sizes["candidates"], schedule)


BENCHMARK = Benchmark(
    "load",
    __doc__,
    {"schedule": ["darts", "grpo"]},
    run,
    parts.load,
    options={"servers": 64, "candidates": 10_000, "tokens_per_s": 1000.0, "interval": opener.STREAM_INTERVAL},
    usual={"schedule": ["darts"]},
    quick={"servers": 2, "candidates": 48},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
