"""
Does training learn what GRPO would learn, where the bounded wait aborts what matters?

    python benchmarks/learning.py [--quick] [--worlds needs_120,endless] [--arms grpo,default] [--seeds 0,1]
                                  [--server] [--steps 400] [--learning-rate 0]

The task is that of `long_tail.py`, with worlds in which length matters, one change at a time:

- published: the task as it is, for reference.
- needs_80, needs_120: answers to half of the kinds are right if, and only if, they end and have that many tokens.
- needs_120_small: the same with 8 prompts per step instead of 32.
- longer: the longer the mode, the more often an answer is right, by shares (0.15, 0.35, 0.75).
- rare, turns, easy: answers are right with a probability that has nothing to do with length: 0.02; 0.02 and 0.98 by
  turns; 0.97.
- endless: a tenth of the answers never end.
- spread: as published, with a small random part in each reward, so that no group is uniform and none is deferred.

The primary metrics, named before any run: the *hard* reward at the end (of the kinds that need length, where there are
some, else of all), and how many times as early as GRPO an arm reaches the lower of both best hard rewards. Rewards are
those of plain sampling, computed exactly from the model. An arm that learns less than GRPO is seen in the first, and
one that is slower in the second.

Trainer, scheduler, buffer, rewards and optimizer are the library's. Answers are sampled from the model's current
weights and decode in virtual time (`SimulatedCluster`), which gives exact seconds by the published curve of an 8 B
model. With `--server`, a real vLLM server decodes them, unpaced, and seconds are computed from the lengths of all
candidates by the same curve (Eq. 4). What a step takes beside its rollout is counted per trained token: 30 % of a step
of GRPO. Each seed begins with one epoch of GRPO that all arms share. Results are appended to one file per world, and a
later call runs what is missing. With `--learning-rate 0` nothing is learned, and a table of the arms' speed follows,
which other trajectories do not blur.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from benchmarks import cells
from benchmarks.lines import append, read
from benchmarks.long_tail import (
    ENDLESS_SHARE,
    KINDS,
    LIMIT,
    MODES,
    TOKENIZER,
    ends,
    grade_reward,
    load_model,
    make_checkpoint,
    make_dataset,
    probabilities,
)
from benchmarks.models import EOS_ID
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, scaled
from benchmarks.servers import training_args
from benchmarks.speedups import time_to_reward, timed
from benchmarks.vllm_server import start_vllm_server
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.simulation import ClusterSpec, SimulatedCluster
from trl_darts.callbacks import ADMISSION_FILE
from trl_darts.engines.batch import PromptBatch
from trl_darts.policy import rollout_time
from trl_darts.scheduling import RolloutResult
from trl_darts.testing import StubEngine, stub_servers


ROOT = Path(__file__).resolve().parents[1]
NUM_GENERATIONS, EPOCH, LEARNING_RATE = 8, 8, 1e-3  # rows of a prompt, steps that all arms share
MICRO_BATCH = 32  # rows
ROLLOUT_SHARE = 0.7  # of a step of GRPO, in the paper
CURVE = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES)
BASELINE = "grpo"
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"schedule": "grpo"},
    "paper": {"long_end_patience": None},
    "unguarded": {},
    "every 4th": {"long_end_every": 4},  # the default of in-process engines
    "default": {"defer_unsettled_groups": None},  # groups are deferred
    "audited": {"audit_share": 0.06},  # unguarded, and measures what that loses
}
SHARED = {"schedule": "grpo", "submit_order": "longest"}  # in this order, lengths are learned with GRPO too


@dataclass(frozen=True)
class World:
    """What is right, and how answers begin."""

    needs: int = 0  # tokens that a right answer of every second kind has at least
    shares: tuple[float, ...] = ()  # of right answers, by turns of the kinds
    by_mode: tuple[float, ...] = ()  # of right answers, by mode
    endless: float = ENDLESS_SHARE
    noise: float = 0.0  # largest random part of a reward
    num_prompts: int = 32
    steps: int = 80
    learning_rate: float = LEARNING_RATE

    @property
    def hard(self) -> list[int]:
        """The kinds that need length, or all."""
        return [kind for kind in range(len(KINDS)) if self.needs and kind % 2] or list(range(len(KINDS)))

    def checkpoint(self, directory: Path) -> Path:
        """The model before any training."""
        shares = None
        if self.shares or self.by_mode:
            shares = np.resize(self.shares, (len(MODES), len(KINDS))).T if self.shares else None
            shares = np.tile(self.by_mode, (len(KINDS), 1)) if self.by_mode else shares
        return make_checkpoint(directory, endless_share=self.endless, shares=shares)

    def reward(self, prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """1.0 for a right answer."""
        graded = grade_reward(kwargs["completions"])
        long = [float(len(ids) >= self.needs and ids[-1] == EOS_ID) for ids in completion_ids]
        need = [bool(self.needs) and KINDS.index(prompt[-1]) % 2 == 1 for prompt in prompts]
        noise = [self.noise * random.Random(str(ids)).random() for ids in completion_ids]
        right = [own if needs else grade for own, needs, grade in zip(long, need, graded, strict=True)]
        return [reward + extra for reward, extra in zip(right, noise, strict=True)]

    def exact(self, table: np.ndarray) -> tuple[np.ndarray, float, float]:
        """Plain sampling's reward of each kind, its mean length, and the share of answers that are cut off."""
        ended, right = ends(table)
        rewards = right.sum(1)
        if self.needs:
            rewards[1::2] = ended[1::2, self.needs - 1 :].sum(1)
        ended = ended.mean(0)
        cut = 1 - ended.sum()
        return rewards, float(ended @ np.arange(1, LIMIT + 1) + cut * LIMIT), float(cut)


