"""
Console output of a run: a first line, a few of our metrics per step, and a last line.

Only the console is shortened: trackers, `trainer.state.log_history` and `rollouts/log.jsonl` get all metrics.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from ..policy.deferral import CUT_OFF
from ..scheduling.policies import AUTO
from ..training.reward_checks import RewardWatch
from ..weights.fleet import resolve_weight_sync
from .stopwatch import step_line


SHOWN = (
    "darts/rollout/seconds",
    "darts/budget/total",
    "darts/selection/kept_vs_pool_length_ratio",
    "darts/rollout/bubble_ratio",
    "darts/pool/aborted_ratio",
    "darts/staleness/age_mean",
    "darts/rollout/carried_tokens",
    "darts/rollout/wait_seconds",
    "darts/uniform/dropped",
    "darts/uniform/rounds",
    "darts/buffer/long_round",
)
DEFERRED = "darts/rollout/deferred_groups"  # shown for schedules that defer groups
# Schedules that defer prompts, and what happens to these.
LEFT_OVER = {
    "tail_batching": "others restart in a long round",
    "partial_rollout": "others continue in the next rollout",
    "sorted": "others are for later batches",
}


@dataclass
class RolloutTotals:
    """Total cost of a run's rollouts."""

    first_step: int = 0  # step at which the run was resumed
    sends_adapters: bool = False  # whether weights reach servers as LoRA adapters
    rewards: RewardWatch = field(default_factory=RewardWatch)
    num_rollouts: int = 0
    seconds: float = 0.0
    generated_tokens: float = 0.0
    discarded_tokens: float = 0.0

    def begin(self, step: int) -> None:
        """Resets the totals at the start of training."""
        self.first_step, self.num_rollouts = step, 0
        self.seconds = self.generated_tokens = self.discarded_tokens = 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        self.num_rollouts += 1
        self.seconds += metrics["darts/rollout/seconds"]
        self.generated_tokens += metrics["darts/rollout/generated_tokens"]
        self.discarded_tokens += metrics["darts/rollout/discarded_tokens"]


def shorten_console(callbacks: list[TrainerCallback], totals: RolloutTotals) -> None:
    """Replaces the callbacks of transformers that print logs. Others, such as a notebook's table, stay."""
    for i, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback:
            callbacks[i] = ShortProgressCallback(totals, callback.max_str_len)
        elif type(callback) is PrinterCallback:
            callbacks[i] = ShortPrinterCallback(totals)


