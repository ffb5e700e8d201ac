"""
Kills or freezes a node of a Ray cluster in the middle of a rollout, and measures what is lost and how long it takes.

    python benchmarks/nodes.py --fault kill
    python benchmarks/nodes.py --fault freeze

The cluster is on this machine, but its nodes have addresses of their own: a head without CPUs, two nodes and a spare.
`trl-darts serve --on ray` runs two real servers of the tiny reasoner, and a trainer finds them by `ray:NAME`. When its
candidates have 100 tokens, every process of one node is killed with SIGKILL, or stopped with SIGSTOP until the end:
Ray's, the server's, and its guard. Printed are seconds from the fault until the pool and Ray notice, from the pool's
notice until its candidates were submitted elsewhere and had new tokens, and from the moment the replacement on the
spare was healthy until it decoded. `Audit` of benchmarks/faults.py checks that no token is lost, and compares the
log-probs of resumed candidates with a forward pass. A run is appended to benchmarks/results/nodes.jsonl.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"))

import psutil
import ray
from ray.cluster_utils import Cluster
from task import accuracy_reward, make_dataset
from transformers import PrinterCallback

from benchmarks.faults import CHECKPOINT, Audit
from benchmarks.lines import record
from benchmarks.servers import training_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.engines.pool import State
from trl_darts.scheduling import CandidateEnded, EngineLost, Submit, TokensArrived


NAME = "nodes"
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
POLL_S = 0.05


@contextmanager
def cluster() -> Iterator[Any]:
    """Yields a running cluster, to which this process is connected."""
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  # each node would count the memory of the whole machine
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for address in NODES:
        found.add_node(num_cpus=1, node_ip_address=address)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = found.address  # for the command and the trainer
    try:
        yield found
    finally:
        ray.shutdown()
        with suppress(Exception):  # a node is dead
            found.shutdown()


@contextmanager
def serve(log_dir: str, *flags: str) -> Iterator[None]:
    """Runs `trl-darts serve --on ray` with two servers, once they are healthy."""
    command = [sys.executable, "-m", "trl_darts.cli", "serve", str(CHECKPOINT), "--on", "ray", "--num-servers", "2"]
    command += ["--name", NAME, "--port", "8200", "--log-dir", log_dir, "--", *flags]
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


def processes_of(found: Any, address: str) -> list[psutil.Process]:
    """Returns the processes of a node, with Ray's first: a parent that sees its child die would clean up."""
    (node,) = [node for node in found.list_all_nodes() if node.node_ip_address == address]
    raylets = [info.process.pid for infos in node.all_processes.values() for info in infos]
    return [member for pid in raylets for member in (psutil.Process(pid), *psutil.Process(pid).children(True))]


class Watch(threading.Thread):
    """Injects one fault in the first rollout, and notes when things happen, by `time.perf_counter`."""

    def __init__(self, found: Any, trainer: Any, kind: str) -> None:
        super().__init__(daemon=True)
        self.found, self.kind = found, kind
        self.engine = trainer.vllm_generation.engine
        self.at: dict[str, float] = {}
        self.lost: set[int] = set()  # candidates of the lost server
        self.submitted: dict[int, float] = {}  # when each of them was submitted elsewhere
        self.decoded: dict[int, float] = {}  # and had tokens there
        self.on: dict[int, str] = {}
        self.ledger: Any = None
        self.members: list[psutil.Process] = []  # processes of the node
        start = self.engine.start

        def started(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self.ledger is None:
                self.ledger = scheduler.ledger
            handle, begin = scheduler.handle, scheduler.start
            scheduler.handle = lambda event: self._handled(event, handle)
            scheduler.start = lambda *args: self._submitted(begin(*args))
            return start(scheduler, *args, **kwargs)

        self.engine.start = started

    def _handled(self, event: Any, handle: Any) -> Any:
        now = time.perf_counter()
        if isinstance(event, EngineLost) and event.engine_id == self.at.get("url"):
            self.at.setdefault("pool knows", now)
            self.lost = {id for id, url in self.on.items() if url == event.engine_id}
        if isinstance(event, TokensArrived | CandidateEnded):
            url = self.on.get(event.candidate_id, "")
            if event.candidate_id in self.submitted and event.tokens:
                self.decoded.setdefault(event.candidate_id, now)
            if event.tokens and url not in self.urls:
                self.at.setdefault("replacement decodes", now)
            if isinstance(event, CandidateEnded):
                self.on.pop(event.candidate_id, None)
        return self._submitted(handle(event))

    def _submitted(self, commands: Any) -> Any:
        for command in commands:
            if isinstance(command, Submit):
                self.on[command.candidate_id] = command.engine_id
                if command.candidate_id in self.lost:
                    self.submitted.setdefault(command.candidate_id, time.perf_counter())
        return commands

    def run(self) -> None:
        self.urls = set(self.engine.states())
        url = sorted(self.urls)[0]
        # Later than the server's first step, in which a frozen one would hold the lock of torch's compiler cache.
        while self.ledger is None or not any(c.length > 100 and c.engine_id == url for c in self.ledger.candidates):
            time.sleep(POLL_S)
        self.members = members = processes_of(self.found, str(urlsplit(url).hostname))
        self.at |= {"url": url, "fault": time.perf_counter()}  # type: ignore[dict-item]
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        threading.Thread(target=self._ask_ray, args=(urlsplit(url).hostname,), daemon=True).start()
        while "replacement up" not in self.at:
            time.sleep(POLL_S)
            new = {other: state for other, state in self.engine.states().items() if other not in self.urls}
            if State.UP in new.values():
                self.at["replacement up"] = time.perf_counter()

    def kill(self) -> None:
        """Ends the processes of a frozen node."""
        for member in self.members:
            with suppress(psutil.NoSuchProcess):
                member.kill()

    def _ask_ray(self, address: str) -> None:
        registry = ray.get_actor(NAME, namespace="trl_darts")
        while "replacement healthy" not in self.at:
            time.sleep(POLL_S)
            if not any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes()):
                self.at.setdefault("Ray knows", time.perf_counter())
            entries = ray.get(registry.look.remote([0, 1], 0))[0]
            if any(entry.url is not None and entry.url not in self.urls for entry, _ in entries.values()):
                self.at["replacement healthy"] = time.perf_counter()


