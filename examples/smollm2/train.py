"""
Trains SmolLM2-135M-Instruct on tasks of reasoning-gym, with vLLM, on a CPU or on GPUs.

    python examples/smollm2/train.py [--schedules grpo,darts] [--steps 6]

Starts a vLLM server of its own unless `--server` names running ones, trains with each schedule from the same
checkpoint, and ends with a table and a picture. For another model, on a server of its own:

    trl-darts serve Qwen/Qwen2.5-7B-Instruct
    python examples/smollm2/train.py --model Qwen/Qwen2.5-7B-Instruct --server http://127.0.0.1:8000 --schedules darts
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any


if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):  # before the imports below, which take seconds
    print("Loading TRL …", flush=True)

import torch
from rich.console import Console
from rich.table import Table
from tasks import TEMPERATURE, accuracy_reward, make_dataset

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.analysis.plots import plot_comparison, series
from trl_darts.cli.exits import one_line_errors
from trl_darts.errors import ConfigurationError
from trl_darts.import_utils import require_matplotlib


CHECKPOINT = Path(__file__).parent / "checkpoint"
PORT = 8100
ON_CPU = not torch.cuda.is_available()


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """Starts `trl-darts serve` and yields the server's address. The trainer waits until it is ready."""
    command = [sys.executable, "-m", "trl_darts.cli", "serve", model, "--port", str(PORT)]
    process = subprocess.Popen([*command, "--max-model-len", "1024"], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{PORT}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def train(schedule: str, options: argparse.Namespace, server: str) -> list[dict[str, Any]]:
    """Trains from the checkpoint and returns the log."""
    args = DARTSGRPOConfig(
        output_dir=str(options.output_dir / schedule),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server,
        vllm_server_timeout=600,
        schedule=schedule,
        num_generations=8,
        per_device_train_batch_size=4,  # rows of a micro-batch
        gradient_accumulation_steps=8,  # 4 prompts × 8 rows in a step
        max_completion_length=256,
        max_steps=options.steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        save_rollout_trace=True,  # for `trl-darts report`
        report_to=[],
        use_cpu=ON_CPU,
        bf16=not ON_CPU,
        temperature=TEMPERATURE,
    )
    trainer = DARTSGRPOTrainer(
        model=options.model, reward_funcs=accuracy_reward, args=args, train_dataset=make_dataset(options.prompts)
    )
    trainer.train()
    return trainer.state.log_history


def summarize(log: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the rows of the table for a run."""

    def mean(name: str) -> float:
        values = series(log, name)
        return sum(values) / max(1, len(values))

    return {
        "reward, kept rows": f"{mean('reward'):.2f}",
        "tokens, kept rows": f"{mean('completions/mean_length'):.0f}",
        "tokens, longest 1 % of all candidates": f"{mean('darts/pool/length_p99'):.0f}",
        "seconds of a rollout": f"{mean('darts/rollout/seconds'):.1f}",
        "seconds of forward and backward passes": f"{mean('darts/train/seconds'):.1f}",
        "seconds of a weight sync": f"{mean('darts/sync/seconds'):.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CHECKPOINT), help="a checkpoint, or a model of the Hub")
    parser.add_argument("--server", help="addresses of running servers, with commas")
    parser.add_argument("--schedules", default="grpo,darts", help="with commas")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each run")
    parser.add_argument("--prompts", type=int, default=12, help="they recur, so that later steps know their lengths")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/smollm2"))
    options = parser.parse_args()
    logs: dict[str, Any] = {}
    with one_line_errors(ImportError, OSError):
        require_matplotlib()
        if options.model == str(CHECKPOINT) and not CHECKPOINT.exists():
            raise ConfigurationError(f"`--model` ({options.model!r}) was not made yet. Run `make smollm2`.")
        make_dataset(options.prompts)  # before a server is started
        start = time.perf_counter()
        with nullcontext(options.server) if options.server else own_server(options.model) as server:
            for schedule in options.schedules.split(","):
                logs[schedule] = train(schedule, options, server)
    show(logs, time.perf_counter() - start, options.output_dir)


def show(logs: Mapping[str, list[dict[str, Any]]], seconds: float, output_dir: Path) -> None:
    """Prints the table and draws the picture."""
    cells = {name: summarize(log) for name, log in logs.items()}
    table = Table("", *logs, title=f"Means over steps; one run each, {seconds / 60:.0f} minutes in all")
    for quantity in next(iter(cells.values())):
        table.add_row(quantity, *(own[quantity] for own in cells.values()))
    console = Console()
    console.print(table)
    plot_comparison(logs, output_dir / "comparison.png")
    console.print(f"picture: {output_dir / 'comparison.png'}", soft_wrap=True)
    runs = " ".join(str(output_dir / name) for name in logs)
    console.print(f"more: trl-darts report {runs} --output {output_dir / 'report.html'}", soft_wrap=True)


if __name__ == "__main__":
    main()