WORLDS = {
    "published": World(),
    "needs_80": World(needs=80),
    "needs_120": World(needs=120),
    "needs_120_small": World(needs=120, num_prompts=8),
    "longer": World(by_mode=(0.15, 0.35, 0.75)),
    "rare": World(shares=(0.02,)),
    "turns": World(shares=(0.02, 0.98)),
    "easy": World(shares=(0.97,)),
    "endless": World(endless=0.1, steps=160),
    "spread": World(noise=0.01),
}


# Decoding


class ChainEngine(StubEngine):
    """Samples answers from the model's current weights, and decodes them in virtual time."""

    def __init__(self, trainer: Any, seed: int) -> None:
        super().__init__(self.later_turn, LIMIT, trainer._main)
        self._model, self._rng = trainer.model, np.random.default_rng(seed)
        self._cluster = SimulatedCluster(ClusterSpec(CURVE))

    def _run(self, plan: Any, batch: PromptBatch) -> RolloutResult:
        counts = plan.admission.num_candidates
        letters = np.repeat([batch.rows[batch.row_of(group, 0)][-1] for group in range(len(counts))], counts)
        answers = iter(sample(probabilities(self._model), letters, self._rng))
        self._answers = [[next(answers) for _ in range(count)] for count in counts]
        return super()._run(plan, batch)

    def _tokens(self, batch: PromptBatch, group: int, index: int) -> list[int]:
        return self._answers[group][index]


def sample(table: np.ndarray, states: np.ndarray, rng: np.random.Generator) -> list[list[int]]:
    """An answer from each state, with `eos`; one that does not end has a token more than the limit."""
    bounds = table.cumsum(1)
    tokens = np.zeros((len(states), LIMIT + 1), int)
    running = np.arange(len(states))
    for place in range(LIMIT + 1):
        following = (bounds[states] < rng.random((len(states), 1))).sum(1).clip(max=len(table) - 1)
        tokens[running, place] = following
        running, states = running[following != EOS_ID], following[following != EOS_ID]
    is_end = tokens == EOS_ID
    lengths = np.where(is_end.any(1), is_end.argmax(1) + 1, LIMIT + 1)
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@contextmanager
def engine(start: Path, uses_server: bool) -> Iterator[str | None]:
    """Yields the address of a real server, or `None` for virtual time."""
    if not uses_server:
        yield None
        return
    with start_vllm_server(start, max_num_seqs=512, max_model_len=2 * LIMIT) as server:
        yield server.base_url


def make_trainer(url: str | None, seed: int, **arguments: Any) -> Any:
    """Builds a trainer whose engine is a server, or decodes in virtual time."""
    if url is not None:
        return DARTSGRPOTrainer(**arguments)
    with stub_servers(lambda prompt, index: []):
        trainer = DARTSGRPOTrainer(**arguments)
    trainer._engine = ChainEngine(trainer, seed)
    return trainer


