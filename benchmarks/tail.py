"""
Compares rollouts on main servers alone, on tail servers alone, and with a switch between them.

    python benchmarks/tail.py [--quick] [--only paced|threads] [--lengths heavy|equal]

- paced: two vLLM servers at the pace of PAT's LLaMA-3.1-8B on eight A40 (see `pacing.py`). One represents four engines
  with two GPUs each, the other is one engine with eight. Prefilling moved tokens takes almost no time.
- threads: two servers of one thread, and one of two. They are profiled first.

Lengths are heavy-tailed or, as a control, equal. All rows have the same lengths and alternate step by step, as in
`schedules.py`. The first epoch, in which lengths are learned, is excluded. Columns: seconds of all rollouts; time of
the better static layout over this, geometric mean and 95 % interval over steps; switches; median of the candidates
left at a switch; median of predicted over real time from the switch to the end, with predicted lengths; error of the
predictor for rollouts without a switch, with the actual lengths (PAT, Figure 14) and the cost of requests, median and
range; the second column in the simulator. Rows are appended to benchmarks/results/tail.jsonl.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.table import Table

from benchmarks.cells import ratio
from benchmarks.lines import record
from benchmarks.models import make_markov_model, make_random_model, make_tokenizer
from benchmarks.pacing import paced_server, scaled
from benchmarks.schedules import Replay, Row, ServerCluster, Size, console
from benchmarks.vllm_server import start_vllm_server
from trl_darts.analysis.profile import ProfileOptions, profile_servers
from trl_darts.analysis.simulation import PAT_CLUSTER, ClusterSpec
from trl_darts.policy import EngineTimes
from trl_darts.policy.forecast import Work
from trl_darts.scheduling import RolloutResult


SCHEDULES = {"grpo": {"schedule": "grpo"}, "default": {"schedule": "darts"}}
MAX_MODEL_LEN = 1024
CONTEXT = 100  # tokens of a candidate halfway through a rollout, for the simulator's curve
Servers = tuple[dict[str, ServerCluster], ClusterSpec, dict[str, EngineTimes]]


class Watched(Replay):
    """
    Records the switches of its rollouts, and the error of `times` for those without one. A request takes `request`
    seconds.
    """

    def __init__(self, *args: Any, times: EngineTimes | None = None, request: float = 0.0) -> None:
        super().__init__(*args)
        self.times, self.request = times, request
        self.switches: list[tuple[float, float]] = []  # candidates left, predicted over real seconds
        self.errors: list[float] = []  # predicted over real seconds, minus 1

    def rollout(self, *args: Any, **kwargs: Any) -> RolloutResult:
        result = super().rollout(*args, **kwargs)
        begin, *_, end = result.timeline.times
        if (switch := result.tail_switch) is not None:
            predicted = np.nan if switch.forecast is None else switch.forecast.there
            self.switches.append((switch.num_unfinished, predicted / max(end - switch.begun, 1e-9)))
        elif self.times is not None:
            work = work_of(result)
            seconds = max(map(self.times.decode, work)) + self.request * sum(len(lengths) for _, lengths in work)
            self.errors.append(seconds / (end - begin) - 1)
        return result


def work_of(result: RolloutResult) -> list[Work]:
    """Returns the tokens of prompts and completions that each engine decoded."""
    work: dict[str, list[tuple[int, int]]] = {}
    for group in result.groups:
        for candidate in group.candidates:
            if candidate.engine_id is not None:  # otherwise, it was aborted before its submission
                pair = group.plan.num_prompt_tokens, candidate.length
                work.setdefault(candidate.engine_id, []).append(pair)
    return [(own[0], own[1]) for own in (np.array(pairs, float).T for pairs in work.values())]


@contextmanager
def paced_servers() -> Iterator[Servers]:
    """Yields both layouts at PAT's pace."""
    main, tail = PAT_CLUSTER, PAT_CLUSTER.tail
    assert tail is not None
    curve = scaled(main.latency, 1.0, main.num_engines)
    with TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = make_markov_model(Path(directory) / "markov", make_tokenizer())
        options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 1024}
        servers = [stack.enter_context(paced_server(model_dir, own, **options)) for own in (curve, tail.latency)]
        (url, tail_url), paces = ([server.base_url for server, _ in servers], [pace for _, pace in servers])
        spec = ClusterSpec(curve, tail=ClusterSpec(tail.latency))
        yield clusters([url], tail_url), spec, {"main": EngineTimes(curve), "tail": EngineTimes(tail.latency)}
        console.print("; ".join(f"{name}: {pace()}" for name, pace in zip(("main", "tail"), paces, strict=True)))


