"""
TRL's AsyncGRPOTrainer and ours on the same server at a GPU's pace: seconds to equal reward, and where they go.

    python -m benchmarks.peers [--arms async-4,grpo,continuous] [--seeds 0,1,2,3,4] [--steps 30]

Task, engine and clock are those of `training.py`: the chain of `long_tail.py`, of which the LM head alone is trained,
32 × 8 rows a step, and a real vLLM server at the published pace of an 8 B model. Beside all that it does, each step
takes `--per-token` seconds for each token that is trained on, 30 % of a step of GRPO: at its end, or with waves
(`stream_training`, eight micro-batches) in each pass, since passes run while others decode. AsyncGRPO gets what it
lacks on a CPU (`async_grpo.py`); the number behind it is its `max_staleness`. All arms have the same data, the same
constant learning rate and the same number of rows, and begin from the same model. The clock starts with the training,
when all processes run. The arms of a seed follow each other. Trainers have one thread for PyTorch, as `accelerate
launch` gives to each of several processes: with one for each core, a pass waits for a core that the server has.

The primary metric, named before any run: seconds until the exact held-out reward of plain sampling is `TARGET`. It was
chosen from GRPO's arm in the stored runs of `training.py`, which has 0.463 to 0.466 after 25 steps (five seeds). An
arm that does not reach it in its steps has no such time. The other metrics are the seconds of all steps, tokens that
are trained on, their staleness in optimizer steps, the mean length of the rows over that of plain sampling, and groups
that were sampled and thrown away.

The seconds between two optimizer steps are divided into waiting for the rollout, scoring (rewards, log-probs and
advantages in the trainer), weight sync, and forward and backward passes, as each trainer logs them; the pace, which is
slept; and the rest: optimizer, data, logging, and computing the exact reward.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from benchmarks import training_parts
from benchmarks.async_grpo import AsyncGRPOTrainer, FileTransfer, async_args
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.long_tail import LIMIT, TOKENIZER, Answers, load_model, make_dataset
from benchmarks.servers import make_trainer
from benchmarks.training import LEARNING_RATE, NUM_GENERATIONS, PROMPTS, Server, server_of, task_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.engines import opener


TARGET = 0.46
PER_TOKEN = 4.1e-4  # seconds: 30 % of a step, by GRPO's first epoch in the stored runs of training.py
ROWS = PROMPTS * NUM_GENERATIONS
NUM_PROMPTS = 512
CONTINUOUS = {"rollout_ahead": "continuous"}
MICRO_BATCHES = 8
WAVES = {
    "stream_training": True,
    "per_device_train_batch_size": ROWS // MICRO_BATCHES,
    "gradient_accumulation_steps": MICRO_BATCHES,
}
ARMS: dict[str, dict[str, Any]] = {
    "async-1": {"max_staleness": 1},
    "async-4": {"max_staleness": 4},
    "grpo": {"schedule": "grpo"},
    "default": {"defer_unsettled_groups": None},
    "default ahead": {"defer_unsettled_groups": None, "rollout_ahead": 1},
    "default apart": {"defer_unsettled_groups": None},  # with an HTTP request for each candidate
    "paper": {"defer_unsettled_groups": False, "long_end_patience": None},
    "ahead": {"schedule": "grpo", "rollout_ahead": 1},
    "continuous": {"schedule": "grpo", **CONTINUOUS},
    "continuous streamed": {"schedule": "grpo", **CONTINUOUS, "stream_rewards": True},
    "continuous darts": {"schedule": "darts", **CONTINUOUS},
    "grpo waves": {"schedule": "grpo", **WAVES},
    "default waves": {"defer_unsettled_groups": None, **WAVES},
}
# Of each optimizer step, by the name in the results: the metrics of TRL's AsyncGRPO, and ours. The first one counts.
METRICS = {
    "wait": ("perf/rollout_wait_s", "darts/rollout/wait_seconds", "darts/rollout/seconds"),
    "scoring": ("darts/score/seconds",),
    "sync": ("perf/weight_sync_s", "darts/sync/seconds"),
    "passes": ("perf/fwd_bwd_s", "darts/train/seconds"),
    "staleness": ("sample/staleness_mean", "darts/staleness/age_mean"),
    "oldest": ("sample/staleness_max", "darts/staleness/age_max"),
    "thrown_rows": ("sample/dropped_stale_total",),
    "thrown_groups": ("darts/uniform/dropped",),
}


def grade(completions: list[Any], **kwargs: Any) -> list[float]:
    """1.0 for a right answer, which is a text or a list of one message."""
    texts = [own if isinstance(own, str) else own[0]["content"] for own in completions]
    return [float(text.endswith("+")) for text in texts]


class PacedPasses(DARTSGRPOTrainer):
    """Each pass also sleeps, for each token that it trains on."""

    seconds_per_token = 0.0
    slept = 0.0  # since it was read

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Sleeps after the forward pass."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        seconds = self.seconds_per_token * float(inputs["completion_mask"].sum())
        time.sleep(seconds)
        self.slept += seconds
        return loss

    def pop_slept(self) -> float:
        """Returns the seconds since the last call."""
        slept, self.slept = self.slept, 0.0
        return slept


class Clock(TrainerCallback):
    """Paces each step by its tokens, and records when it ended and what plain sampling would give after it."""

    def __init__(self, trainer: Any, per_token: float) -> None:
        self.trainer, self.per_token = trainer, per_token
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self.begun = self.before = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sleeps, and records the step."""
        trained = trained_tokens(self.trainer, ROWS)
        in_passes = isinstance(self.trainer, PacedPasses)
        pace = self.trainer.pop_slept() if in_passes else self.per_token * trained
        if not in_passes:
            time.sleep(pace)
        answers, now = exactly(self.trainer.model), time.perf_counter()
        own = {"seconds": now - self.before, "now": now - self.begun, "pace": pace, "trained": trained}
        own["in_passes"] = pace * in_passes  # seconds
        self.steps.append({**own, "reward": answers.reward, "mean": answers.mean, "p99": answers.p99})
        self.before = now


