"""
Whole trainings of SmolLM2-135M-Instruct on tasks of reasoning-gym, with a real vLLM server.

    python -m benchmarks.smollm2 [--machines cpu,gpu] [--arms grpo,default] [--seeds 0,1,2] [--minutes 60]
    python -m benchmarks.smollm2 --machines exact --arms grpo,trl --steps 3 --tests 8

9 steps of 8 prompts × 8 rows, in which 24 prompts recur twice. On a GPU, which trainer and server share: 24 steps of
16 × 8 rows, 128 prompts, and answers of up to 512 tokens. All weights are trained, in bfloat16 where PyTorch's
autocast chooses it, or in float32 on a processor that only emulates bfloat16. Plain sampling, 4 answers to each of 64
prompts that were never trained on, is scored before and at the end, outside the seconds of the steps. TRL's own class,
with our connection to the server (TRL's client refuses one without CUDA), runs for three steps, for its seconds alone.
Two arms have a server that drafts (`suffix`), one of them without learning.

The machine `exact` is `cpu` with a whole group in each micro-batch, so that its rows can share their prompt, for GRPO
beside TRL's class over the same steps. Its server decodes with both cores, which the trainer leaves idle meanwhile,
and with one core in `exact_1`, as in `cpu`. Runs of `cpu` were made before prompts were shared and log-probs reused.

A run takes a quarter of an hour on two quiet cores. Seconds of runs that had the machine to themselves are seconds; of
others, only the tokens count.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import cells
from benchmarks.cells import Pairs, Run
from benchmarks.harness import Benchmark, Shared, load, main
from benchmarks.servers import StepSeconds, TRLTrainer, make_trainer, training_args
from benchmarks.smollm2_rollouts import (
    CHECKPOINT,
    CPU,
    HAS_BFLOAT16,
    MACHINES,
    NUM_GENERATIONS,
    TEMPERATURE,
    Machine,
    accuracy_reward,
    make_dataset,
    sample,
    score,
    smollm2_server,
    tokens_of,
)
from trl_darts import DARTSGRPOTrainer
from trl_darts.telemetry import stopwatch


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


EXACT = {"exact": "both cores", "exact_1": "one core"}  # with what the server decodes
TWO_THREADS = {**CPU.server["env"], "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
BOTH_CORES = replace(CPU, server={**CPU.server, "env": TWO_THREADS})
SETTINGS = {
    "cpu": Setting(CPU, "smollm2", steps=9, micro_batch=4, config={}),
    "exact": Setting(BOTH_CORES, "smollm2.exact", steps=9, micro_batch=NUM_GENERATIONS, config={}),
    "exact_1": Setting(CPU, "smollm2.exact_1", steps=9, micro_batch=NUM_GENERATIONS, config={}),
    "gpu": Setting(
        MACHINES["gpu"],
        "smollm2.gpu",
        steps=24,
        micro_batch=32,
        config={"use_cpu": False, "weight_sync": "filesystem"},  # NCCL refuses two processes on one GPU
    ),
}


@contextmanager
def server_of(setting: str, drafts: bool) -> Iterator[str]:
    """Yields the address of a server."""
    with smollm2_server(SETTINGS[setting].machine, method="suffix" if drafts else None) as url:
        yield url


def run(shared: Shared, machine: str, seed: int, arm: str, steps: int, prompts: int, tests: int) -> dict[str, Any]:
    """Trains one arm, and returns its log and its scores before and after."""
    if machine != "gpu":
        torch.set_num_threads(2)  # the server is idle while the trainer computes
    url, setting = shared(server_of, machine, arm in DRAFTING), SETTINGS[machine]
    if prompts:
        setting = replace(setting, machine=replace(setting.machine, prompts=prompts))
    test, ends = make_dataset(tests, "test"), {}
    with TemporaryDirectory() as directory:
        trainer = trainer_of(arm, seed, url, setting, steps or setting.steps, directory)
        trainer.add_callback(StepSeconds())
        if arm != TRL:
            ends["0"] = held_out(trainer, url, test, setting.machine.limit)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "step_seconds" in entry]
        if arm != TRL:
            ends[str(len(log))] = held_out(trainer, url, test, setting.machine.limit)
        trainer.vllm_generation.engine.close()
    return {"settings": ARMS[arm], "bfloat16": HAS_BFLOAT16, "steps": log, "held_out": ends}


def trainer_of(arm: str, seed: int, url: str, setting: Setting, steps: int, directory: str) -> Any:
    """Returns the trainer of an arm."""
    machine = setting.machine
    args = training_args(
        url,
        directory,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=machine.rows // setting.micro_batch,
        max_completion_length=machine.limit,
        temperature=TEMPERATURE,
        max_steps=min(TRL_STEPS, steps) if arm == TRL else steps,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        seed=seed,
        **{"bf16": HAS_BFLOAT16, "learning_rate": 1e-5, **setting.config, **ARMS[arm]},
    )
    data = make_dataset(machine.prompts * setting.steps // NUM_EPOCHS)
    kind = TRLTrainer if arm == TRL else DARTSGRPOTrainer
    return make_trainer(str(CHECKPOINT), accuracy_reward, args, data, kind=kind)


def held_out(trainer: Any, url: str, test: Any, limit: int) -> dict[str, float]:
    """Syncs the weights and scores plain sampling."""
    trainer.vllm_generation.sync_weights()
    choices = sample(url, tokens_of(test), NUM_ANSWERS, limit)
    lengths = [len(choice["token_ids"]) for choice in choices]
    cut = [choice["finish_reason"] == "length" for choice in choices]
    accuracy = float(np.mean(score(test, choices, NUM_ANSWERS)))
    values = {"accuracy": accuracy, "tokens": float(np.mean(lengths)), "p99": float(np.percentile(lengths, 99))}
    return values | {"cut": float(np.mean(cut))}


def file_of(run: Run) -> str:
    """Returns the name of a run's file."""
    return f"{SETTINGS[run['machine']].prefix}.{run['arm']}.seed{run['seed']}.json"


