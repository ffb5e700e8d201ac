"""
What a person reads of a training: a few of our values per step, and a last line.

Only the console is shortened: trackers, `trainer.state.log_history` and `rollouts/log.jsonl` get all values.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState


SHOWN = (
    "darts/rollout/seconds",
    "darts/budget/total",
    "darts/selection/kept_vs_pool_length_ratio",
    "darts/rollout/bubble_ratio",
    "darts/pool/aborted_ratio",
    "darts/staleness/age_mean",
)


@dataclass
class RolloutTotals:
    """What the rollouts of a training cost."""

    first_step: int = 0  # at which a resumed training went on
    num_rollouts: int = 0
    seconds: float = 0.0
    generated_tokens: float = 0.0
    kept_tokens: float = 0.0

    def begin(self, step: int) -> None:
        """Begins a training at a step."""
        self.first_step, self.num_rollouts = step, 0
        self.seconds = self.generated_tokens = self.kept_tokens = 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        self.num_rollouts += 1
        self.seconds += metrics["darts/rollout/seconds"]
        self.generated_tokens += metrics["darts/rollout/generated_tokens"]
        self.kept_tokens += metrics["darts/rollout/kept_tokens"]


def shorten_console(callbacks: list[TrainerCallback], totals: RolloutTotals) -> None:
    """Replaces those of transformers' callbacks that print logs. Others, such as a notebook's table, stay."""
    for place, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback:
            callbacks[place] = ShortProgressCallback(totals, callback.max_str_len)
        elif type(callback) is PrinterCallback:
            callbacks[place] = ShortPrinterCallback(totals)


class _ShortLog(TrainerCallback):
    def __init__(self, totals: RolloutTotals, *args: Any) -> None:
        super().__init__(*args)
        self.totals = totals

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Prints what is not ours, and those of our values that stand in `SHOWN`."""
        shown = {name: value for name, value in logs.items() if name in SHOWN or not name.startswith("darts/")}
        super().on_log(args, state, control, logs=shown, **kwargs)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.totals.begin(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if state.is_world_process_zero and self.totals.num_rollouts:
            print(last_line(args, state, self.totals))  # noqa: T201  (as transformers prints logs)


class ShortProgressCallback(_ShortLog, ProgressCallback):
    """Transformers' progress bar, with fewer of our values."""


class ShortPrinterCallback(_ShortLog, PrinterCallback):
    """Transformers' print of the logs, with fewer of our values."""


def last_line(args: Any, state: TrainerState, totals: RolloutTotals) -> str:
    """What the training's rollouts cost, where its traces are, and how to look at them."""
    runtime = state.log_history[-1].get("train_runtime") if state.log_history else None
    of_all = f" of {runtime:,.1f} s" if runtime else ""
    beyond = max(0.0, totals.generated_tokens - totals.kept_tokens)
    share = beyond / totals.generated_tokens if totals.generated_tokens else 0.0
    report = "Set `save_rollout_trace=True` for traces and `trl-darts report`."
    if args.save_rollout_trace:
        directory = str(Path(args.output_dir))
        report = f"Traces: {directory}/rollouts. Report: trl-darts report {shlex.quote(directory)}"
    plural = "" if totals.num_rollouts == 1 else "s"
    since = f" since step {totals.first_step}" if totals.first_step else ""
    return (
        f"Ended at step {state.global_step} of {state.max_steps}: {totals.num_rollouts} rollout{plural}{since} in "
        f"{totals.seconds:,.1f} s{of_all}, {beyond:,.0f} of {totals.generated_tokens:,.0f} tokens ({share:.0%}) "
        f"in candidates beyond the rows trained on. {report}"
    )
