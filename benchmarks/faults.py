"""
A training whose servers are killed and frozen: what is lost, and how long it takes.

    python benchmarks/faults.py --kills 20 --freezes 5

`trl-darts serve --restart` runs two real servers of the tiny reasoner. At random moments, also during weight syncs, a
random server is ended with SIGKILL, or stopped with SIGSTOP for 15 seconds. The training goes on until all faults are
through. Checked for each rollout: N×M rows; submitted = ended + resumed + dropped with their server after they were
called off; no token received twice; and the log-probs of resumed candidates against a forward pass.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"))

import psutil
import requests
import torch
from rich.console import Console
from rich.table import Table
from task import accuracy_reward, make_dataset
from transformers import PrinterCallback, TrainerCallback

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.engines.pool import State
from trl_darts.scheduling import Candidate, CandidateEnded, CandidateState, Scheduler, TokensArrived


CHECKPOINT = Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner" / "checkpoint"
FROZEN_S = 15.0
HEALTH_TIMEOUT_S = 5.0
POLL_S = 0.02


@dataclass
class Fault:
    """One fault and what came of it; times in seconds since the fault."""

    kind: str
    url: str
    at: float
    noticed: float | None = None
    back: float | None = None


@dataclass
class Books:
    """What is known of all rollouts."""

    rollouts: list[tuple[float, float]] = field(default_factory=list)  # start and end
    submitted: int = 0
    ended: int = 0
    resumed: int = 0
    dropped: int = 0
    tokens: int = 0
    received: int = 0
    num_compared: int = 0
    worst: float = 0.0


class Chaos(threading.Thread):
    """Harms the servers, one at a time, and notes when that is noticed and when the server is back."""

    def __init__(self, engine: Any, kinds: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self.engine = engine
        self.kinds = kinds
        self.random = random.Random(seed)
        self.faults: list[Fault] = []
        self.done = False

    def run(self) -> None:
        for kind in self.kinds:
            time.sleep(self.random.uniform(0.5, 8.0))
            url = self.random.choice(list(self.engine.states()))
            fault = Fault(kind, url, time.perf_counter())
            self.faults.append(fault)
            processes = server_processes(url)
            for process in processes:
                process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self._follow(fault, processes)
        self.done = True

    def _follow(self, fault: Fault, processes: list[psutil.Process]) -> None:
        while fault.back is None:
            time.sleep(POLL_S)
            since, state = time.perf_counter() - fault.at, self.engine.states()[fault.url]
            if fault.noticed is None and state is not State.UP:
                fault.noticed = since
            if fault.noticed is not None and state is State.UP:
                fault.back = since
            if fault.kind == "freeze" and since > FROZEN_S and processes:
                for process in processes:
                    process.send_signal(signal.SIGCONT)
                processes = []


def server_processes(url: str) -> list[psutil.Process]:
    """The processes that serve at an address, without the guard above them."""
    port = url.rsplit(":", 1)[1]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in words[:4] and words[words.index("--port") + 1] == port:
            found += [process, *process.children(recursive=True)]
    return found


class Stop(TrainerCallback):
    """Ends the training a few steps after the last fault."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.left = 3

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= self.chaos.done
        control.should_training_stop = self.left <= 0


def watch_rollouts(trainer: DARTSGRPOTrainer, books: Books) -> None:
    """Checks each rollout before the trainer gets it."""
    engine, run = trainer.vllm_generation.engine, trainer.vllm_generation.engine.run

    def watched(scheduler: Scheduler, plans: Any, prompts: Any, *args: Any) -> Any:
        handle = scheduler.handle

        def counted(event: Any) -> Any:
            if isinstance(event, TokensArrived | CandidateEnded) and scheduler.ledger.live(
                event.candidate_id, event.segment
            ):
                books.received += len(event.tokens)
            aborting = [c for c in scheduler.ledger.candidates if c.state is CandidateState.ABORTING]
            lost = type(event).__name__ == "EngineLost"
            books.dropped += sum(c.engine_id == event.engine_id for c in aborting) if lost else 0
            books.ended += isinstance(event, CandidateEnded) and bool(
                scheduler.ledger.live(event.candidate_id, event.segment)
            )
            return handle(event)

        scheduler.handle = counted
        start = time.perf_counter()
        result = run(scheduler, plans, prompts, *args)
        books.rollouts.append((start, time.perf_counter()))
        ledger = scheduler.ledger
        books.submitted += ledger.num_submitted
        books.resumed += ledger.num_resumed
        books.tokens += sum(c.length for c in ledger.candidates)
        assert all(len(group.rows) == trainer.args.num_generations for group in result.groups)
        for candidate in [c for c in ledger.candidates if c.segment > 0 and c.length]:
            compare(trainer, prompts[candidate.group_id][0].tokens, candidate, books)
        return result

    engine.run = watched