# The report


def mean_of(run: Mapping[str, Any], name: str) -> float:
    return float(np.mean([step.get(name, np.nan) for step in run["steps"]]))


def runs_of(results: Path, machine: str) -> list[dict[str, Any]]:
    """Returns the runs that were made."""
    files = (results / file_of({"machine": machine, "arm": arm, "seed": seed}) for arm in ARMS for seed in SEEDS)
    return [run for file in files for run in load(file) if run["steps"]]


def pairs_of(runs: Sequence[Run], arm: str) -> Pairs:
    """Returns each run of an arm beside GRPO's of the same seed, over as many steps."""
    pairs = cells.pairs_of(runs, arm)
    return [(_first(own, len(base["steps"])), _first(base, len(own["steps"]))) for own, base in pairs]


def speed_table(results: Path, machine: str) -> str:
    """Returns a line for each arm: speed-ups over GRPO's run of the same seed, over as many steps."""
    runs, rows = runs_of(results, machine), []
    for arm in cells.arms_of(runs):
        own, pairs = [run for run in runs if run["arm"] == arm], pairs_of(runs, arm)
        seconds = cells.mean([mean_of(run, "step_seconds") for run in own])
        speeds = [
            _ratio([mean_of(base, name) / mean_of(run, name) for run, base in pairs])
            for name in ("step_seconds", "darts/rollout/seconds")
        ]
        rows.append([f"{arm} ({len(own)})", ", ".join(str(len(run["steps"])) for run in own), seconds, *speeds])
    return cells.table(["arm (seeds)", "steps", "seconds per step", "step", "rollout"], rows)


def learned_table(results: Path, machine: str) -> str:
    """Returns a line for each arm: plain sampling on prompts that were never trained on."""
    runs, rows = runs_of(results, machine), []
    for arm in cells.arms_of(runs):
        own = [run["held_out"].values() for run in runs if run["arm"] == arm and len(run["held_out"]) > 1]
        if ends := [list(scores) for scores in own]:
            before, after = (cells.mean([scores[place]["accuracy"] for scores in ends]) for place in (0, -1))
            last = [cells.mean([scores[-1][name] for scores in ends]) for name in ("tokens", "cut")]
            rows.append([f"{arm} ({len(ends)})", before, after, *last])
    return cells.table(["arm (seeds)", "right before", "right after", "tokens", "cut off"], rows)