@contextmanager
def threaded_servers() -> Iterator[Servers]:
    """Yields two servers of one thread and one of two, with a model large enough for a second thread to help."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = make_random_model(Path(directory) / "model", make_tokenizer(), hidden_size=512, num_layers=6)
        options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256}
        started = [
            stack.enter_context(start_vllm_server(model_dir, env={"VLLM_CPU_OMP_THREADS_BIND": cores}, **options))
            for cores in ("0", "1", "0-1")
        ]
        *urls, tail_url = [server.base_url for server in started]
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        profiles = {
            name: profile_servers(ProfileOptions(tuple(own), sizes, context_lengths=(16, 128, 512))).profile
            for name, own in (("main", urls), ("tail", [tail_url]))
        }
        main, tail = (ClusterSpec.of(own.surface.at_context(CONTEXT), own.prefill) for own in profiles.values())
        times = {name: EngineTimes.of(own) for name, own in profiles.items()}
        yield clusters(urls, tail_url), replace(main, num_engines=2, tail=tail), times


def clusters(urls: Sequence[str], tail_url: str) -> dict[str, ServerCluster]:
    """Returns either layout alone, and both with a switch."""
    return {
        "main": ServerCluster(*urls),
        "tail": ServerCluster(tail_url),
        "switch": ServerCluster(*urls, tail_urls=[tail_url]),
    }


def compare(title: str, servers: Servers, size: Size) -> None:
    """Prints a table."""
    own, spec, times = servers
    assert spec.tail is not None
    specs = {"main": replace(spec, tail=None), "tail": spec.tail, "switch": spec}
    requests = {}
    for name, layout in times.items():
        num = size.rows / len(own[name].engine.base_urls)  # per engine, each with one token of context
        requests[name] = own[name].seconds_per_request(size.rows, layout.step(num, num))
    table = Table(title=f"{title}: {size}")
    columns = ("seconds", "better / this", "switches", "left", "predicted / real", "error", "simulated")
    for name in ("schedule", "servers", *columns):
        table.add_column(name, justify="right" if name in columns else "left")
    for schedule, settings in SCHEDULES.items():
        row = Row(schedule, settings)
        rows = {
            name: Watched(row, size, specs[name], own[name], times=times.get(name), request=requests.get(name, 0.0))
            for name in own
        }
        simulated = {name: Watched(row, size, specs[name]) for name in own}
        seconds, predicted = (steps(replays, size) for replays in (rows, simulated))
        for name, replay in rows.items():
            facts = {"title": title, "size": str(size), "schedule": schedule, "servers": name}
            facts |= {"switches": replay.switches, "errors": replay.errors}
            facts |= {"seconds": seconds[name].tolist(), "simulated": predicted[name].tolist()}
            record("tail", facts)
            ratios, static = better(seconds) / seconds[name], better(predicted).sum()
            left, factor = np.array(replay.switches or [(np.nan, np.nan)]).T
            errors = np.array(replay.errors or [np.nan])
            table.add_row(
                *(schedule, name, f"{seconds[name].sum():.1f}"),
                ratio(ratios.tolist()),
                *(f"{len(replay.switches)}", f"{np.median(left):.0f}", f"{np.median(factor):.2f}"),
                f"{np.median(errors):+.0%} ({errors.min():+.0%} to {errors.max():+.0%})",
                f"{static / predicted[name].sum():.2f}",
            )
    console.print(table)


def steps(replays: dict[str, Watched], size: Size) -> dict[str, np.ndarray]:
    """Returns the seconds of each step after the first epoch. The order of the rows rotates."""
    running = [(name, replay.steps()) for name, replay in replays.items()]
    for step in range(2 * size.batches):
        for i in range(len(running)):
            next(running[(step + i) % len(running)][1])
    return {name: np.array(own.outcome.rollout_seconds[size.batches :]) for name, own in replays.items()}


def better(seconds: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the static layout with the shorter total time."""
    return min(seconds["main"], seconds["tail"], key=np.sum)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smoke test: small and noisy")
    parser.add_argument("--only", choices=("paced", "threads"))
    parser.add_argument("--lengths", choices=("heavy", "equal"))
    args = parser.parse_args()
    for part, start, prompts in (("paced", paced_servers, 64), ("threads", threaded_servers, 16)):
        if args.only not in (None, part):
            continue
        heavy = Size(prompts, 8, 100.0, 1000, batches=1 if args.quick else 2, endless_share=0.0)
        sizes = {"heavy": heavy, "equal": replace(heavy, median=300.0, equal=True)}
        with start() as servers:
            for lengths, size in sizes.items():
                if args.lengths in (None, lengths):
                    compare(f"{part}, {lengths} lengths", servers, size)
            for cluster in servers[0].values():
                cluster.engine.close()


if __name__ == "__main__":
    main()