def compare(trainer: DARTSGRPOTrainer, prompt: Any, candidate: Candidate, books: Books) -> None:
    """A resumed candidate's log-probs against those of the model that it was sampled from."""
    tokens = torch.tensor(candidate.tokens)
    with torch.no_grad():
        logits = trainer.model(torch.tensor([[*prompt, *candidate.tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    books.num_compared += 1
    books.worst = max(books.worst, (torch.tensor(candidate.logprobs) - expected).abs().max().item())


def serve(log_dir: str) -> tuple[subprocess.Popen, list[str]]:
    """Starts the servers; their addresses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "trl_darts.cli", "serve", str(CHECKPOINT), "--num-servers", "2", "--restart"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-dir", log_dir],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    urls = [f"http://127.0.0.1:{port + i}" for i in range(2)]
    deadline = time.monotonic() + 240
    while not all(map(healthy, urls)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"The servers did not start; logs in {log_dir}.")
        time.sleep(0.5)
    return process, urls


def healthy(url: str) -> bool:
    """Whether a server answers."""
    try:
        return requests.get(f"{url}/health", timeout=2).ok
    except requests.RequestException:
        return False


def train(urls: list[str], kinds: list[str], seed: int, output_dir: str) -> tuple[list[Fault], Books, int]:
    """The training among faults."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        group_port = probe.getsockname()[1]
    args = DARTSGRPOConfig(
        output_dir=output_dir,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=",".join(urls),
        vllm_group_port=group_port,
        vllm_health_timeout_s=HEALTH_TIMEOUT_S,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=256,
        max_steps=100_000,
        learning_rate=1e-6,  # answers stay long
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
        seed=seed,
    )
    trainer = DARTSGRPOTrainer(
        str(CHECKPOINT), reward_funcs=accuracy_reward, args=args, train_dataset=make_dataset(64, seed=0)
    )
    trainer.remove_callback(PrinterCallback)
    books = Books()
    watch_rollouts(trainer, books)
    chaos = Chaos(trainer.vllm_generation.engine, kinds, seed)
    trainer.add_callback(Stop(chaos))
    chaos.start()
    trainer.train()
    return chaos.faults, books, trainer.state.global_step


def report(faults: list[Fault], books: Books, num_steps: int) -> bool:
    """Prints what came of it; whether all is well."""
    hit = [any(start <= fault.at <= end for fault in faults) for start, end in books.rollouts]
    usual = statistics.median(end - start for (start, end), was in zip(books.rollouts, hit, strict=True) if not was)
    table = Table(title=f"{len(faults)} faults in {num_steps} steps; a rollout without one takes {usual:.1f} s")
    for name in (
        "fault",
        "number",
        "noticed after (s)",
        "back after (s)",
        "rollouts that it hit",
        "time lost in them (s)",
    ):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind in ("kill", "freeze"):
        of_kind = [fault for fault in faults if fault.kind == kind]
        lost = [
            end - start - usual for start, end in books.rollouts if any(start <= fault.at <= end for fault in of_kind)
        ]
        if of_kind:
            table.add_row(
                kind,
                str(len(of_kind)),
                median_and_most([fault.noticed or 0.0 for fault in of_kind]),
                median_and_most([fault.back or 0.0 for fault in of_kind]),
                str(len(lost)),
                median_and_most(lost) if lost else "–",
            )
    balanced = books.submitted == books.ended + books.resumed + books.dropped
    console = Console()
    console.print(table)
    console.print(
        f"submitted {books.submitted} = ended {books.ended} + resumed {books.resumed} + dropped {books.dropped}: "
        f"{balanced}\ntokens received {books.received}, in candidates {books.tokens}\n"
        f"log-probs of {books.num_compared} resumed candidates: at most {books.worst:.1e} off"
    )
    return balanced and books.received == books.tokens and books.worst <= 1e-3


def median_and_most(values: list[float]) -> str:
    """Both, with one digit."""
    return f"{statistics.median(values):.1f} (≤ {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--freezes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = ["kill"] * options.kills + ["freeze"] * options.freezes
    random.Random(options.seed).shuffle(kinds)
    with tempfile.TemporaryDirectory() as directory:
        servers, urls = serve(directory)
        try:
            outcome = train(urls, kinds, options.seed, directory)
        finally:
            servers.send_signal(signal.SIGINT)
            servers.wait(60)
    raise SystemExit(0 if report(*outcome) else 1)


if __name__ == "__main__":
    main()
