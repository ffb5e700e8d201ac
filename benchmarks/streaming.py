"""
Measures the time of training steps with and without streaming, on the same lengths.

    python benchmarks/streaming.py [--quick] [--share]

A real vLLM server runs on one core and the trainer on the other, like a server and a trainer with a GPU each. A small
Qwen2 with random weights is trained with a learning rate of zero. Lengths are drawn once and replayed. Steps with and
without streaming alternate and decode, score and train on the same numbers of tokens. For this, the DARTS row has 12
candidates for each 8 rows and no early stop, because its budgets depend on history and timing.

Columns, medians over pairs of steps:

- step: seconds without and with streaming, and the geometric mean of their ratio with a 95 % interval.
- forward: seconds of the log-probs that TRL computes after the rollout, and their share of the step without streaming.
- hidden: share of these seconds that streaming saves after the rollout. It does not save the time from the rollout's
  last event until all kept rows are scored, and the time in which TRL reads the streamed log-probs or computes others.
- work: seconds of passes during the rollout and after it, relative to `forward`. Chunks cost more than one pass.
- cache: largest size of the cached keys and values.

The row "rewards" has a reward function that sleeps 50 ms for each group, with and without `stream_rewards`. There,
`forward` is the time that the function takes after the rollout. Pairs are appended to
benchmarks/results/streaming.jsonl.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table

from benchmarks.cells import ratio
from benchmarks.lines import record
from benchmarks.models import EOS_ID, make_random_model, make_tokenizer
from benchmarks.servers import training_args
from benchmarks.vllm_server import start_vllm_server
from trl_darts import DARTSGRPOTrainer
from trl_darts.streaming.streams import Streams


SLEEP_S = 0.05
LIMIT = 768
console = Console(width=160)


@dataclass(frozen=True)
class Regime:
    """
    Lengths and sizes of a comparison. Lengths are log-normal with this median, and differ between prompts. `spread` is
    the standard deviation of their logarithms. `beta` adds a reference model.
    """

    name: str
    prompts: int = 4
    num_generations: int = 8
    median: float = 110.0
    spread: float = 0.8
    chunk_tokens: int = 64
    beta: float = 0.0
    rewards: bool = False
    schedule: str = "grpo"


REGIMES = (
    Regime("long tail"),
    Regime("long tail, with a reference", beta=0.04),
    Regime("long tail, chunks of 16", chunk_tokens=16),
    Regime("long tail, chunks of 256", chunk_tokens=256),
    Regime("long tail, DARTS", schedule="darts"),
    Regime("equal lengths", spread=0.0, median=200.0),
    Regime("short answers", median=20.0, spread=0.3),
    Regime("rewards", rewards=True, prompts=8, num_generations=4, median=40.0),
)


def make_model(directory: Path) -> Path:
    """Builds a model with 4 million parameters, whose forward pass is a tenth of a step or more."""
    return make_random_model(directory, make_tokenizer(), hidden_size=256, num_layers=4, intermediate_size=1024)


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Pins processes and threads that are started inside this context to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def reward(completion_ids: list[list[int]], slow: list[bool], **kwargs: Any) -> list[float]:
    """Sleeps 50 ms for each group of four, if asked to."""
    if slow[0]:
        time.sleep(SLEEP_S * len(completion_ids) / 4)
    return [float(ids[0] % 5) for ids in completion_ids]


class Bench:
    """Trains with alternating steps with and without streaming."""

    def __init__(self, regime: Regime, model_dir: Path, url: str, out: Path, pairs: int) -> None:
        self.regime = regime
        rows = regime.prompts * regime.num_generations
        args = training_args(
            url,
            out,
            learning_rate=0.0,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=rows // 8,
            num_generations=regime.num_generations,
            max_completion_length=LIMIT,
            max_steps=2 * pairs + 2,
            schedule=regime.schedule,
            max_num_generations=regime.num_generations * 3 // 2 if regime.schedule == "darts" else None,
            tail_pruning=regime.schedule != "darts",
            long_end_patience=None,  # waits for all candidates
            beta=regime.beta,
            stream_logprobs=not regime.rewards,
            stream_rewards=regime.rewards,
            stream_chunk_tokens=256 if regime.rewards else regime.chunk_tokens,  # only read with log-probs
        )
        prompts = Dataset.from_list(
            [{"prompt": f"prompt {i}: ", "slow": regime.rewards} for i in range(regime.prompts)]
        )
        self.trainer = DARTSGRPOTrainer(
            model=str(model_dir),
            args=args,
            reward_funcs=reward,
            train_dataset=prompts,
            processing_class=make_tokenizer(),
        )
        self.rng = np.random.default_rng(0)
        self.streams = self.trainer._streams
        self.steps: list[dict[str, float]] = []
        self.lengths = np.zeros(0)
        self._watch(self.trainer)

    def _watch(self, trainer: Any) -> None:
        score, compute = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies

        def scored(inputs: Any) -> Any:
            self._begin_step()
            return score(inputs)

        def computed(*args: Any, **kwargs: Any) -> Any:
            # A call with a gradient is the loss's own pass, which streaming does not replace.
            with nullcontext() if torch.is_grad_enabled() else self._timed("forward"):
                return compute(*args, **kwargs)

        def timed(name: str, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._timed(name):
                    return function(*args, **kwargs)

            return call

        trainer._generate_and_score_completions = scored
        trainer._get_per_token_logps_and_entropies = computed
        trainer.training_step = timed("seconds", trainer.training_step)
        trainer._calculate_rewards = timed("rewards", trainer._calculate_rewards)
        # Candidates end at their given length. The server's mask until then takes the same time in both steps.
        trainer._engine.overrides = lambda command: {
            "min_tokens": int(self.lengths[command.group_id, command.index]) - 1,
            "logit_bias": {str(EOS_ID): 100},
        }

    def _begin_step(self) -> None:
        pair, second = divmod(len(self.steps), 2)
        streamed = pair % 2 != second  # without, with; with, without; …
        self.trainer._streams = self.streams if streamed else Streams()
        if not second:
            regime, spread = self.regime, self.regime.spread / 2**0.5
            levels = self.rng.normal(0, spread, (regime.prompts, 1))
            # For as many candidates as DARTS may start.
            logs = levels + self.rng.normal(0, spread, (regime.prompts, 2 * regime.num_generations))
            self.lengths = np.clip(regime.median * np.exp(logs), 2, LIMIT).astype(int)
        self.steps.append({"seconds": 0.0, "forward": 0.0, "rewards": 0.0})

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.steps[-1][name] += time.perf_counter() - start

    def run(self) -> list[tuple[dict[str, float], dict[str, float]]]:
        """Returns pairs of steps without and with streaming. The first pair warms up and is dropped."""
        self.trainer.train()
        logs = [entry for entry in self.trainer.state.log_history if "darts/rollout/seconds" in entry]
        for step, entry in zip(self.steps, logs, strict=True):
            step |= {name.split("/")[-1]: float(value) for name, value in entry.items() if "/stream/" in name}
        pairs = zip(self.steps[::2], self.steps[1::2], strict=True)
        return [(other, one) if index % 2 else (one, other) for index, (one, other) in enumerate(pairs)][1:]


def row_of(regime: Regime, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> list[str]:
    """Formats the row of a regime."""

    def median(values: Any) -> float:
        return float(statistics.median(list(values)))

    ratios = [off["seconds"] / on["seconds"] for off, on in pairs]
    name = "rewards" if regime.rewards else "forward"
    forward, step = median(off[name] for off, _ in pairs), median(off["seconds"] for off, _ in pairs)
    left = median(on[name] + on.get("exposed_seconds", 0.0) for _, on in pairs)
    cells = [regime.name, f"{step:.2f}", f"{median(on['seconds'] for _, on in pairs):.2f}"]
    cells.append(ratio(ratios))
    cells += [f"{forward:.2f} ({forward / step:.0%})", f"{1 - left / forward:.0%}"]
    if regime.rewards:
        return [*cells, "", ""]
    work = median(on["hidden_seconds"] + on["exposed_seconds"] + on["forward"] for _, on in pairs)
    return [*cells, f"{work / forward:.2f}", f"{median(on['cache_bytes'] for _, on in pairs) / 2**20:.0f} MiB"]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of steps for each row")
    parser.add_argument("--only", nargs="*", default=[regime.name for regime in REGIMES], help="names of rows to run")
    parser.add_argument("--share", action="store_true", help="run server and trainer on the same core")
    parser.add_argument("--quick", action="store_true", help="smoke test: one pair each")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: 1 if args.share else None]
    torch.set_num_threads(1)
    num_pairs = 1 if args.quick else args.pairs
    table = Table(title=f"{num_pairs} pairs of steps; server and trainer on one core{'' if args.share else ' each'}")
    for name in ("lengths", "step off", "step on", "ratio", "forward (share)", "hidden", "work", "cache"):
        table.add_column(name, justify="left" if name == "lengths" else "right")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = make_model(Path(directory) / "model")
        with on_cores({cores[0]}):
            options: dict[str, Any] = {"max_model_len": 2048, "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
            server = stack.enter_context(start_vllm_server(model_dir, **options))
        stack.enter_context(on_cores({cores[-1]}))
        for regime in REGIMES:
            if regime.name in args.only:
                out = Path(directory) / "run"
                pairs = Bench(regime, model_dir, server.base_url, out, num_pairs).run()
                record("streaming", {"regime": regime.name, "share": args.share, "pairs": pairs})
                table.add_row(*row_of(regime, pairs))
    console.print(table)


if __name__ == "__main__":
    main()
