"""
What do rollouts that never end gain, and what does staleness cost?

    python benchmarks/continuous.py [--quick] [--worlds published,needs_120] [--arms …] [--seeds 0,1] [--rates 1e-3]

The worlds and the virtual time are those of `learning.py`: the library's trainer, scheduler, buffer and optimizer, on
a chain whose answers decode by the published curve of an 8 B model. What a step takes beside its rollout is counted
per trained token, 30 % of a step of GRPO; a rollout without an end decodes meanwhile. Each weight sync changes the
rest of every unfinished answer, whose tokens keep the log-probs that they were sampled with, and TRL's importance
sampling correction is on (`token_truncate`). Beside the rewards of plain sampling, computed exactly, each arm's lag,
effective sample size and length ratio are recorded. Results are appended to one file, and a later call runs what is
missing.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from benchmarks import cells
from benchmarks.learning import (
    CURVE,
    EPOCH,
    NUM_GENERATIONS,
    ROLLOUT_SHARE,
    SHARED,
    WORLDS,
    World,
    arm_args,
    sample,
)
from benchmarks.lines import append, read
from benchmarks.long_tail import LIMIT, TOKENIZER, load_model, make_dataset, probabilities
from benchmarks.speedups import time_to_reward
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.simulation import ClusterSpec, SimulatedCluster
from trl_darts.callbacks import ADMISSION_FILE
from trl_darts.engines.batch import PromptBatch
from trl_darts.scheduling import RolloutResult
from trl_darts.testing import StubEngine, _StubGeneration, stub_servers


ROOT = Path(__file__).resolve().parents[1]
BASELINE = "grpo"
CONTINUOUS = {"rollout_ahead": "continuous"}
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"schedule": "grpo"},
    "unguarded": {},
    "grpo, ahead": {"schedule": "grpo", "rollout_ahead": 1},
    "darts, ahead": {"rollout_ahead": 1},
    "grpo, continuous": {"schedule": "grpo", **CONTINUOUS},
    "darts, continuous": CONTINUOUS,
    **{f"grpo, continuous, {s}": {"schedule": "grpo", **CONTINUOUS, "max_staleness": s} for s in (1, 2, 8)},
}
RATES = (1e-3, 1e-2)
METRICS = {
    "lag": "darts/staleness/age_mean",
    "oldest": "darts/staleness/age_max",
    "sample": "darts/staleness/effective_sample_share",
    "kept_reward": "reward",
    "kept": "completions/mean_length",
}


class Client:
    """What TRL asks a server's client where its log-probs are used."""

    def get_server_info(self) -> dict[str, Any]:
        """Returns how log-probs are computed."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


class ChainClock(StubEngine):
    """
    Samples answers from the model's current weights, and decodes them in virtual time. Training takes `per_token`
    seconds for each token; rollouts that were launched, or never end, decode meanwhile.
    """

    def __init__(self, trainer: Any, seed: int, per_token: float) -> None:
        super().__init__(self.later_turn, LIMIT, trainer._main)
        self._model, self._rng, self.per_token = trainer.model, np.random.default_rng(seed), per_token
        self._cluster = SimulatedCluster(ClusterSpec(CURVE))
        self._letters: dict[int, int] = {}  # last token of the prompt, by group
        self._logprobs: dict[tuple[int, ...], list[float]] = {}
        self.now = self._trains = 0.0  # seconds, and those of the training that is under way
        self._launched: RolloutResult | None = None

    def _write_all(self, batch: PromptBatch, counts: Sequence[int]) -> list[list[list[int]]]:
        letters = [batch.rows[batch.row_of(group, 0)][-1] for group in range(len(counts))]
        self._table = probabilities(self._model)
        answers = iter(sample(self._table, np.repeat(letters, counts), self._rng))
        own = [[next(answers) for _ in range(count)] for count in counts]
        self._new = letters, own
        return own

    def extend(self, plan: Any, batch: PromptBatch) -> None:
        """Adds groups, and notes the log-probs of their answers."""
        super().extend(plan, batch)
        for group, letter, answers in zip(plan.groups, *self._new, strict=True):
            self._letters[group.group_id] = letter
            for index, answer in enumerate(answers):
                self._logprobs[group.group_id, index] = self._log(letter, answer)

    def _log(self, state: int, tokens: Sequence[int]) -> list[float]:
        return [float(v) for v in np.log(self._table[[state, *tokens[:-1]], tokens])] if tokens else []

    def drain(self, step: int) -> None:
        """Lets the training pass, and has the rest of each unfinished answer sampled by the new weights."""
        running = self._continuous
        if running is None:
            return super().drain(step)
        running.advance(self._trains)
        self._trains = 0.0
        counts = running.update(step)
        self._step, self._table = step, probabilities(self._model)
        waiting = [c for c in running.scheduler.ledger.candidates if c.ended is None]
        kept = [self._completions[c.group_id][c.index][: counts.get(c.candidate_id, 0)] for c in waiting]
        states = [own[-1] if own else self._letters[c.group_id] for c, own in zip(waiting, kept, strict=True)]
        for candidate, own, state, rest in zip(
            waiting, kept, states, sample(self._table, np.array(states, int), self._rng), strict=True
        ):
            rest = rest[: LIMIT + 1 - len(own)]
            key = candidate.group_id, candidate.index
            self._completions[key[0]][key[1]] = own + rest
            self._logprobs[key] = self._logprobs[key][: len(own)] + self._log(state, rest)
            running.redraw(*key, len(own) + len(rest))
        return None

    def launch(self, plan: Any, batch: PromptBatch) -> None:
        """Decodes a rollout while the batch before trains."""
        self._launched = self._decode(plan, batch)

    def _run(self, plan: Any, batch: PromptBatch) -> RolloutResult:
        if plan.takes is not None:
            result = super()._run(plan, batch)
            self.now = self._continuous.now if self._continuous is not None else 0.0
        elif self._launched is not None:
            result, self._launched = self._launched, None
            self.now += max(self._trains, result.timeline.times[-1])
        else:
            result = self._decode(plan, batch)
            self.now += self._trains + result.timeline.times[-1]
        rows = [row for group in result.groups for row in group.rows]
        if plan.takes is not None:  # `launch` and `_decode` noted the others' log-probs
            for group in result.groups:
                for row in group.candidates:
                    row.logprobs = self._logprobs.pop((group.plan.group_id, row.index))[: row.length]
        self._trains = self.per_token * sum(row.length for row in rows)
        return result

    def _decode(self, plan: Any, batch: PromptBatch) -> RolloutResult:
        result = super()._run(plan, batch)
        letters, _ = self._new
        for group in result.groups:
            for row in group.rows:
                row.logprobs = self._log(letters[group.plan.group_id], row.tokens)
        return result


class Recorder(TrainerCallback):
    """Records of each step when it ended, and what plain sampling would give after it."""

    def __init__(self, trainer: Any, world: World) -> None:
        self.trainer, self.world = trainer, world
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets the learning rate, which a checkpoint replaces by its own."""
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] = args.learning_rate
        kwargs["lr_scheduler"].base_lrs = [args.learning_rate] * len(kwargs["lr_scheduler"].base_lrs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the step."""
        metrics, engine = self.trainer._metrics["train"], self.trainer._engine
        rewards, mean, cut = self.world.exact(probabilities(self.trainer.model))
        own = {name: float(metrics.get(key, [np.nan])[-1]) for name, key in METRICS.items()}
        exact = {"hard": float(rewards[self.world.hard].mean()), "reward": float(rewards.mean())}
        self.steps.append({"now": engine.now + engine._trains, **exact, "mean": mean, "cut": cut, **own})


def train(
    world: World, seed: int, arm: str | None, rate: float, per_token: float, start: Path, output_dir: Path
) -> dict[str, list[float]]:
    """Trains an arm from the shared epoch's checkpoint, or that epoch from the model (`None`)."""
    fields = SHARED if arm is None else ARMS[arm]
    args = arm_args(
        world,
        seed,
        arm is None,
        output_dir,
        None,
        learning_rate=rate,
        vllm_importance_sampling_correction=bool(fields.get("rollout_ahead")),
        vllm_importance_sampling_mode="token_truncate",
        **fields,
    )
    _StubGeneration.vllm_client = Client()
    with stub_servers(lambda prompt, index: []):
        trainer = DARTSGRPOTrainer(
            model=load_model(start),
            reward_funcs=world.reward,
            args=args,
            train_dataset=make_dataset(world.num_prompts * EPOCH),
            processing_class=TOKENIZER,
        )
    trainer._engine = ChainClock(trainer, 1000 * seed + (0 if arm is None else 1 + list(ARMS).index(arm)), per_token)
    trainer.remove_callback(PrinterCallback)
    recorder = Recorder(trainer, world)
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=None if arm is None else str(start))
    return {name: [float(f"{step[name]:.5g}") for step in recorder.steps] for name in recorder.steps[0]}