def report(watch: Watch, audit: Audit) -> None:
    """Prints times and the audit."""
    at, rollouts = watch.at, audit.rollouts

    def since(name: str, other: str) -> str:
        return f"{at[name] - at[other]:.2f} s" if name in at and other in at else "not seen"

    print(f"{watch.kind} of the node of {at['url']}, {len(watch.lost)} candidates on it")
    print(f"  the pool knows after {since('pool knows', 'fault')}, Ray after {since('Ray knows', 'fault')}")
    for name, times in (("submitted elsewhere", watch.submitted), ("have tokens there", watch.decoded)):
        delays = sorted(t - at["pool knows"] for t in times.values()) or [float("nan")]
        print(f"  {len(delays)} {name}, the first after {delays[0]:.3f} s, the last after {delays[-1]:.3f} s")
    print(f"  replacement healthy {since('replacement healthy', 'fault')} after the fault")
    print(f"  it is up {since('replacement up', 'replacement healthy')} after that, and decodes", end=" ")
    print(since("replacement decodes", "replacement healthy"), end=", ")
    same = "replacement decodes" in at and at["replacement decodes"] < rollouts[0][1]
    print("in the same rollout" if same else "in a later rollout")
    print(f"  rollouts: {', '.join(f'{end - start:.1f} s' for start, end in rollouts)}")
    print(f"  {dict(audit.counts)}, largest difference of a log-prob {audit.worst:.1e}")
    print(f"  nothing lost: {audit.nothing_lost}")


def facts(watch: Watch, audit: Audit) -> dict[str, Any]:
    """Returns what is recorded, in seconds since the fault."""
    begun = watch.at["fault"]
    at = {name: moment - begun for name, moment in watch.at.items() if name != "url"}
    elsewhere = {"submitted": watch.submitted, "decoded": watch.decoded}
    moments = {name: [moment - begun for moment in own.values()] for name, own in elsewhere.items()}
    rollouts = [[start - begun, end - begun] for start, end in audit.rollouts]
    found = {"counts": dict(audit.counts), "worst": audit.worst, "nothing_lost": audit.nothing_lost}
    return {"fault": watch.kind, "on_it": len(watch.lost), "at": at, **moments, "rollouts": rollouts, **found}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=["kill", "freeze"], default="kill")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--slots", type=int, default=8, help="sequences that a server decodes at once")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=700)
    args = parser.parse_args()
    flags = ("--max-num-seqs", str(args.slots))
    with cluster() as found, tempfile.TemporaryDirectory() as directory, serve(directory, *flags):
        config = training_args(
            "",
            directory,
            vllm_server_base_url=None,
            vllm_server_list=f"ray:{NAME}",
            vllm_health_timeout_s=5.0,
            num_generations=8,
            per_device_train_batch_size=args.rows // 4,
            gradient_accumulation_steps=4,
            max_completion_length=args.tokens,
            generation_kwargs={"ignore_eos": True},
            max_steps=args.steps,
            learning_rate=1e-4,
            schedule="grpo",
        )
        trainer = DARTSGRPOTrainer(
            str(CHECKPOINT),
            reward_funcs=accuracy_reward,
            args=config,
            train_dataset=make_dataset(args.rows // 8, seed=0),
        )
        trainer.remove_callback(PrinterCallback)
        watch = Watch(found, trainer, args.fault)
        audit = Audit(trainer, tolerance=1e-3)  # of up to 1,000 tokens in float32
        watch.start()
        try:
            trainer.train()
        finally:
            watch.kill()
        audit.check_ended()
        report(watch, audit)
        record("nodes", {"options": vars(args), **facts(watch, audit)})


if __name__ == "__main__":
    main()
