"""
Does training learn what GRPO would learn, where the bounded wait aborts what matters?

    python -m benchmarks.learning [--worlds needs_120,endless] [--arms grpo,default] [--seeds 0,1]
                                  [--engines server] [--steps 400] [--learning-rate 0]

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
some, else of all), and the speed-up over GRPO to the lower of both best hard rewards. Rewards are those of plain
sampling, computed exactly from the model. An arm that learns less than GRPO is seen in the first, and one that is
slower in the second.

Trainer, scheduler, buffer, rewards and optimizer are the library's. Answers are sampled from the model's current
weights and decode in virtual time (`SimulatedCluster`), which gives exact seconds by the published curve of an 8 B
model. With `--engines server`, a real vLLM server decodes them, unpaced, and seconds are computed from the lengths of
all candidates by the same curve (Eq. 4). What a step takes beside its rollout is counted per trained token: 30 % of a
step of GRPO. Each seed begins with one epoch of GRPO that all arms share. With `--learning-rate 0` nothing is learned,
and the arms' speed can be compared without the blur of different trajectories.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from benchmarks import cells
from benchmarks.cells import Columns, Run
from benchmarks.chain_clock import CURVE, ChainClock
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.lines import read
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
from benchmarks.servers import make_trainer, training_args
from benchmarks.speedups import time_to_reward, timed
from benchmarks.vllm_server import start_vllm_server
from trl_darts.callbacks import ADMISSION_FILE
from trl_darts.policy import rollout_time
from trl_darts.testing import stub_servers


NUM_GENERATIONS, EPOCH, LEARNING_RATE = 8, 8, 1e-3  # rows of a prompt, steps that all arms share
MICRO_BATCH = 32  # rows
ROLLOUT_SHARE = 0.7  # of a step of GRPO, in the paper
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
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


# Trainings


class Recorder(TrainerCallback):
    """Records of each step what it took, and what plain sampling would give after it."""

    def __init__(self, trainer: Any, world: World) -> None:
        self.trainer, self.world = trainer, world
        self.steps: list[dict[str, float]] = []
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
        self.metrics = self.trainer._metrics["train"]  # of this step alone: each is logged
        rewards, mean, cut = self.world.exact(probabilities(self.trainer.model))
        exact = {"hard": float(rewards[self.world.hard].mean()), "reward": float(rewards.mean())}
        self.steps.append({**exact, "mean": mean, "cut": cut, **self.measured(self.metrics)})
        self.rollout = 0.0

    def measured(self, metrics: Mapping[str, list[float]]) -> dict[str, float]:
        """What the trainer and its rollout tell of a step."""
        kept = metrics["completions/mean_length"][-1]
        return {
            "rollout": self.rollout,
            "trained": kept * self.world.num_prompts * NUM_GENERATIONS,
            "kept": kept,
            "kept_reward": metrics["reward"][-1],
            "long": float(metrics.get("darts/buffer/long_round", [0.0])[-1]),
        }

    def by_step(self) -> dict[str, list[float]]:
        """Returns the values of all steps by name."""
        return {name: [step[name] for step in self.steps] for name in self.steps[0]}


@dataclass(frozen=True)
class Training:
    """One training of an arm from the shared epoch's checkpoint, or that epoch (without an arm)."""

    world: World
    seed: int
    fields: Mapping[str, Any]  # of the config
    place: int = 0  # of the arm, from 1 on
    url: str | None = None  # of a server, instead of virtual time
    per_token: float = 0.0

    def run(self, start: Path, output_dir: Path, recorder: type[Recorder] = Recorder) -> tuple[Any, Recorder]:
        """Trains, and returns the trainer and what was recorded."""
        torch.set_num_threads(1)  # matrices are small
        num_rows, is_epoch = self.world.num_prompts * NUM_GENERATIONS, not self.place
        args = training_args(
            self.url or "http://127.0.0.1:1",
            output_dir,
            num_generations=NUM_GENERATIONS,
            per_device_train_batch_size=min(MICRO_BATCH, num_rows),
            gradient_accumulation_steps=max(1, num_rows // MICRO_BATCH),
            max_completion_length=LIMIT,
            max_steps=EPOCH + (0 if is_epoch else self.world.steps),
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            seed=self.seed,
            save_strategy="steps" if is_epoch else "no",
            save_steps=EPOCH,
            **{"learning_rate": self.world.learning_rate, "vllm_importance_sampling_correction": False, **self.fields},
        )
        trainer = self._trainer(load_model(start), args)
        recorded = recorder(trainer, self.world)
        trainer.add_callback(recorded)
        trainer.train(resume_from_checkpoint=None if is_epoch else str(start))
        if self.url is not None:
            trainer.vllm_generation.engine.close()
        return trainer, recorded

    def _trainer(self, model: Any, args: Any) -> Any:
        arguments = model, self.world.reward, args, make_dataset(self.world.num_prompts * EPOCH), TOKENIZER
        if self.url is not None:
            return make_trainer(*arguments)
        with stub_servers(lambda prompt, index: []):
            trainer = make_trainer(*arguments)
        trainer._engine = ChainClock(trainer, 1000 * self.seed + self.place, self.per_token)
        return trainer


@contextmanager
def server_of(world: str, engine: str) -> Iterator[str | None]:
    """Yields the address of a real server, or `None` for virtual time."""
    if engine == "virtual":
        yield None
        return
    with TemporaryDirectory() as directory:
        start = WORLDS[world].checkpoint(Path(directory))
        with start_vllm_server(start, max_num_seqs=512, max_model_len=2 * LIMIT) as server:
            yield server.base_url


@contextmanager
def epoch_of(world: World, seed: int, url: str | None = None) -> Iterator[tuple[Path, float]]:
    """Yields the checkpoint after the epoch that all arms share, and the seconds that training takes per token."""
    with TemporaryDirectory() as directory:
        start = world.checkpoint(Path(directory) / "start")
        _, recorder = Training(world, seed, SHARED, url=url).run(start, Path(directory) / "shared")
        checkpoint = Path(directory) / "shared" / f"checkpoint-{EPOCH}"
        (checkpoint / ADMISSION_FILE).unlink()  # of another schedule's admission; the lengths stay
        steps = recorder.by_step()
        yield checkpoint, (1 / ROLLOUT_SHARE - 1) * sum(steps["rollout"]) / sum(steps["trained"])


def run(
    shared: Shared, world: str, engine: str, seed: int, arm: str, steps: int, learning_rate: float | None
) -> dict[str, Any]:
    """Trains one arm."""
    given = {"steps": steps or WORLDS[world].steps}
    given |= {} if learning_rate is None else {"learning_rate": learning_rate}
    own, url = replace(WORLDS[world], **given), shared(server_of, world, engine)
    checkpoint, per_token = shared(epoch_of, own, seed, url)
    with TemporaryDirectory() as directory:
        place = 1 + list(ARMS).index(arm)
        trainer, recorder = Training(own, seed, ARMS[arm], place, url).run(checkpoint, Path(directory))
    found: dict[str, Any] = {"per_token": per_token, "by_step": recorder.by_step()}
    audits = {name.rpartition("/")[2]: own[-1] for name, own in recorder.metrics.items() if "/audit/" in name}
    if audits:
        found["audits"] = audits | {"warned": trainer._batches.policy.audits.warned}
    return found


def file_of(run: Run) -> str:
    """Returns the name of a run's file."""
    suffix = (".server" if run["engine"] == "server" else "") + (f".{run['steps']}" if run["steps"] else "")
    suffix += "" if run["learning_rate"] is None else f".lr{run['learning_rate']:g}"
    return f"learning.{run['world']}{suffix}.jsonl"


# What came of them


def times_as_early(own: Run, base: Run, kinds: str = "hard") -> float:
    """The speed-up to the lower of both best rewards."""
    return time_to_reward(timed(own), timed(base), kinds)


def _end(own: Run, base: Run) -> float:
    return float(own["by_step"]["hard"][-1])


def _seconds(own: Run, base: Run, first: int = 0) -> float:
    return float(timed(base)["seconds"][first:].sum() / timed(own)["seconds"][first:].sum())


REWARD: Columns = {
    "reward at the end": (_end, cells.mean),
    "minus GRPO's": (lambda own, base: _end(own, base) - _end(base, own), cells.mean),
    "speed-up": (times_as_early, cells.ratio),
    "speed-up, all kinds": (lambda own, base: times_as_early(own, base, "reward"), cells.ratio),
}
SPEED: Columns = {
    "whole run": (_seconds, cells.ratio),
    "from the second step on": (lambda own, base: _seconds(own, base, 1), cells.ratio),
}
Worlds = Mapping[str, Sequence[Run]]


def table(worlds: Worlds, columns: Columns = REWARD, baseline: str = "grpo") -> str:
    """A row per world and arm, in Markdown: means over seeds with 95 % intervals."""
    cases = {f"{world}: ": runs for world, runs in worlds.items()}
    return cells.compare("world: arm (seeds)", cases, columns, ARMS, baseline)


def kept_table(worlds: Worlds) -> str:
    """A row per world, in Markdown: kept over plain length by arm, and the default's share of long rounds."""
    arms, rows = ("paper", "unguarded", "default"), []
    for world, runs in worlds.items():
        steps = {arm: [run["by_step"] for run in runs if run["arm"] == arm] for arm in arms}
        kept = [[float(np.divide(own["kept"], own["mean"]).mean()) for own in steps[arm]] for arm in arms]
        rows.append([world, *map(cells.ratio, kept), cells.mean([np.mean(own["long"]) for own in steps["default"]])])
    return cells.table(["world", *arms, "the default's long rounds"], rows)


def guard_table(worlds: Worlds) -> str:
    """A row per world, in Markdown: the speed-up of the two guards over no guard."""
    rows = []
    for world, runs in worlds.items():
        pairs = [cells.pairs_of(runs, arm, "unguarded") for arm in ("default", "every 4th")]
        ratios = [[times_as_early(*pair) for pair in own] for own in pairs]
        rows.append([f"{world} ({', '.join(str(len(own)) for own in pairs)})", *map(cells.ratio, ratios)])
    return cells.table(["world (seeds)", "default", "every 4th"], rows)


def audit_table(worlds: Worlds) -> str:
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


def tables(results: Path) -> str:
    """Returns the tables of all files."""
    worlds = {path.stem.removeprefix("learning."): read(path) for path in sorted(results.glob("learning.*.jsonl"))}
    frozen = {name: runs for name, runs in worlds.items() if name.endswith(".lr0")}
    speed = f"Speed over unguarded:\n\n{table(frozen, SPEED, 'unguarded')}" if frozen else ""
    audited = {name: runs for name, runs in worlds.items() if any("audits" in run for run in runs)}
    return "\n\n".join(filter(None, [table(worlds), audit_table(audited) if audited else "", speed]))


BENCHMARK = Benchmark(
    "learning",
    __doc__,
    {"world": list(WORLDS), "engine": ["virtual", "server"], "seed": range(5), "arm": list(ARMS)},
    run,
    tables,
    options={"steps": 0, "learning_rate": None},
    usual={"engine": ["virtual"]},
    quick={"steps": 2, "world": ["needs_120_small"]},
    file=file_of,
    named=("world", "engine"),
    baseline="grpo",
)

if __name__ == "__main__":
    main(BENCHMARK)