# Trainings


class Recorder(TrainerCallback):
    """Records of each step what it took, and what plain sampling would give after it."""

    def __init__(self, trainer: Any, world: World) -> None:
        self.trainer, self.world = trainer, world
        self.steps: list[dict[str, float]] = []
        self.audits: dict[str, float] = {}  # at the end, see docs/metrics.md
        self.rollout, self._run = 0.0, trainer._engine.run
        trainer._engine.run = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a rollout and adds its seconds, by Eq. 4."""
        result = self._run(*args, **kwargs)
        groups = [*result.groups, *result.deferred]
        self.rollout += rollout_time([own.length for group in groups for own in group.candidates], CURVE)
        return result

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the step."""
        metrics = self.trainer._metrics["train"]  # of this step alone: each is logged
        rewards, mean, cut = self.world.exact(probabilities(self.trainer.model))
        self.steps.append(
            {
                "rollout": self.rollout,
                "trained": metrics["completions/mean_length"][-1] * self.world.num_prompts * NUM_GENERATIONS,
                "hard": float(rewards[self.world.hard].mean()),
                "reward": float(rewards.mean()),
                "mean": mean,
                "cut": cut,
                "kept": metrics["completions/mean_length"][-1],
                "kept_reward": metrics["reward"][-1],
                "long": float(metrics.get("darts/buffer/long_round", [0.0])[-1]),
            }
        )
        self.audits = {name.rpartition("/")[2]: own[-1] for name, own in metrics.items() if "/audit/" in name}
        self.rollout = 0.0


def arm_args(world: World, seed: int, is_epoch: bool, output_dir: Path, url: str | None, **fields: Any) -> Any:
    """Returns the config of an arm, or of the epoch that all share."""
    num_rows = world.num_prompts * NUM_GENERATIONS
    return training_args(
        url or "http://127.0.0.1:1",
        output_dir,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=min(MICRO_BATCH, num_rows),
        gradient_accumulation_steps=max(1, num_rows // MICRO_BATCH),
        max_completion_length=LIMIT,
        max_steps=EPOCH + (0 if is_epoch else world.steps),
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        seed=seed,
        save_strategy="steps" if is_epoch else "no",
        save_steps=EPOCH,
        **fields,
    )


def train(world: World, seed: int, arm: str | None, start: Path, output_dir: Path, url: str | None) -> dict[str, Any]:
    """Trains an arm from the shared epoch's checkpoint, or that epoch from the model (`None`)."""
    args = arm_args(
        world,
        seed,
        arm is None,
        output_dir,
        url,
        learning_rate=world.learning_rate,
        vllm_importance_sampling_correction=False,  # all is on-policy; virtual time has no log-probs
        **(SHARED if arm is None else ARMS[arm]),
    )
    trainer = make_trainer(
        url,
        seed=1000 * seed + (0 if arm is None else 1 + list(ARMS).index(arm)),
        model=load_model(start),
        reward_funcs=world.reward,
        args=args,
        train_dataset=make_dataset(world.num_prompts * EPOCH),
        processing_class=TOKENIZER,
    )
    trainer.remove_callback(PrinterCallback)
    recorder = Recorder(trainer, world)
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=None if arm is None else str(start))
    if url is not None:
        trainer.vllm_generation.engine.close()
    by_step = {name: [float(f"{step[name]:.4g}") for step in recorder.steps] for name in recorder.steps[0]}
    if not recorder.audits:
        return {"by_step": by_step}
    return {"by_step": by_step, "audits": recorder.audits | {"warned": trainer._batches.buffer.audits.warned}}


def run_missing(name: str, seeds: Sequence[int], arms: Sequence[str], options: argparse.Namespace) -> None:
    """Runs the trainings of a world that are not in its file."""
    world, path = WORLDS[name], results_file(name, options)
    done = {(run["seed"], run["arm"]) for run in read(path)}
    todo = [(seed, arm) for seed, arm in product(seeds, arms) if (seed, arm) not in done]
    if not todo:
        return
    with tempfile.TemporaryDirectory() as directory:
        start = world.checkpoint(Path(directory) / "start")
        with engine(start, options.server) as url:
            for seed in dict.fromkeys(seed for seed, _ in todo):
                shared = Path(directory) / f"shared{seed}"
                epoch = train(world, seed, None, start, shared, url)["by_step"]
                checkpoint = shared / f"checkpoint-{EPOCH}"
                (checkpoint / ADMISSION_FILE).unlink()  # of another schedule's admission; the lengths stay
                per_token = (1 / ROLLOUT_SHARE - 1) * sum(epoch["rollout"]) / sum(epoch["trained"])
                for arm in [arm for own, arm in todo if own == seed]:
                    found = train(world, seed, arm, checkpoint, Path(directory) / "run", url)
                    run = {"seed": seed, "arm": arm, "per_token": per_token, **found}
                    append(path, run)
                    print(f"{name} {arm} seed {seed}: hard {run['by_step']['hard'][-1]:.3f}", flush=True)