class _ShortLog(TrainerCallback):
    def __init__(self, totals: RolloutTotals, *args: Any) -> None:
        super().__init__(*args)
        self.totals = totals

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Prints all logs of others, those of our metrics that are in `SHOWN`, and where the step's seconds went."""
        names = {*SHOWN, DEFERRED} if args.schedule in LEFT_OVER else SHOWN
        shown = {name: value for name, value in logs.items() if name in names or not name.startswith("darts/")}
        if (step := step_line(logs)) is not None:
            shown["darts/step"] = step
        super().on_log(args, state, control, logs=shown, **kwargs)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(first_line(args, self.totals.sends_adapters))  # noqa: T201  (before the progress bar is drawn)
        super().on_train_begin(args, state, control, **kwargs)
        self.totals.begin(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if state.is_world_process_zero and self.totals.num_rollouts:
            print(last_line(args, state, self.totals) + self.totals.rewards.summary)  # noqa: T201  (as transformers prints logs)


class ShortProgressCallback(_ShortLog, ProgressCallback):
    """Transformers' progress bar, with fewer of our metrics."""


class ShortPrinterCallback(_ShortLog, PrinterCallback):
    """Transformers' printer of logs, with fewer of our metrics."""


def first_line(args: Any, sends_adapters: bool = False) -> str:
    """Summarises the settings: what is sampled, when a rollout ends, and which engines decode."""
    size, prompts = args.num_generations, args.generation_batch_size // args.num_generations
    wait = _wait(args)
    if args.schedule in LEFT_OVER:
        batches = args.prompt_oversampling or args.sorted_group_batches
        started = math.ceil(batches * prompts - 1e-9)
        wait = f"the first {prompts} of {started} prompts ({LEFT_OVER[args.schedule]}), and of these for {wait}"
    ahead = ", samples ahead" if args.rollout_ahead == 1 else ", never ends" if args.rollout_ahead else ""
    uniform = ", replaces groups whose rewards are all equal" if args.drop_uniform_groups else ""
    if args.defers_groups:
        uniform = (
            f", defers groups whose rewards are all equal; for all while over {CUT_OFF:.0%} of answers are cut off"
        )
    if args.skip_uniform_prompts:
        uniform += ", skips most prompts whose last group taught nothing"
    return (
        f"Schedule {args.schedule!r}: {prompts} prompts x {size} rows, {_budget(args)}, waits for "
        f"{wait}{ahead}{uniform}. {_engines(args, sends_adapters)}."
    )


def _budget(args: Any) -> str:
    if not args.over_provisions:
        return "no spare candidates"
    mean = f"about {args.target_redundancy * args.num_generations:g}"
    if args.redundancy_cost_weight is not None:
        mean = "as many as `latency_curve` says"
    return f"{mean} candidates per prompt ({args.min_num_generations} to {args.max_num_generations})"


def _wait(args: Any) -> str:
    """Describes `long_end_patience`."""
    patience, complete = args.long_end_patience, f"{args.num_generations} complete answers to each prompt"
    if args.selection == "all":
        return "all candidates"
    if args.selection == "dual_end" and not args.keeps_long_end:
        return complete
    every = f", in one rollout of {args.long_end_every} for all" if args.long_end_every else ""
    if patience == AUTO:
        return f"{complete}, and for longer ones while another prompt has fewer{every}"
    if patience is not None:
        return f"{complete}, and for longer ones up to {patience:g} times their length{every}"
    return "all candidates" + (f", but {complete} with {args.max_num_generations}" if args.tail_pruning else "")


def _engines(args: Any, sends_adapters: bool) -> str:
    if not args.uses_servers:
        return f"{'vLLM' if args.use_vllm else 'Transformers'} decodes in the trainer's own process"
    way = resolve_weight_sync(args.weight_sync, args.device, args.weight_sync_dir)
    weights = "as LoRA adapters" if sends_adapters else "over NCCL" if way == "nccl" else "through files"
    main, tail = len(args.server_urls), len(args.tail_urls)
    servers = f"{main} vLLM server{'s' * (main != 1)}" if main else "Listed vLLM servers"
    servers += f" and {tail} for the tail" if tail else ""
    return f"{servers}, weights {weights}"


def last_line(args: Any, state: TrainerState, totals: RolloutTotals) -> str:
    """Summarises the cost of the run's rollouts, and says where its traces are and how to view them."""
    runtime = state.log_history[-1].get("train_runtime") if state.log_history else None
    of_all = f" of {runtime:,.1f} s" if runtime else ""
    share = totals.discarded_tokens / totals.generated_tokens if totals.generated_tokens else 0.0
    report = "Set `save_rollout_trace=True` for traces and `trl-darts report`."
    if args.save_rollout_trace:
        directory = str(Path(args.output_dir))
        report = f"Traces: {directory}/rollouts. Report: trl-darts report {shlex.quote(directory)}"
    plural = "" if totals.num_rollouts == 1 else "s"
    since = f" since step {totals.first_step}" if totals.first_step else ""
    return (
        f"Ended at step {state.global_step} of {state.max_steps}: {totals.num_rollouts} rollout{plural}{since} in "
        f"{totals.seconds:,.1f} s{of_all}, {totals.discarded_tokens:,.0f} of {totals.generated_tokens:,.0f} tokens "
        f"({share:.0%}) in candidates beyond the rows trained on. {report}"
    )
