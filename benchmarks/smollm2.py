"""
Whole trainings of SmolLM2-135M-Instruct on tasks of reasoning-gym, with a real vLLM server.

    python benchmarks/smollm2.py [--arms grpo,default] [--seeds 0,1,2] [--minutes 60] [--machine cpu|gpu]
                                 [--only-tables]

9 steps of 8 prompts × 8 rows, in which 24 prompts recur twice. On a GPU, which trainer and server share: 24 steps of
16 × 8 rows, 128 prompts, and answers of up to 512 tokens. All weights are trained, in bfloat16 where PyTorch's
autocast chooses it. Plain sampling, 4 answers to each of 64 prompts that were never trained on, is scored before and
at the end, outside the seconds of the steps. TRL's own class, with our connection to the server (TRL's client refuses
one without CUDA), runs for three steps, for its seconds alone. Two arms have a server that drafts (`suffix`), one of
them without learning.

A run takes a quarter of an hour on two quiet cores, and its log is in `benchmarks/results/smollm2.ARM.seedN.json` then
(`smollm2.gpu.ARM.seedN.json`). A later call makes the runs that are missing. With `--minutes`, no run begins later
than that. Seconds of runs that had the machine to themselves are seconds; of others, only the tokens count.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "smollm2"))

import numpy as np
import torch
from tasks import TEMPERATURE, accuracy_reward, make_dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from benchmarks import cells
from benchmarks.servers import training_args
from benchmarks.smollm2_rollouts import (
    CHECKPOINT,
    MACHINES,
    NUM_GENERATIONS,
    RESULTS,
    ROOT,
    Machine,
    sample,
    score,
    smollm2_server,
    tokens_of,
)
from trl_darts import DARTSGRPOTrainer
from trl_darts.engines.vllm_generation import synced_generation
from trl_darts.serving.options import SPECULATIVE


TRL_STEPS, NUM_EPOCHS = 3, 3
NUM_TEST, NUM_ANSWERS = 64, 4
BASELINE, TRL = "grpo", "trl"
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"schedule": "grpo"},
    "default": {"schedule": "darts", "defer_unsettled_groups": None},
    "unguarded": {"schedule": "darts", "defer_unsettled_groups": False},
    "ahead": {"schedule": "darts", "rollout_ahead": 1},
    "continuous": {"schedule": "grpo", "rollout_ahead": "continuous"},
    "drafts": {"schedule": "grpo"},
    "drafts_frozen": {"schedule": "grpo", "learning_rate": 0.0},
    TRL: {"schedule": "grpo", "trim_padding": False},
}
DRAFTING = ("drafts", "drafts_frozen")  # with a server that drafts


@dataclass(frozen=True)
class Setting:
    """How the runs of a machine are made."""

    machine: Machine
    prefix: str  # of the results' names
    steps: int
    micro_batch: int
    config: Mapping[str, Any]


SETTINGS = {
    "cpu": Setting(MACHINES["cpu"], "smollm2", steps=9, micro_batch=4, config={}),
    "gpu": Setting(
        MACHINES["gpu"],
        "smollm2.gpu",
        steps=24,
        micro_batch=32,
        config={"use_cpu": False, "weight_sync": "filesystem"},  # NCCL refuses two processes on one GPU
    ),
}


class TRLTrainer(GRPOTrainer):
    """TRL's class, with our connection to the server."""

    def __init__(self, model: Any, reward: Any, args: Any, dataset: Any) -> None:
        with synced_generation(args, model, dataset):
            super().__init__(model, reward, args, dataset)


class StepSeconds(TrainerCallback):
    """Adds the seconds of each step to the log."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self.begun = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Extends the step's entry in the log."""
        if "reward" in (logs or {}):
            state.log_history[-1]["step_seconds"] = time.perf_counter() - self.begun
            print(f"step {state.global_step}: {state.log_history[-1]['step_seconds']:.0f} s", flush=True)


def file_of(arm: str, seed: int, results: Path, setting: Setting) -> Path:
    return results / f"{setting.prefix}.{arm}.seed{seed}.json"


def load(arm: str, seed: int, results: Path, setting: Setting) -> dict[str, Any]:
    """Returns the steps and the held-out scores of a run, none if it was not made yet."""
    path = file_of(arm, seed, results, setting)
    empty: dict[str, Any] = {"arm": arm, "seed": seed, "settings": ARMS[arm], "steps": [], "held_out": {}}
    return json.loads(path.read_text()) if path.exists() else empty


def missing(arms: Sequence[str], seeds: Sequence[int], results: Path, setting: Setting) -> list[tuple[int, str]]:
    """Returns the runs that were not made yet, the arms of a seed one after the other."""
    return [(seed, arm) for seed, arm in product(seeds, arms) if not load(arm, seed, results, setting)["steps"]]