def trained_tokens(trainer: Any, rows: int) -> float:
    """Returns the tokens of the step that ends, which has so many rows."""
    metrics = trainer._metrics["train"]  # of this step alone: each is logged
    lengths = metrics.get("completions/mean_length", [])
    # Of each wave, if there are several.
    tokens: float = fmean(lengths) * rows if lengths else metrics["batch/trained_tokens_per_step"][-1]
    return tokens


def log_of(trainer: Any) -> dict[int, dict[str, float]]:
    """Returns what a trainer logged, by step."""
    return {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}


def add_metrics(steps: list[dict[str, float]], log: dict[int, dict[str, float]]) -> None:
    """Adds to each step what was logged."""
    for number, step in enumerate(steps, start=1):
        for name, keys in METRICS.items():
            step[name] = next((log[number][key] for key in keys if log[number].get(key) is not None), 0.0)


def exactly(model: Any) -> Answers:
    """Returns what plain sampling would give. AsyncGRPO's attention takes packed batches alone, so it is replaced."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    answers = Answers.of(model)
    model.set_attn_implementation(attention)
    return answers


def async_trainer(server: Server, seed: int, steps: int, directory: str, max_staleness: int) -> Any:
    """Returns TRL's trainer. Its prompts are messages."""
    args = async_args(
        server.url,
        directory,
        bf16=False,
        per_device_train_batch_size=ROWS,
        num_generations=NUM_GENERATIONS,
        max_completion_length=LIMIT,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        seed=seed,
        token_budget=0,
        max_staleness=max_staleness,
        temperature=1.0,
    )
    TOKENIZER.chat_template = "{{ messages[0]['content'] }}"
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in make_dataset(NUM_PROMPTS)["prompt"]]
    data, transfer = Dataset.from_list(rows).shuffle(seed), FileTransfer(server.url, directory)
    trainer = AsyncGRPOTrainer(
        str(server.start), grade, args, data, processing_class=TOKENIZER, weight_transfer=transfer
    )
    trainer.model.requires_grad_(False)
    trainer.model.lm_head.requires_grad_(True)
    trainer.remove_callback(PrinterCallback)
    return trainer