def run_missing(options: argparse.Namespace) -> None:
    """Runs the trainings that are not in the file."""
    path = options.file
    done = {(run["world"], run["seed"], run["rate"], run["arm"]) for run in read(path)}
    for name, seed in product(options.worlds, options.seeds):
        todo = [key for key in product(options.rates, options.arms) if (name, seed, *key) not in done]
        if not todo:
            continue
        world = WORLDS[name]
        with tempfile.TemporaryDirectory() as directory:
            shared, start = Path(directory) / "shared", world.checkpoint(Path(directory) / "start")
            epoch = train(world, seed, None, 1e-3, 0.0, start, shared)
            checkpoint = shared / f"checkpoint-{EPOCH}"
            (checkpoint / ADMISSION_FILE).unlink()  # of another schedule's admission; the lengths stay
            per_token = (1 / ROLLOUT_SHARE - 1) * epoch["now"][-1]
            per_token /= sum(epoch["kept"]) * world.num_prompts * NUM_GENERATIONS
            for rate, arm in todo:
                steps = train(world, seed, arm, rate, per_token, checkpoint, Path(directory) / "run")
                append(path, {"world": name, "seed": seed, "rate": rate, "arm": arm, **steps})
                print(
                    f"{name} {rate:g} {arm} seed {seed}: {steps['now'][-1]:.0f} s, {steps['hard'][-1]:.3f}", flush=True
                )