# What came of them

Run = Mapping[str, Any]


def results_file(world: str, options: argparse.Namespace) -> Path:
    """Where a world's runs are."""
    suffix = (".server" if options.server else "") + (f".{options.steps}" if options.steps else "")
    suffix += "" if options.learning_rate is None else f".lr{options.learning_rate:g}"
    return Path(options.results) / f"learning.{world}{suffix}.jsonl"


def seconds(run: Run) -> np.ndarray:
    """Of each step."""
    return timed(run)["seconds"]


def times_as_early(kinds: str, own: Run, base: Run) -> float:
    """The speed-up to the lower of both best rewards."""
    return time_to_reward(timed(own), timed(base), kinds)


Columns = Mapping[str, Callable[[Run, Run], float]]
REWARD: Columns = {
    "reward at the end": lambda own, base: own["by_step"]["hard"][-1],
    "minus GRPO's": lambda own, base: own["by_step"]["hard"][-1] - base["by_step"]["hard"][-1],
    "speed-up": partial(times_as_early, "hard"),
    "speed-up, all kinds": partial(times_as_early, "reward"),
}
SPEED: Columns = {
    "whole run": lambda own, base: seconds(base).sum() / seconds(own).sum(),
    "from the second step on": lambda own, base: seconds(base)[1:].sum() / seconds(own)[1:].sum(),
}
MEANS = {"reward at the end", "minus GRPO's"}  # others are ratios


def table(worlds: Mapping[str, Sequence[Run]], columns: Columns = REWARD, baseline: str = BASELINE) -> str:
    """A row per world and arm, in Markdown: means over seeds with 95 % intervals."""
    rows = []
    for world, runs in worlds.items():
        bases = {run["seed"]: run for run in runs if run["arm"] == baseline}
        for arm in ARMS:
            pairs = [(run, bases[run["seed"]]) for run in runs if run["arm"] == arm and run["seed"] in bases]
            if pairs:
                found = {name: [value(*pair) for pair in pairs] for name, value in columns.items()}
                own = [cells.mean(values) if name in MEANS else cells.ratio(values) for name, values in found.items()]
                rows.append([f"{world}: {arm} ({len(pairs)})", *own])
    return cells.table(["world: arm (seeds)", *columns], rows)


def kept_table(worlds: Mapping[str, Sequence[Run]]) -> str:
    """A row per world, in Markdown: kept over plain length by arm, and the default's share of long rounds."""
    arms, rows = ("paper", "unguarded", "default"), []
    for world, runs in worlds.items():
        steps = {arm: [run["by_step"] for run in runs if run["arm"] == arm] for arm in arms}
        kept = [[float(np.divide(own["kept"], own["mean"]).mean()) for own in steps[arm]] for arm in arms]
        rows.append([world, *map(cells.ratio, kept), cells.mean([np.mean(own["long"]) for own in steps["default"]])])
    return cells.table(["world", *arms, "the default's long rounds"], rows)


def guard_table(worlds: Mapping[str, Sequence[Run]]) -> str:
    """A row per world, in Markdown: how many times as early as without a guard the two guards are."""
    rows = []
    for world, runs in worlds.items():
        bases = {run["seed"]: run for run in runs if run["arm"] == "unguarded"}
        own = [[run for run in runs if run["arm"] == arm and run["seed"] in bases] for arm in ("default", "every 4th")]
        ratios = [[times_as_early("hard", run, bases[run["seed"]]) for run in arm] for arm in own]
        rows.append([f"{world} ({', '.join(str(len(arm)) for arm in own)})", *map(cells.ratio, ratios)])
    return cells.table(["world (seeds)", "default", "every 4th"], rows)


