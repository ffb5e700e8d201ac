"""
Rollouts on a real vLLM server that is as fast as its GPU, with answers of known lengths.

    python benchmarks/gpu_server.py [--size 1.7b] [--seconds 300] [--output DIR] [--eager]

The server decodes a model with the sizes of Qwen3-1.7B (or 8B) and random weights, which it makes itself. Lengths are
log-normal with p99 / p50 of about 10, and are forced (`ServerCluster.of_length`). Rows take turns step by step on the
same lengths, until the time is up:

- grpo: M answers to each prompt, all to their end.
- darts (paper): over-sampling and dual-end selection, without a bound on the wait (`long_end_patience=None`).
- unguarded: with the bound, but without deferral.
- default: as a trainer runs it, so that groups which teach nothing wait for a long round. Rewards are drawn: they
  don't depend on lengths, and about half of the groups have equal ones. Its first round waits for all answers.

`gpu_server.jsonl` in `--output` gets a line for the server, for each latency (seconds per token by sequences and
context), for each rollout as soon as it ends, and at the end for each rollout of the same lengths in virtual time,
with the latencies of each context. Without a GPU, `--size tiny` tries all of it on the CPU build of vLLM.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import Qwen3Config

from benchmarks.cells import ratio
from benchmarks.lines import append, read
from benchmarks.models import EOS_ID, PAD_ID, make_tokenizer
from benchmarks.schedules import DEFAULT, GRPO, ROWS, Replay, Row, ServerCluster, Size
from benchmarks.vllm_server import ServerError, VLLMServer, start_vllm_server
from trl_darts.analysis.simulation import ClusterSpec
from trl_darts.analysis.simulation.run import SimulatedStep
from trl_darts.analysis.simulation.workload import BatchLengths
from trl_darts.buffer.buffer import BufferEntry, Lifecycle, RolloutBuffer, Round
from trl_darts.buffer.rounds import round_policy
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import GroupPlan, GroupSummary, Occupancy, PromptInfo, Scheduler, ScheduleSettings


RESULTS = "gpu_server.jsonl"
PAPER = next(row for row in ROWS if row.name == "darts (paper)")
SHIPPED = Row("default", {"schedule": "darts", "defer_unsettled_groups": True})
ARMS = [GRPO, PAPER, Row("unguarded", DEFAULT.settings), SHIPPED]
PROFILED = (32, 128)  # tokens; the difference excludes the prefill
GRAPHS = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 512, 64), *range(512, 1025, 128)]
# Whole steps as CUDA graphs without `torch.compile`, whose first start takes a minute.
COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPHS}


@dataclass(frozen=True)
class Setting:
    """A model, what it answers, and what is measured before."""

    model: dict[str, int]
    size: Size
    batches: tuple[int, ...]  # numbers of sequences whose latency is measured
    contexts: tuple[int, ...]  # tokens of their prompts
    server: dict[str, Any] = field(default_factory=dict)  # options


QWEN3_1_7B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_8B = QWEN3_1_7B | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
TINY = QWEN3_1_7B | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
ON_GPU = {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 1024, "gpu_memory_utilization": 0.9}
ON_GPU |= {"enforce_eager": None, "compilation_config": COMPILATION, "weight_transfer": None}
REAL = Size(64, 8, 200.0, 3072, batches=2)
BATCHES = (1, 4, 16, 64, 128, 256, 512, 768)
SETTINGS = {
    "1.7b": Setting(QWEN3_1_7B, REAL, BATCHES, (16, 1024), ON_GPU),
    "8b": Setting(QWEN3_8B, REAL, BATCHES, (16, 1024), ON_GPU),
    "tiny": Setting(TINY, Size(4, 4, 8.0, 64, batches=2), (1, 8), (16, 64), {"max_model_len": 512}),
}


def save_config(directory: Path, sizes: dict[str, int]) -> Path:
    """Saves a model's config and tokenizer. It has no weights: the server makes random ones."""
    config = Qwen3Config(
        **sizes,
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=sizes is not QWEN3_8B,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(directory)
    make_tokenizer(sizes["vocab_size"]).save_pretrained(directory)
    return directory


class RandomCluster(ServerCluster):
    """A server of a random model. Prompts of `context` tokens share all but the first two."""

    context = 16

    def prompt(self, key: int) -> list[int]:
        """Returns the tokens of a prompt of the workload."""
        return [*super().prompt(key), *[5] * (self.context - 2)]

    def seconds(self, num_sequences: int, tokens: int) -> float:
        """Times a rollout of equal answers to one prompt each."""
        plans = [GroupPlan(0, num_sequences, prompt_key=0)]
        grpo = ScheduleSettings("grpo", num_sequences).policies()
        result = self.run(Scheduler(grpo, num_sequences), plans, [[tokens] * num_sequences], tokens)
        return Occupancy.of(result).seconds

    def latency(self, num_sequences: int, context: int) -> float:
        """Measures seconds per token."""
        self.context = context
        short, long = (min(self.seconds(num_sequences, tokens) for _ in range(2)) for tokens in PROFILED)
        return max(1e-6, long - short) / (PROFILED[1] - PROFILED[0])


class Deferring(Replay):
    """
    A replay of the default with its long rounds. Rewards are 0 or 1 with a probability of the prompt's,
    Beta(0.4, 0.4), with which 45 % of groups of 8 have equal rewards. One buffer serves all epochs.
    """

    is_long = False

    def _steps(self) -> Iterator[SimulatedStep]:
        policy: Any = round_policy(self.settings, self.workload.prompts_per_step)
        buffer, sampled = policy.buffer(), {}
        batches = self._batches()
        while True:
            while policy.lacking(buffer):
                batch = next(batches)
                infos = [PromptInfo(int(prompt), self.workload.prompt_tokens) for prompt in batch.prompts]
                sampled |= {entry_id: (batch, place) for place, entry_id in enumerate(buffer.enter(infos))}
            plan = policy.next(buffer)
            self.is_long = plan.long
            yield self._round(plan, buffer, sampled)

    def _batches(self) -> Iterator[BatchLengths]:
        prompts = chain.from_iterable(self.workload.epochs(self.seed))
        return (BatchLengths(self.workload.lengths, self.seed, number, next(prompts)) for number in count())

    def _round(
        self, plan: Round, buffer: RolloutBuffer, sampled: dict[int, tuple[BatchLengths, int]]
    ) -> SimulatedStep:
        admission, plans = buffer.begin(plan, self.settings.num_generations, self.admission)
        own = [sampled[entry.entry_id] for entry in plan.entries]
        most = self.settings.max_num_generations or 0
        lengths = [batch.of(place, most, 0, 0.0) for batch, place in own]
        result = self.rollout(admission, plans, lengths, plan.batch_stop)
        buffer.absorb(plan, result, 0)
        self._settle(plan, buffer)
        rows = [row for entry in buffer.take(plan) for row in entry.candidates]
        settled = [GroupSummary.of(group) for group in result.groups]
        kept = [(row.length, row.partial.finish_reason) for row in rows]
        return SimulatedStep(settled, [], settled, kept, Occupancy.of(result), admission.saturated, len(settled))

    def _settle(self, plan: Round, buffer: RolloutBuffer) -> None:
        """Learns from a round, and defers its unsettled groups, as `BufferedBatches.settle` does."""
        learned = buffer.long_rewards
        done = [entry for entry in plan.entries if entry.state is Lifecycle.COMPLETE]
        uniform = {entry.entry_id for entry in done if len(set(self._rewards(entry))) < 2}
        rows = [row for entry in done for row in entry.candidates]
        if plan.long:
            learned.observe_ends(sum(row.cut_off for row in rows), len(rows), len(uniform), len(done))
            for entry in done if learned.usual_length else ():
                own = [row.length for row in entry.candidates]
                learned.observe_long(entry.prompt.key, self._rewards(entry), own)
            return
        unsettled = [entry for entry in done if entry.was_cut and entry.entry_id in uniform]
        deferred = [e.entry_id for e in unsettled if learned.defers(e.prompt.key, e.entry_id)]
        learned.observe_short(max(row.length for row in rows), len(deferred), len(done))
        buffer.defer(deferred)

    def _rewards(self, entry: BufferEntry) -> list[float]:
        share = np.random.default_rng((self.seed, entry.prompt.key)).beta(0.4, 0.4)
        drawn = np.random.default_rng((self.seed, entry.entry_id, entry.num_deferrals)).random(len(entry.candidates))
        return (drawn < share).astype(float).tolist()


def replay_of(row: Row, size: Size, spec: ClusterSpec, server: ServerCluster | None = None, seed: int = 0) -> Replay:
    """Returns the replay of an arm."""
    return (Deferring if row is SHIPPED else Replay)(row, size, spec, server, seed)


@contextmanager
def server_of(setting: Setting, eager: bool) -> Iterator[VLLMServer]:
    """Starts a server of the model, without CUDA graphs if it does not start with them."""
    fields = {"load_format": "dummy", "max_num_seqs": 1024, **setting.server}
    plain = {"enforce_eager": True, "compilation_config": None}
    with TemporaryDirectory() as directory:
        model_dir = save_config(Path(directory), setting.model)
        for own in [fields | plain] if eager else [fields, fields | plain]:
            try:
                with start_vllm_server(
                    model_dir, timeout_s=120 if torch.cuda.is_available() else 400, **own
                ) as server:
                    yield server
                    return
            except ServerError as error:
                print(error, flush=True)
    raise ServerError("No server started.")


def measure_latencies(path: Path, cluster: RandomCluster, setting: Setting) -> dict[int, LatencyCurve]:
    """Measures and stores the latencies, and returns the curve of each context."""
    cluster.seconds(setting.batches[-1], PROFILED[0])  # warms up
    curves = {}
    for context in setting.contexts:
        values = [cluster.latency(batch, context) for batch in setting.batches]
        for batch, value in zip(setting.batches, values, strict=True):
            append(path, {"kind": "latency", "context": context, "sequences": batch, "seconds": round(value, 6)})
        curves[context] = LatencyCurve(setting.batches, np.maximum.accumulate(values).tolist())
        print(
            f"context {context}:", *(f"{b}: {v * 1e3:.2f} ms," for b, v in zip(setting.batches, values, strict=True))
        )
    cluster.context = setting.contexts[0]
    return curves


def facts(replay: Replay) -> dict[str, Any]:
    """Returns what is stored of a replay's last step."""
    run = replay.outcome
    names = ("candidates", "aborted_candidates", "pool_tokens", "kept_tokens", "longest_kept")
    long = {"long": replay.is_long} if isinstance(replay, Deferring) else {}
    return {"seconds": round(run.rollout_seconds[-1], 4), **{n: getattr(run, n)[-1] for n in names}, **long}


def take_turns(path: Path, replays: dict[str, Replay], deadline: float, most: int) -> int:
    """Runs steps of all arms in turn until the deadline, in an order that rotates. Returns the complete steps."""
    running = {name: replay.steps() for name, replay in replays.items()}
    names = [*running]
    for step in range(most):
        begun = time.monotonic()
        for place in range(len(names)):
            name = names[(step + place) % len(names)]
            next(running[name])
            append(path, {"kind": "rollout", "arm": name, "step": step, **facts(replays[name])})
        own = {name: round(replay.outcome.rollout_seconds[-1], 2) for name, replay in replays.items()}
        print(f"step {step}:", own, flush=True)
        if time.monotonic() + (time.monotonic() - begun) > deadline:
            return step + 1
    return most


def simulate(path: Path, size: Size, curves: dict[int, LatencyCurve], steps: int, request_seconds: float) -> None:
    """Stores the same steps in virtual time."""
    for context, curve in curves.items():
        spec = ClusterSpec(curve, seconds_per_request=request_seconds)
        for row in ARMS:
            replay = replay_of(row, size, spec)
            for step, _ in enumerate(islice(replay.steps(), steps)):
                append(path, {"kind": "simulated", "context": context, "arm": row.name, "step": step, **facts(replay)})


def summarize(lines: Sequence[dict[str, Any]]) -> None:
    """Prints each arm's speed over GRPO's by step as geometric mean and interval, measured and simulated."""
    kinds = dict.fromkeys((own["kind"], own.get("context")) for own in lines if "arm" in own)
    for kind in kinds:
        own = [line for line in lines if "arm" in line and (line["kind"], line.get("context")) == kind]
        seconds = {row.name: [line["seconds"] for line in own if line["arm"] == row.name] for row in ARMS}
        for name, values in seconds.items():
            pairs = [a / b for a, b in zip(seconds[GRPO.name], values, strict=False)]
            known = f"from the third step on {ratio(pairs[2:])}" if len(pairs) > 3 else ""
            total = sum(seconds[GRPO.name]) / max(1e-9, sum(values))
            print(
                f"{kind} {name}: {np.mean(values):.2f} s, {total:.2f} times as fast, by step",
                ratio(pairs),
                known,
            )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SETTINGS, default="1.7b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--seconds", type=float, default=300.0, help="from the start to the end of the last rollout")
    parser.add_argument("--steps", type=int, default=40, help="of each arm, at most")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    begun, setting, path = time.monotonic(), SETTINGS[args.size], args.output / RESULTS
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with server_of(setting, args.eager) as server:
        started = time.monotonic() - begun
        size, version = setting.size, server.request("/version")["version"]
        append(path, {"kind": "server", "device": device, "vllm": version, "size": args.size, "started": started})
        print(f"{device}, vLLM {version}, {args.size}: server started in {started:.0f} s; {size}", flush=True)
        cluster = RandomCluster(server.base_url)
        curves = measure_latencies(path, cluster, setting)
        cost = cluster.seconds_per_request(size.rows, curves[setting.contexts[0]](size.rows))
        print(f"latencies after {time.monotonic() - begun:.0f} s; {cost * 1e3:.2f} ms per request", flush=True)
        spec = ClusterSpec(curves[setting.contexts[0]])
        make = partial(replay_of, size=size, spec=spec, server=cluster)
        steps = take_turns(path, {row.name: make(row) for row in ARMS}, begun + args.seconds, args.steps)
        cluster.engine.close()
    simulate(path, size, curves, steps, cost)
    summarize(read(path))
    print(json.dumps({"steps": steps, "seconds": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main()