PARTS = {
    "rollout": "darts/rollout/seconds",
    "weights": "darts/sync/seconds",
    "scoring": "darts/score/seconds",
    "passes": "darts/train/seconds",
}


def parts_table(results: Path, machine: str) -> str:
    """Returns where the seconds of a step go, for GRPO and the default."""
    runs, rows = runs_of(results, machine), []
    for arm in (BASELINE, "default"):
        own = [run for run in runs if run["arm"] == arm]
        rows.append([arm, *(cells.mean([mean_of(run, name) for run in own]) for name in PARTS.values())])
    return cells.table(["arm", *PARTS], rows)


def parts_of(runs: Sequence[Run]) -> dict[str, float]:
    """Returns where the seconds of a step go, as means over runs. Older ones have fewer parts, and a larger rest."""
    names = PARTS if np.isnan(mean_of(runs[0], "darts/step/seconds")) else stopwatch.PARTS
    parts = {name: float(np.mean([mean_of(run, key) for run in runs])) for name, key in names.items()}
    parts = {name: seconds for name, seconds in parts.items() if not np.isnan(seconds)}
    return {**parts, "rest": float(np.mean([mean_of(run, "step_seconds") for run in runs])) - sum(parts.values())}


def against_trl(results: Path, machines: Sequence[str] = (*EXACT, "cpu")) -> dict[str, list[Run]]:
    """Returns runs of TRL's class and of GRPO, over equally many steps, on the first machine that has both."""
    pairs = next(filter(None, (pairs_of(runs_of(results, machine), TRL) for machine in machines)), [])
    return {"TRL": [own for own, _ in pairs], "GRPO": [base for _, base in pairs]}


def exact_tables(results: Path) -> str:
    """Returns the speed and the parts of a step of GRPO beside those of TRL's class."""
    blocks = []
    for machine, cores in EXACT.items():
        runs = against_trl(results, [machine])
        if runs["TRL"]:
            parts = {arm: parts_of(own) for arm, own in runs.items()}
            rows = [[arm, *(f"{seconds:.2f}" for seconds in own.values())] for arm, own in parts.items()]
            table = cells.table(["seconds of a step", *parts["GRPO"]], rows)
            blocks += [f"The server decodes with {cores}:", speed_table(results, machine), table]
    return "\n\n".join(blocks)


def progress_table(results: Path, machine: str) -> str:
    """Returns the default's speed-up in each third of the steps, and with GRPO's weight syncs."""
    pairs = pairs_of(runs_of(results, machine), "default")
    steps = SETTINGS[machine].steps
    thirds = [slice(place * steps // 3, (place + 1) * steps // 3) for place in range(3)]
    speeds = [_ratio([_seconds(base, third) / _seconds(own, third) for own, base in pairs]) for third in thirds]
    sync = "darts/sync/seconds"
    equal = [
        mean_of(base, "step_seconds") / (mean_of(own, "step_seconds") - mean_of(own, sync) + mean_of(base, sync))
        for own, base in pairs
    ]
    header = ["arm", *(f"{name} third" for name in ("first", "second", "last")), "equal weight syncs"]
    return cells.table(header, [["default", *speeds, cells.ratio(equal)]])


def rounds_table(results: Path, machine: str) -> str:
    """Returns the default's speed-up over pairs of the same seed and step, in bounded and in long rounds."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for own, base in pairs_of(runs_of(results, machine), "default"):
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


def tables(results: Path) -> str:
    """Returns the tables of the machines that have runs."""
    machines = [machine for machine in SETTINGS if runs_of(results, machine)]
    return "\n\n".join(table(results, machine) for machine in machines for table in (speed_table, learned_table))


SEEDS = range(3)
BENCHMARK = Benchmark(
    "smollm2",
    __doc__,
    {"machine": list(SETTINGS), "seed": SEEDS, "arm": list(ARMS)},
    run,
    tables,
    options={"steps": 0, "prompts": 0, "tests": NUM_TEST},
    usual={"machine": ["cpu"]},
    quick={"steps": 1, "prompts": 1, "tests": 2, "arm": [BASELINE]},
    file=file_of,
    named=("machine", "seed", "arm"),
    facts=lambda run: {"settings": ARMS[run["arm"]]},
    baseline=BASELINE,
)

if __name__ == "__main__":
    main(BENCHMARK)
