"""
Kills and freezes servers during a run, and measures what is lost and how long the recovery takes.

    python -m benchmarks.faults [--kills 20] [--freezes 5]
    python -m benchmarks.faults --arms ahead,continuous,waves,stop,defer,tail,suffix,reuse,agents,environments

`trl-darts serve --restart` runs two real servers of the tiny reasoner. At random moments, also during weight syncs, a
random server is killed with SIGKILL, or stopped with SIGSTOP for 15 seconds. The run ends some steps after the last
fault. Each rollout must have N×M rows and submitted = ended + resumed + lost after their abort, and must not receive a
token twice. The log-probs of candidates that were resumed or moved are compared with a forward pass with the weights
of their rollout. No other server may be lost.

- ahead: with `rollout_ahead=1`.
- continuous: rollouts never end, log-probs are compared with the weights of each token's version, and no prompt may be
  trained on twice.
- waves: groups are trained on as they finish; otherwise as with continuous.
- stop: with a stop string, so that no candidate may continue from its tokens.
- defer: groups wait for long rounds, and a fifth of the prompts is audited.
- tail: another server takes over the last 16 candidates.
- suffix: with drafts.
- reuse: answers of the last pass are verified and continue.
- agents: conversations with a tool. Each call of it must be answered in one conversation, and no thread may be left.
- environments: conversations in processes, of which as many are killed as servers, and five calls that hang. A
  conversation must be told what its environment was asked, once, and no process may be left.
- adapter, adapter_continuous: weights are LoRA adapters, otherwise as with default and continuous. No adapter may be
  left on a server at the end.

Times are of one clock. The exit status is 1 if something was lost.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks import agent_audit, environment_audit, parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.lines import ROOT
from benchmarks.servers import make_trainer, training_args
from benchmarks.vllm_server import free_port, is_healthy
from trl_darts import DARTSGRPOTrainer
from trl_darts.engines.addresses import key_of
from trl_darts.engines.pool import State
from trl_darts.scheduling import CandidateEnded, CandidateState, EngineLost, RolloutResult, Scheduler, TokensArrived
from trl_darts.tiny_reasoner.task import accuracy_reward, make_dataset


CHECKPOINT = ROOT / "examples" / "tiny_reasoner" / "checkpoint"
NUM_SERVERS = 2
FROZEN_S = 15.0
HANGS = 5  # calls of environments
HEALTH_TIMEOUT_S = 5.0
POLL_S = 0.02
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
ADAPTER = {"weight_sync": "adapter", "learning_rate": 1e-4}  # so that versions differ by more than the tolerance
FIELDS: dict[str, dict[str, Any]] = {
    "default": {},
    "ahead": {"rollout_ahead": 1},
    "continuous": {"rollout_ahead": "continuous"},
    "waves": {
        "stream_training": True,
        "schedule": "grpo",
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    },
    "stop": {"generation_kwargs": {"stop": ["\x00never said"]}},
    "defer": {"defer_unsettled_groups": True, "audit_share": 0.2},
    "tail": {"tail_switch_at": 16},
    "suffix": {},
    "reuse": {"schedule": "grpo", "reuse_answers": True},
    "agents": {},
    "environments": {},
    "adapter": ADAPTER,
    "adapter_continuous": {**ADAPTER, "rollout_ahead": "continuous"},
}


@dataclass
class Fault:
    """One fault and its consequences, with times in seconds since the fault."""

    kind: str
    url: str
    at: float
    noticed: float | None = None
    back: float | None = None


class Chaos(TrainerCallback):
    """Injects faults, one at a time, and stops the run a few steps after the last one."""

    def __init__(self, engine: Any, kinds: list[str], seed: int, note_weights: Callable[[int], None]) -> None:
        self.engine, self.note_weights = engine, note_weights
        self.kinds = kinds
        self.random = random.Random(seed)
        self.faults: list[Fault] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.steps_left = 3

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.note_weights(0)
        self.thread.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note_weights(state.global_step)
        self.steps_left -= not self.thread.is_alive()
        control.should_training_stop = self.steps_left <= 0

    def _run(self) -> None:
        for kind in self.kinds:
            time.sleep(self.random.uniform(0.5, 8.0))
            url = self.random.choice(list(self.engine.states()))
            fault = Fault(kind, url, time.perf_counter())
            self.faults.append(fault)
            processes = server_processes(url)
            for process in processes:
                with suppress(psutil.NoSuchProcess):  # a parent's end may have ended it
                    process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self._follow(fault, processes)

    def _follow(self, fault: Fault, processes: list[psutil.Process]) -> None:
        while fault.back is None:
            time.sleep(POLL_S)
            since, state = time.perf_counter() - fault.at, self.engine.states()[fault.url]
            if fault.noticed is None and state is not State.UP:
                fault.noticed = since
            if fault.noticed is not None and state is State.UP:
                fault.back = since
            if fault.kind == "freeze" and since > FROZEN_S:
                while processes:
                    processes.pop().send_signal(signal.SIGCONT)


def server_processes(url: str) -> list[psutil.Process]:
    """Returns the processes of the server at an address, without the guard above them."""
    port = url.rsplit(":", 1)[1]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in words[:4] and words[words.index("--port") + 1] == port:
            found += [process, *process.children(recursive=True)]
    return found


@dataclass
class Audited:
    """One rollout, with the weights that it was started with."""

    scheduler: Scheduler
    prompts: Any
    weights: dict[str, torch.Tensor]
    start: float
    received: Counter[tuple[int, int]]  # tokens by candidate and segment
    rollout: Future[RolloutResult]
    end: float = 0.0


class Audit:
    """
    Checks each rollout of a trainer, and counts candidates and tokens. Log-probs may be off by `tolerance`, which
    grows with the length of the answers.
    """

    def __init__(self, trainer: DARTSGRPOTrainer, tolerance: float = 1e-4) -> None:
        self.trainer, self.tolerance = trainer, tolerance
        self.counts: Counter[str] = Counter()
        self.rollouts: list[tuple[float, float]] = []  # start and end
        self.worst = 0.0  # difference of a resumed candidate's log-prob
        self.open: list[Audited] = []
        self.model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT)  # a copy would call the original
        if trainer.vllm_generation.sends_adapters:
            self.model = get_peft_model(self.model, LORA)
        engine = trainer.vllm_generation.engine
        self._start, engine.start = engine.start, self._audited
        self._open, engine.open = engine.open, self._opened
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # by step, of the arm "continuous"
        self.trained: Counter[int] = Counter()  # prompts, by the ID of their group

    def _audited(self, scheduler: Scheduler, plans: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_ended()
        received = self._count(scheduler)
        weights = {name: value.detach().clone() for name, value in self.trainer.model.state_dict().items()}
        start = time.perf_counter()
        rollout = self._start(scheduler, plans, prompts, *args, **kwargs)
        audited = Audited(scheduler, prompts, weights, start, received, rollout)
        rollout.add_done_callback(lambda _: setattr(audited, "end", time.perf_counter()))
        self.open.append(audited)
        return rollout

    def _count(self, scheduler: Scheduler) -> Counter[tuple[int, int]]:
        """Counts a rollout's events from now on. Returns the tokens received, by candidate and segment."""
        ledger, handle, counts = scheduler.ledger, scheduler.handle, self.counts
        received: Counter[tuple[int, int]] = Counter()

        def counted(event: Any) -> Any:
            if isinstance(event, TokensArrived | CandidateEnded) and ledger.live(event.candidate_id, event.segment):
                received[event.candidate_id, event.segment] += len(event.tokens)
                counts["ended"] += isinstance(event, CandidateEnded)
            if isinstance(event, EngineLost):
                aborting = [c for c in ledger.candidates if c.state is CandidateState.ABORTING]
                counts["dropped"] += sum(c.engine_id == event.engine_id for c in aborting)
            return handle(event)

        scheduler.handle = counted  # type: ignore[method-assign]
        return received

    def _opened(self, scheduler: Scheduler, *args: Any) -> Any:
        """Audits a rollout whose groups are taken while it runs, batch by batch."""
        received, take, begin = self._count(scheduler), scheduler.take, [time.perf_counter()]
        before = self.counts["submitted"]
        run, future = self._open(scheduler, *args)

        def taken(group_ids: Sequence[int], now: float) -> RolloutResult:
            texts = {group_id: self.trainer._batches.buffer.entries[group_id].tokens for group_id in group_ids}
            result = take(group_ids, now)
            self.trained.update(group_ids)
            self.counts["resumed"] += result.num_resumed
            for candidate in [c for group in result.groups for c in group.candidates]:
                tokens = sum(received.pop((candidate.candidate_id, s), 0) for s in range(candidate.segment + 1))
                self.counts["tokens received"] += tokens
                self.counts["tokens in candidates"] += candidate.length
                if candidate.segment > 0 and candidate.length:
                    self._compare_versions(texts[candidate.group_id], candidate)
            self.counts["submitted"] = before + scheduler.ledger.num_submitted
            ended = sum(self.counts[name] for name in ("ended", "resumed", "dropped"))
            self.counts["unaccounted"] += abs(self.counts["submitted"] - ended - scheduler.ledger.num_running)
            self.rollouts.append((begin[0], now))
            begin[0] = now
            return result

        scheduler.take = taken  # type: ignore[method-assign]
        return run, future

    def _compare_versions(self, prompt: Sequence[int], candidate: Any) -> None:
        """Compares a candidate's log-probs with those of the weights that sampled each token."""
        start = 0
        for version, count in candidate.versions:
            self.model.load_state_dict(self.weights[version])
            part = slice(start, start := start + count)
            self._compare(prompt, candidate.tokens, candidate.logprobs, part)
        assert start == candidate.length

    def note_weights(self, step: int) -> None:
        """Keeps the weights of the last steps."""
        self.weights[step] = {name: value.detach().clone() for name, value in self.trainer.model.state_dict().items()}
        self.weights.pop(step - 20, None)

    def check_ended(self) -> None:
        """Checks the rollouts that have ended."""
        for audited in [audited for audited in self.open if audited.rollout.done()]:
            self.open.remove(audited)
            if not audited.rollout.cancelled():
                self._check(audited, audited.rollout.result())

    def _check(self, audited: Audited, result: RolloutResult) -> None:
        ledger, counts = audited.scheduler.ledger, self.counts
        self.rollouts.append((audited.start, audited.end))
        counts["submitted"] += ledger.num_submitted
        counts["resumed"] += ledger.num_resumed
        counts["moved"] += 0 if result.tail_switch is None else result.tail_switch.num_moved
        counts["restarted"] += sum(c.num_restarts for c in ledger.candidates)
        assert all(len(group.rows) == self.trainer.args.num_generations for group in result.groups)
        reused = {
            (group_id, index): len(partial.tokens)
            for group_id, group in ledger.groups.items()
            for index, partial in enumerate(group.plan.resumed)
        }
        counts["tokens reused"] += sum(reused.values())
        for candidate in ledger.candidates:
            segments = range(candidate.segment + 1) if audited.scheduler.carries_tokens else [candidate.segment]
            counts["tokens received"] += sum(audited.received[candidate.candidate_id, s] for s in segments)
            counts["tokens in candidates"] += candidate.length - reused.get((candidate.group_id, candidate.index), 0)
        self.model.load_state_dict(audited.weights)
        for candidate in ledger.candidates:
            if not candidate.length or not (candidate.segment > 0 or (candidate.group_id, candidate.index) in reused):
                continue
            self._compare(audited.prompts[candidate.group_id][0].tokens, candidate.tokens, candidate.logprobs)

    def _compare(self, prompt: Sequence[int], tokens: Sequence[int], logprobs: Any, part: slice = slice(None)) -> None:
        """Compares a resumed candidate's log-probs with those of the model that sampled it."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        self.counts["compared"] += 1
        self.worst = max(self.worst, (torch.tensor(logprobs) - expected)[part].abs().max().item())

    @property
    def nothing_lost(self) -> bool:
        """Whether all counts are consistent."""
        counts = self.counts
        ended = counts["ended"] + counts["resumed"] + counts["dropped"]
        if self.trained:  # of a rollout that is not over
            return not counts["unaccounted"] and set(self.trained.values()) == {1} and self._same_tokens
        return counts["submitted"] == ended and self._same_tokens

    @property
    def _same_tokens(self) -> bool:
        counts = self.counts
        same = counts["tokens received"] == counts["tokens in candidates"]
        return same and self.worst <= self.tolerance


@contextmanager
def serve(
    log_dir: str, num_servers: int, options: Sequence[str] = (), model_dir: Path = CHECKPOINT
) -> Iterator[list[str]]:
    """Yields the addresses of servers that are restarted when they die."""
    port = free_port()
    command = [sys.executable, "-m", "trl_darts.cli", "serve", str(model_dir), "--restart"]
    command += ["--num-servers", str(num_servers), "--port", str(port), "--log-dir", log_dir]
    process = subprocess.Popen(
        [*command, *options], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    urls = [f"http://127.0.0.1:{port + index}" for index in range(num_servers)]
    deadline = time.monotonic() + 240
    try:
        while not all(map(is_healthy, urls)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The servers did not start; logs in {log_dir}.")
            time.sleep(0.5)
        yield urls
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def num_adapters(url: str) -> int:
    """Returns the number of adapters that a server has loaded."""
    headers = {"Authorization": f"Bearer {key}"} if (key := key_of(url)) else {}
    models = requests.get(f"{url}/v1/models", headers=headers, timeout=30).json()["data"]
    return sum(model["parent"] is not None for model in models)


def train(urls: list[str], kinds: list[str], seed: int, output_dir: str, **fields: Any) -> tuple[list[Fault], Audit]:
    """Trains while faults are injected. Servers beyond the main ones are tail servers."""
    main_urls, tail_urls = urls[:NUM_SERVERS], urls[NUM_SERVERS:]
    args = training_args(
        ",".join(main_urls),
        output_dir,
        vllm_tail_server_url=",".join(tail_urls) or None,
        vllm_health_timeout_s=HEALTH_TIMEOUT_S,
        num_generations=8,
        max_completion_length=256,
        max_steps=100_000,
        seed=seed,
        # With this learning rate, answers stay long.
        **{"per_device_train_batch_size": 64, "learning_rate": 1e-6, **fields},
    )
    kind = partial(DARTSGRPOTrainer, peft_config=LORA if args.weight_sync == "adapter" else None)
    trainer = make_trainer(str(CHECKPOINT), accuracy_reward, args, make_dataset(64, seed=0), kind=kind)
    audit = Audit(trainer)
    faults = disturb(trainer, kinds, seed, audit)
    audit.check_ended()
    audit.counts["adapters left"] = sum(map(num_adapters, urls))
    return faults, audit


def disturb(trainer: Any, kinds: list[str], seed: int, audit: Any) -> list[Fault]:
    """Trains, with faults, and returns them."""
    chaos = Chaos(trainer.vllm_generation.engine, kinds, seed, getattr(audit, "note_weights", lambda step: None))
    trainer.add_callback(chaos)
    trainer.train()
    audit.counts["lost without a fault"] = trainer.vllm_generation.engine.num_losses - len(kinds)
    trainer.vllm_generation.engine.close()
    return chaos.faults


def run(shared: Shared, arm: str, kills: int, freezes: int, seed: int) -> dict[str, Any]:
    """Trains with an arm's settings, and returns the faults, their consequences and the checks."""
    kinds = ["kill"] * kills + ["freeze"] * freezes
    random.Random(seed).shuffle(kinds)
    servers, options = NUM_SERVERS + (arm == "tail"), ["--speculative", "suffix"] if arm == "suffix" else []
    options += ["--lora-rank", str(LORA.r)] if arm.startswith("adapter") else []
    with tempfile.TemporaryDirectory() as directory:
        converses = arm in ("agents", "environments")
        model_dir = agent_audit.make_model(Path(directory) / "caller") if converses else CHECKPOINT
        with serve(directory, servers, options, model_dir) as urls:
            audit: Any
            if converses:
                health = {"vllm_health_timeout_s": HEALTH_TIMEOUT_S}
                make: Any = agent_audit.audited_trainer
                if arm == "environments":
                    make = partial(environment_audit.audited_trainer, kills=kills, hangs=HANGS)
                audit = make(urls, model_dir, seed, directory, **health)
                faults = disturb(audit.trainer, kinds, seed, audit)
            else:
                faults, audit = train(urls, kinds, seed, directory, **FIELDS[arm])
    found = {"kills": kills, "freezes": freezes, "seed": seed, "nothing_lost": audit.nothing_lost}
    found |= {"counts": dict(audit.counts), "worst": audit.worst}
    return {**found, "faults": list(map(asdict, faults)), "rollouts": audit.rollouts}


def check(line: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a run."""
    if line["counts"].get("adapters left"):
        return f"Adapters were left loaded with {line['arm']}: {line['counts']['adapters left']}"
    return None if line["nothing_lost"] else f"Something was lost with {line['arm']}: {line['counts']}"


BENCHMARK = Benchmark(
    "faults",
    __doc__,
    {"arm": list(FIELDS)},
    run,
    parts.faults,
    options={"kills": 20, "freezes": 5, "seed": 0},
    usual={"arm": ["default"]},
    quick={"kills": 1, "freezes": 0},
    check=check,
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