def make_run(arm: str, seed: int, url: str, results: Path, setting: Setting) -> None:
    """Trains and stores the log."""
    run = load(arm, seed, results, setting)
    trainer = make_trainer(arm, seed, url, setting)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(StepSeconds())
    test = make_dataset(NUM_TEST, "test")
    if arm != TRL:
        run["held_out"]["0"] = held_out(trainer, url, test, setting.machine.limit)
    trainer.train()
    run["steps"] = [entry for entry in trainer.state.log_history if "step_seconds" in entry]
    if arm != TRL:
        run["held_out"][str(len(run["steps"]))] = held_out(trainer, url, test, setting.machine.limit)
    trainer.vllm_generation.engine.close()
    write(file_of(arm, seed, results, setting), run)
    print(arm, seed, len(run["steps"]), run["held_out"], flush=True)


def make_trainer(arm: str, seed: int, url: str, setting: Setting) -> Any:
    machine = setting.machine
    args = training_args(
        url,
        ROOT / "outputs" / "smollm2-training",
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=machine.rows // setting.micro_batch,
        max_completion_length=machine.limit,
        temperature=TEMPERATURE,
        max_steps=TRL_STEPS if arm == TRL else setting.steps,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        seed=seed,
        **{"bf16": True, "learning_rate": 1e-5, **setting.config, **ARMS[arm]},
    )
    make = TRLTrainer if arm == TRL else DARTSGRPOTrainer
    return make(str(CHECKPOINT), accuracy_reward, args, make_dataset(machine.prompts * setting.steps // NUM_EPOCHS))


def held_out(trainer: Any, url: str, test: Any, limit: int) -> dict[str, float]:
    """Syncs the weights and scores plain sampling."""
    trainer.vllm_generation.sync_weights()
    choices = sample(url, tokens_of(test), NUM_ANSWERS, limit)
    lengths = [len(choice["token_ids"]) for choice in choices]
    cut = [choice["finish_reason"] == "length" for choice in choices]
    accuracy = float(np.mean(score(test, choices, NUM_ANSWERS)))
    values = {"accuracy": accuracy, "tokens": float(np.mean(lengths)), "p99": float(np.percentile(lengths, 99))}
    return {name: round(value, 4) for name, value in (values | {"cut": float(np.mean(cut))}).items()}


def write(path: Path, run: Mapping[str, Any]) -> None:
    """Writes all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(run, indent=1))
    part.rename(path)


# The report


def mean_of(run: Mapping[str, Any], name: str) -> float:
    return float(np.mean([step.get(name, np.nan) for step in run["steps"]]))


def runs_of(results: Path, seeds: Sequence[int], setting: Setting) -> dict[str, list[dict[str, Any]]]:
    """Returns the runs that were made, by arm."""
    runs = {arm: [load(arm, seed, results, setting) for seed in seeds] for arm in ARMS}
    made = {arm: [run for run in own if run["steps"]] for arm, own in runs.items()}
    return {arm: own for arm, own in made.items() if own}


Pair = tuple[dict[str, Any], dict[str, Any]]


def pairs_of(runs: Mapping[str, Sequence[dict[str, Any]]], arm: str) -> list[Pair]:
    """Returns each run of an arm beside GRPO's of the same seed, over as many steps."""
    bases = {run["seed"]: run for run in runs.get(BASELINE, [])}
    pairs = [(run, bases[run["seed"]]) for run in runs[arm] if run["seed"] in bases]
    return [(_first(own, len(base["steps"])), _first(base, len(own["steps"]))) for own, base in pairs]


def speed_table(results: Path, seeds: Sequence[int], setting: Setting = SETTINGS["cpu"]) -> str:
    """Returns a line for each arm: speed-ups over GRPO's run of the same seed, over as many steps."""
    runs, rows = runs_of(results, seeds, setting), []
    for arm, own in runs.items():
        pairs = pairs_of(runs, arm)
        seconds = cells.mean([mean_of(run, "step_seconds") for run in own])
        speeds = [
            _ratio([mean_of(base, name) / mean_of(run, name) for run, base in pairs])
            for name in ("step_seconds", "darts/rollout/seconds")
        ]
        rows.append([f"{arm} ({len(own)})", ", ".join(str(len(run["steps"])) for run in own), seconds, *speeds])
    return cells.table(["arm (seeds)", "steps", "seconds per step", "step", "rollout"], rows)


def learned_table(results: Path, seeds: Sequence[int], setting: Setting = SETTINGS["cpu"]) -> str:
    """Returns a line for each arm: plain sampling on prompts that were never trained on."""
    rows = []
    for arm, runs in runs_of(results, seeds, setting).items():
        ends = [list(run["held_out"].values()) for run in runs if len(run["held_out"]) > 1]
        if ends:
            before, after = (cells.mean([own[place]["accuracy"] for own in ends]) for place in (0, -1))
            last = [cells.mean([own[-1][name] for own in ends]) for name in ("tokens", "cut")]
            rows.append([f"{arm} ({len(ends)})", before, after, *last])
    return cells.table(["arm (seeds)", "right before", "right after", "tokens", "cut off"], rows)


PARTS = {
    "rollout": "darts/rollout/seconds",
    "weights": "darts/sync/seconds",
    "rewards, log-probs": "darts/score/seconds",
    "training": "darts/train/seconds",
}


def parts_table(results: Path, seeds: Sequence[int], setting: Setting) -> str:
    """Returns where the seconds of a step go, for GRPO and the default."""
    runs = runs_of(results, seeds, setting)
    rows = [
        [arm, *(cells.mean([mean_of(run, name) for run in runs[arm]]) for name in PARTS.values())]
        for arm in (BASELINE, "default")
    ]
    return cells.table(["arm", *PARTS], rows)


def progress_table(results: Path, seeds: Sequence[int], setting: Setting) -> str:
    """Returns the default's speed-up in each third of the steps, and with GRPO's weight syncs."""
    pairs = pairs_of(runs_of(results, seeds, setting), "default")
    thirds = [slice(place * setting.steps // 3, (place + 1) * setting.steps // 3) for place in range(3)]
    speeds = [_ratio([_seconds(base, third) / _seconds(own, third) for own, base in pairs]) for third in thirds]
    sync = "darts/sync/seconds"
    equal = [
        mean_of(base, "step_seconds") / (mean_of(own, "step_seconds") - mean_of(own, sync) + mean_of(base, sync))
        for own, base in pairs
    ]
    header = ["arm", *(f"{name} third" for name in ("first", "second", "last")), "equal weight syncs"]
    return cells.table(header, [["default", *speeds, cells.ratio(equal)]])


def rounds_table(results: Path, seeds: Sequence[int], setting: Setting) -> str:
    """Returns the default's speed-up over pairs of the same seed and step, in bounded and in long rounds."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for own, base in pairs_of(runs_of(results, seeds, setting), "default"):
        for mine, theirs in zip(own["steps"], base["steps"], strict=True):
            is_long = bool(mine["darts/buffer/long_round"])
            speeds[is_long].append(theirs["step_seconds"] / mine["step_seconds"])
    kinds = {"bounded": speeds[False], "long": speeds[True], "all": speeds[False] + speeds[True]}
    return cells.table(
        ["rounds", "steps", "speed-up"], [[name, str(len(v)), cells.ratio(v)] for name, v in kinds.items()]
    )


def _seconds(run: Mapping[str, Any], steps: slice) -> float:
    return float(sum(step["step_seconds"] for step in run["steps"][steps]))


def _first(run: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    return {**run, "steps": run["steps"][:num_steps]}


def _ratio(values: Sequence[float]) -> str:
    return cells.ratio([value for value in values if not np.isnan(value)])


def main() -> None:
    """Trains what is missing and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="some of them, with commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins later")
    parser.add_argument("--machine", choices=SETTINGS, default="cpu")
    parser.add_argument("--base-url", help="a running server of the checkpoint, instead of a new one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only-tables", action="store_true", help="train nothing")
    options = parser.parse_args()
    arms, seeds = options.arms.split(","), [int(seed) for seed in options.seeds.split(",")]
    if unknown := set(arms) - set(ARMS):
        parser.error(f"--arms ({', '.join(sorted(unknown))}) must be some of {', '.join(ARMS)}.")
    if options.base_url and (drafting := set(arms) & set(DRAFTING)):
        parser.error(f"--arms ({', '.join(sorted(drafting))}) need servers of their own. Leave out --base-url.")
    setting = SETTINGS[options.machine]
    deadline = time.monotonic() + 60 * options.minutes
    if not options.only_tables:
        if options.machine == "cpu":
            torch.set_num_threads(2)  # the server is idle while the trainer computes
        for seed, arm in missing(arms, seeds, options.results, setting):
            if time.monotonic() > deadline:
                break
            method = SPECULATIVE["suffix"] if arm in DRAFTING else None
            with smollm2_server(None, setting.machine, options.base_url, speculative_config=method) as url:
                make_run(arm, seed, url, options.results, setting)
    print(speed_table(options.results, seeds, setting), learned_table(options.results, seeds, setting), sep="\n\n")


if __name__ == "__main__":
    main()