def our_trainer(
    server: Server, seed: int, steps: int, directory: str, fields: dict[str, Any], per_token: float
) -> Any:
    """Returns our trainer, whose passes are paced with waves."""
    args = task_args(server, directory, seed, steps, **fields)
    cls = PacedPasses if args.stream_training else DARTSGRPOTrainer
    trainer: Any = make_trainer(load_model(server.start), grade, args, make_dataset(NUM_PROMPTS), TOKENIZER, cls)
    if isinstance(trainer, PacedPasses):
        trainer.seconds_per_token = per_token
    return trainer


def run(shared: Shared, seed: int, arm: str, steps: int, per_token: float) -> dict[str, Any]:
    """Trains one arm."""
    server = shared(server_of, "tail")
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        FileTransfer(server.url, directory).load(server.start)
        if arm.startswith("async"):
            trainer = async_trainer(server, seed, steps, directory, **ARMS[arm])
        else:
            trainer = our_trainer(server, seed, steps, directory, ARMS[arm], per_token)
        clock, before = Clock(trainer, per_token), server.pace()
        trainer.add_callback(clock)
        with patch.object(opener, "MAX_SHARED", 1 if arm == "default apart" else opener.MAX_SHARED):
            trainer.train()
        if not arm.startswith("async"):
            trainer.vllm_generation.engine.close()
    pace = server.pace().since(before)
    found = summary(clock.steps, log_of(trainer))
    return {"steps": steps, "per_token": per_token, "threads": 1, **found, "engine": asdict(pace)}


def summary(steps: list[dict[str, float]], log: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Returns totals and means of a run, and its steps."""
    add_metrics(steps, log)
    for step in steps:
        step["passes"] -= step.pop("in_passes", 0.0)
        parts_of_step = sum(step[name] for name in ("wait", "scoring", "sync", "passes", "pace"))
        step["rest"] = step["seconds"] - parts_of_step
    mean: Callable[[str], float] = lambda name: sum(step[name] for step in steps) / len(steps)  # noqa: E731
    thrown = sum(step["thrown_groups"] + step["thrown_rows"] / NUM_GENERATIONS for step in steps)
    return {
        "seconds": steps[-1]["now"],
        "target": TARGET,
        "seconds_to_target": next((step["now"] for step in steps if step["reward"] >= TARGET), None),
        "reward": steps[-1]["reward"],
        "trained_tokens": sum(step["trained"] for step in steps),
        "staleness": mean("staleness"),
        "oldest": max(step["oldest"] for step in steps),
        "kept_over_plain": mean("trained") / ROWS / mean("mean"),
        "thrown_groups": thrown,
        "wait_seconds": sum(step["wait"] for step in steps),
        "parts": {name: mean(name) for name in ("wait", "scoring", "sync", "passes", "pace", "rest")},
        "by_step": {name: [step[name] for step in steps] for name in steps[0]},
    }


BENCHMARK = Benchmark(
    "peers",
    __doc__,
    {"seed": range(5), "arm": list(ARMS)},
    run,
    training_parts.peers,
    options={"steps": 30, "per_token": PER_TOKEN},
    quick={"steps": 3, "arm": ["async-4", "grpo", "continuous"]},
    facts=lambda run: {"settings": ARMS[run["arm"]], "steps": run["steps"], "per_token": run["per_token"]},
)

if __name__ == "__main__":
    main(BENCHMARK)