def audit_table(worlds: Mapping[str, Sequence[Run]]) -> str:
    """A row per world, in Markdown: what audits told of the unguarded wait and what was exact, means over seeds."""
    rows = []
    for world, runs in worlds.items():
        own = [run for run in runs if run["arm"] == "audited" and "audits" in run]
        if not own:
            continue
        audits, exact = [run["audits"] for run in own], [exact_length_ratio(run) for run in own]
        covered = [
            abs(audit["length_mean_ratio"] - ratio) <= audit["length_mean_ratio_interval"]
            for audit, ratio in zip(audits, exact, strict=True)
        ]
        lost, at_random = (
            np.mean([audit[name] for audit in audits]) for name in ("lost_share", "lost_share_at_random")
        )
        told = cells.ratio([audit["length_mean_ratio"] for audit in audits])
        warned = f"{sum(audit['warned'] for audit in audits)}"
        exactly = f"{cells.geometric(exact)[0]:.2f}, {sum(covered)}"
        rows.append([f"{world} ({len(own)})", f"{lost:.1%}, {at_random:.1%}", warned, told, exactly])
    header = ["world (seeds)", "lost, lost at random", "warned", "kept ÷ plain length", "exact, covered in"]
    return cells.table(header, rows)


def exact_length_ratio(run: Run) -> float:
    """Mean length of the rows of short rounds, over that of plain sampling at the same time."""
    kept, plain, long = (np.array(run["by_step"][name]) for name in ("kept", "mean", "long"))
    before = np.append(np.nan, plain[:-1])  # a step's rows come from the weights of the step before
    short = (long == 0) & ~np.isnan(before)
    return float(kept[short].sum() / before[short].sum())


# The command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--worlds", type=split, default=list(WORLDS), help="some of them, with commas")
    parser.add_argument("--arms", type=split, default=list(ARMS), help=f"some of them; {BASELINE} always runs")
    parser.add_argument("--seeds", type=split, default=list("01234"), help="some numbers, with commas")
    parser.add_argument("--steps", type=int, help="of each run, instead of the world's")
    parser.add_argument("--learning-rate", type=float, help=f"instead of {LEARNING_RATE:g}; 0 compares speed alone")
    parser.add_argument("--server", action="store_true", help="decode on a real vLLM server")
    parser.add_argument("--quick", action="store_true", help="two steps, one seed: does it run?")
    parser.add_argument("--results", help="default: benchmarks/results; outputs/quick if quick")
    parser.add_argument("--only-table", action="store_true", help="train nothing: the tables of what is there")
    options = parser.parse_args(arguments)
    for name, known in {"arms": ARMS, "worlds": WORLDS}.items():
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name} ({', '.join(sorted(unknown))}) must be some of {', '.join(known)}.")
    if not all(seed.isdecimal() for seed in options.seeds):
        parser.error(f"--seeds ({','.join(options.seeds)}) must be numbers with commas between them.")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps ({options.steps}) must be at least 1.")
    if options.learning_rate is not None and options.learning_rate < 0:
        parser.error(f"--learning-rate ({options.learning_rate}) must not be negative.")
    options.results = options.results or ("outputs/quick" if options.quick else ROOT / "benchmarks" / "results")
    return options


def main() -> None:
    """Trains what is missing, and prints the tables."""
    options = parse()
    for name in ("transformers", "trl_darts"):  # the latter says with each arm that its admission begins anew
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    torch.set_num_threads(1)  # matrices are small
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    arms = [arm for arm in ARMS if arm in {BASELINE, *options.arms}]
    seeds = [int(seed) for seed in options.seeds]
    if options.quick:
        seeds = seeds[:1]
    given = {"steps": 2 if options.quick else options.steps, "learning_rate": options.learning_rate}
    given = {name: value for name, value in given.items() if value is not None}
    WORLDS.update({name: replace(world, **given) for name, world in WORLDS.items()})
    for name in [] if options.only_table else options.worlds:
        run_missing(name, seeds, arms, options)
    worlds = {name: read(results_file(name, options)) for name in WORLDS}
    print("\n\n".join([table(worlds), audit_table(worlds)]))
    if options.learning_rate == 0:
        print(f"\nspeed over unguarded\n\n{table(worlds, SPEED, 'unguarded')}")


if __name__ == "__main__":
    main()
