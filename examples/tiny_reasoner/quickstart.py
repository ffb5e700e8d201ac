"""
Compares GRPO and DARTS on the tiny reasoner, without a server, in a few minutes on two cores. Prints a table and draws
a figure.

    python examples/tiny_reasoner/quickstart.py [--steps 12] [--output-dir outputs/quickstart]

All runs start from the included checkpoint and get the same prompts. One run each is a demonstration, not evidence:
rewards differ more between two runs of one method than between the methods.
"""

import argparse
import gc
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any


if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):  # before the imports below, which take seconds
    print("Three runs, one after another, then a table and a figure: some minutes on two cores.", flush=True)

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.analysis.plots import plot_comparison, series
from trl_darts.import_utils import is_matplotlib_available
from trl_darts.tiny_reasoner.task import accuracy_reward, make_dataset


CHECKPOINT = Path(__file__).parent / "checkpoint"
LINE_EVERY = 5  # steps
RUNS: dict[str, dict[str, Any]] = {
    "GRPO": {"schedule": "grpo"},
    "DARTS, as in the paper": {"schedule": "darts", "long_end_patience": None},
    "DARTS": {"schedule": "darts"},
}


class ShowProgress(TrainerCallback):
    """Shows each step's reward and candidates in a bar on stderr, or every few steps in a line if it is a file."""

    def __init__(self, name: str, steps: int) -> None:
        self.name = name
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, TextColumn("{task.fields[state]}"), console=self.console)
        self.task = self.bar.add_task(name, total=steps, state="")

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.console.is_terminal:
            self.bar.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "reward" not in logs:  # the last entry is a summary of the run
            return
        total, aborted = logs["darts/budget/total"], logs["darts/rollout/aborted_candidates"]
        text = f"reward {logs['reward']:.2f}, {total:.0f} candidates, {aborted:.0f} aborted"
        self.bar.update(self.task, completed=state.global_step, state=text)
        if not self.console.is_terminal and (state.global_step % LINE_EVERY == 0 or state.global_step == 1):
            self.console.print(f"{self.name}: step {state.global_step} of {state.max_steps}, {text}", soft_wrap=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self.console.is_terminal:
            self.bar.stop()


def train(name: str, steps: int, output_dir: Path) -> tuple[list[dict[str, Any]], float]:
    """Trains from the checkpoint. Returns the log and the seconds of the run."""
    args = DARTSGRPOConfig(
        output_dir=str(output_dir),
        num_generations=8,
        per_device_train_batch_size=64,  # 8 prompts × 8
        max_completion_length=256,
        max_steps=steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        save_rollout_trace=True,  # for `trl-darts report`
        report_to=[],
        seed=0,
        **RUNS[name],
    )
    show = ShowProgress(f"{list(RUNS).index(name) + 1}/{len(RUNS)} {name}", steps)
    trainer = DARTSGRPOTrainer(
        model=str(CHECKPOINT),
        reward_funcs=accuracy_reward,
        args=args,
        # The 64 prompts recur every 8 steps, so that later budgets depend on their history.
        train_dataset=make_dataset(64, seed=0),
        callbacks=[show],
    )
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    try:
        trainer.train()
    finally:
        show.on_train_end()  # restores the cursor, also after Ctrl-C
    return trainer.state.log_history, time.perf_counter() - start


def summarize(log_history: list[dict[str, Any]], seconds: float) -> dict[str, str]:
    """Returns the rows of the table for a run."""
    reward, length = series(log_history, "reward"), series(log_history, "completions/mean_length")
    last = max(1, len(reward) // 3)
    generated = sum(series(log_history, "darts/rollout/generated_tokens"))
    kept = sum(series(log_history, "darts/rollout/kept_tokens"))
    long_ends = series(log_history, "darts/selection/long_end_ratio")
    return {
        "reward, first third": f"{sum(reward[:last]) / last:.2f}",
        "reward, last third": f"{sum(reward[-last:]) / last:.2f}",
        "mean length, kept rows": f"{sum(length) / len(length):.0f}",
        "p99 length, all candidates": f"{sum(series(log_history, 'darts/pool/length_p99')) / len(length):.0f}",
        "prompts that keep their longest": f"{sum(long_ends) / len(long_ends):.0%}" if long_ends else "–",
        "seconds in rollouts": f"{sum(series(log_history, 'darts/rollout/seconds')):.1f}",
        "seconds in all": f"{seconds:.1f}",
        "tokens generated": f"{generated:.0f}",
        "tokens kept": f"{kept:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"))
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps ({args.steps}) must be at least 1.")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("trl_darts.checks").setLevel(logging.ERROR)  # the table has the same information
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)  # more threads would only spin, because the model is tiny
    args.output_dir.mkdir(parents=True, exist_ok=True)
    console = Console()
    runs, cells = {}, {}
    try:
        for name in RUNS:
            runs[name], seconds = train(name, args.steps, args.output_dir / name)
            cells[name] = summarize(runs[name], seconds)
            gc.collect()
    except KeyboardInterrupt as stopped:
        print(f"\n{name}: {stopped}", file=sys.stderr)
        sys.exit(130)  # as in a shell after Ctrl-C
    table = Table("", *RUNS, title=f"{args.steps} steps of 8 prompts × 8 rows, one run each")
    for quantity in cells["GRPO"]:
        table.add_row(quantity, *(cells[name][quantity] for name in RUNS))
    console.print(table)
    if is_matplotlib_available():
        picture = args.output_dir / "comparison.png"
        plot_comparison(runs, picture)
        console.print(f"picture: {picture}")
    else:
        console.print("No picture, which needs matplotlib: `pip install 'trl-darts[report]'`.", markup=False)
    directories = " ".join(f"'{args.output_dir / name}'" for name in RUNS)
    console.print(f"more: trl-darts report {directories}", soft_wrap=True)


if __name__ == "__main__":
    main()
