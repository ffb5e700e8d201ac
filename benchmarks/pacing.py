"""
Paces a real vLLM engine on a CPU like a GPU: each step takes as long as a latency curve says for its sequences.

A CPU decodes a model of under a million parameters faster than a GPU decodes one of billions, so the engine sleeps for
the rest of each step. All else is real: HTTP, queues, aborts, weight sync. If the CPU is too slow, a step is late, and
the next ones sleep less to catch up.

[`register`] is a vLLM plugin. [`paced_server`] starts a server that loads it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.vllm_server import VLLMServer, plugin_environment, start_vllm_server
from trl_darts.analysis.simulation import LLAMA_8B_NIM
from trl_darts.policy import LatencyCurve
from trl_darts.weights.plugin import when_imported


CURVES = {
    "llama-8b": LLAMA_8B_NIM,
    # Assumed for the DARTS paper's benchmarks: about 14 B parameters on two H20, memory-bound up to some hundred
    # sequences.
    "darts": LatencyCurve((1, 128, 512), (0.016, 0.020, 0.036)),
}
# As in the DARTS paper, an engine has about 64 sequences of a batch, so the server represents several engines. The
# curves are slowed down, because two cores can't keep up otherwise.
NUM_ENGINES, SCALE = 4, 4.0
ENGINE_MODULE = "vllm.v1.engine.core"
CURVE, COUNTS = "PACE_CURVE", "PACE_COUNTS"  # environment variables of the server: a curve, and a file for [`Pace`]


def scaled(curve: LatencyCurve, factor: float, num_engines: int = 1) -> LatencyCurve:
    """Returns the curve of `num_engines` that share all sequences evenly and take `factor` times as long."""
    return LatencyCurve([num_engines * knot for knot in curve.knots], [factor * value for value in curve.values])


@dataclass
class Pace:
    """Statistics of how well an engine keeps its pace. Seconds are those that its steps should take."""

    steps: int = 0
    late: int = 0  # steps that ended too late
    seconds: float = 0.0
    lost: float = 0.0  # seconds of delay when the engine became idle

    def since(self, before: Pace) -> Pace:
        """Returns the difference to an earlier state."""
        return Pace(**{name: value - getattr(before, name) for name, value in asdict(self).items()})

    def __str__(self) -> str:
        late, lost = self.late / max(1, self.steps), self.lost / max(1e-9, self.seconds)
        return f"{late:.1%} of {self.steps:,} engine steps late, {lost:.1%} of their time lost"


class Pacer:
    """Paces one engine's steps, and writes their [`Pace`] to a file whenever the engine becomes idle."""

    def __init__(self, curve: LatencyCurve, path: Path) -> None:
        self.curve = curve
        self.path = path
        self.pace = Pace()
        self.due: float | None = None  # when the last step should have ended; `None` while the engine is idle

    def run(self, step: Callable[[Any], Any], engine: Any) -> Any:
        """Runs a step and sleeps before its tokens are returned."""
        if self.due is None:
            self.due = time.perf_counter()
        outputs, executed = step(engine)
        num_decoded = sum(bool(row.new_token_ids) for own in outputs.values() for row in own.outputs)
        if num_decoded:  # a drafted token takes as long as one more sequence
            seconds = self.curve(num_decoded + sum(_num_drafted(own.scheduler_stats) for own in outputs.values()))
            self.due += seconds
            left = self.due - time.perf_counter()
            time.sleep(max(0.0, left))
            self.pace.steps += 1
            self.pace.late += left < 0
            self.pace.seconds += seconds
        if not engine.scheduler.has_requests():
            self.pace.lost += max(0.0, time.perf_counter() - self.due - 1e-3)  # tolerance for inexact sleeps
            self.due = None
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(asdict(self.pace)))
            part.rename(self.path)
        return outputs, executed


def _num_drafted(stats: Any) -> int:
    return stats.spec_decoding_stats.num_draft_tokens if stats and stats.spec_decoding_stats else 0


def register() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    when_imported(ENGINE_MODULE, _patch_engine)


def _patch_engine(module: ModuleType) -> None:
    original = module.EngineCore.step
    if hasattr(original, "paced"):
        return
    pacer = Pacer(LatencyCurve.from_dict(json.loads(os.environ[CURVE])), Path(os.environ[COUNTS]))

    def step(self: Any) -> Any:
        return pacer.run(original, self)

    step.paced = True  # type: ignore[attr-defined]
    module.EngineCore.step = step


@contextmanager
def paced_server(
    model_dir: Path, curve: LatencyCurve, **options: Any
) -> Iterator[tuple[VLLMServer, Callable[[], Pace]]]:
    """
    Yields a server whose engine is paced by the curve, and a function that returns its [`Pace`] so far. The options
    are those of `start_vllm_server`. Raises if no step was paced, because vLLM's internals have changed.
    """
    with tempfile.TemporaryDirectory() as directory:
        counts = Path(directory) / "pace.json"
        env = plugin_environment(Path(directory), "benchmarks.pacing:register")
        env |= {CURVE: json.dumps(curve.to_dict()), COUNTS: str(counts), **options.pop("env", {})}

        def pace() -> Pace:
            return Pace(**json.loads(counts.read_text())) if counts.exists() else Pace()

        # Asynchronous scheduling uses another method, which returns before the tokens are ready.
        with start_vllm_server(model_dir, env=env, no_async_scheduling=True, **options) as server:
            yield server, pace
            if not pace().steps:
                raise RuntimeError(f"No step of the engine was paced; log {server.log_path}:\n{server.log_tail()}")