def _known(values: Sequence[float], value: Callable[[np.ndarray], float], default: float) -> float:
    known = [own for own in values if np.isfinite(own)]
    return float(value(np.array(known))) if known else default


Columns = Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], float]]
GAINED: Columns = {
    "speed-up": time_to_reward,
    "steps per second": lambda own, base: base["now"][-1] / own["now"][-1],
    "reward at the end": lambda own, base: own["hard"][-1],
    "minus GRPO's": lambda own, base: own["hard"][-1] - base["hard"][-1],
}
STALE: Columns = {
    "kept ÷ plain length": lambda own, base: float(np.divide(own["kept"], own["mean"]).mean()),
    "mean lag": lambda own, base: _known(own["lag"], np.mean, 0.0),
    "oldest": lambda own, base: _known(own["oldest"], np.max, 0.0),
    "effective sample": lambda own, base: _known(own["sample"], np.mean, 1.0),
}
RATIOS = {"speed-up", "steps per second", "kept ÷ plain length"}


def table(runs: Sequence[Mapping[str, Any]], columns: Columns) -> str:
    """A row per world, rate and arm, in Markdown: means over seeds with 95 % intervals."""
    rows = []
    for world, rate in dict.fromkeys((run["world"], run["rate"]) for run in runs):
        mine = [run for run in runs if (run["world"], run["rate"]) == (world, rate)]
        bases = {run["seed"]: run for run in mine if run["arm"] == BASELINE}
        for arm in ARMS:
            pairs = [(run, bases[run["seed"]]) for run in mine if run["arm"] == arm and run["seed"] in bases]
            if pairs:
                found = {name: [value(*pair) for pair in pairs] for name, value in columns.items()}
                own = [cells.ratio(values) if name in RATIOS else cells.mean(values) for name, values in found.items()]
                rows.append([f"{world}, {rate:g}: {arm} ({len(pairs)})", *own])
    return cells.table(["world, learning rate: arm (seeds)", *columns], rows)


def main() -> None:
    """Trains what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=lambda text: text.split(","), default=["published"])
    parser.add_argument("--arms", type=lambda text: text.split(";"), default=list(ARMS), help="with semicolons")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2, 3, 4])
    parser.add_argument("--rates", type=lambda text: [float(word) for word in text.split(",")], default=list(RATES))
    parser.add_argument("--quick", action="store_true", help="two steps, one seed: does it run?")
    parser.add_argument("--only-table", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.file = ROOT / ("outputs/quick" if options.quick else "benchmarks/results") / "continuous.jsonl"
    for name in ("transformers", "trl_darts"):
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if options.quick:
        options.seeds, options.rates = options.seeds[:1], options.rates[:1]
        for name in options.worlds:
            object.__setattr__(WORLDS[name], "steps", 2)
    if not options.only_table:
        run_missing(options)
    for columns in (GAINED, STALE):
        print(table(read(options.file), columns), end="\n\n")


if __name__ == "__main__":
    main()
