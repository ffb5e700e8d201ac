"""
The evidence for shaped rollouts, on two cores at a GPU's pace: how long each way takes to the same reward.

    python -m benchmarks.training [--worlds tail,equal,full,half] [--arms grpo,default] [--seeds 0,1]

Each seed begins with one epoch of GRPO on the task of `long_tail.py`. From its checkpoint, which also knows the
prompts' lengths, each arm trains with the same prompts in the same order: for as many steps as GRPO, and on until
plain sampling has GRPO's reward at its end. vLLM is real, and follows the published curve of an 8 B model, four times
as slow (`pacing.py`). What a step takes beside its rollout is paced too, per token that is trained on: 30 % of a step
of GRPO, as in the paper. A seed goes through all arms before the next one begins.

Worlds: `tail` is the task. Two controls have GRPO and the default alone: in `equal` all answers are equally long, so
nothing can be gained, and in `full` the engine decodes a sixteenth of a batch at once, so further candidates queue. In
`half`, all answers to half of the prompts are worth the same, and GRPO is compared with dynamic sampling.

All trainings take some three hours. At the end the tables are printed and the picture of benchmarks/REPORT.md is
drawn.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from transformers import TrainerCallback

from benchmarks import cells
from benchmarks.cells import Columns, Run
from benchmarks.harness import Benchmark, Shared, load, main, store
from benchmarks.lines import RESULTS, ROOT
from benchmarks.long_tail import (
    LIMIT,
    TOKENIZER,
    Answers,
    grade_reward,
    half_reward,
    load_model,
    make_checkpoint,
    make_dataset,
)
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, Pace, paced_server, scaled
from benchmarks.servers import make_trainer, training_args
from benchmarks.speedups import seconds_to_reward, spent_to
from trl_darts import DARTSGRPOConfig
from trl_darts.analysis.plots import save_picture
from trl_darts.callbacks import ADMISSION_FILE


PICTURE = "training.png"
PROMPTS, NUM_GENERATIONS = 32, 8  # of a step
EPOCH = 8  # steps
PATIENCE = 1.5  # the others get so many times as many to reach its reward
LEARNING_RATE = 1e-3
ROLLOUT_SHARE = 0.7  # of a step of GRPO, in the paper
LAST = 10  # steps: the end of a training

BASELINE, DEFAULT = "grpo", "default"
AHEAD = {"schedule": "darts", "rollout_ahead": 1}
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"schedule": "grpo"},
    "darts (paper)": {"schedule": "darts", "long_end_patience": None},
    DEFAULT: {"schedule": "darts"},
    "long end every 4": {"schedule": "darts", "long_end_every": 4},
    "long end every 8": {"schedule": "darts", "long_end_every": 8},
    "tail batching": {"schedule": "tail_batching"},
    "partial rollout": {"schedule": "partial_rollout"},
    "default, ahead": AHEAD,
    "ahead, uncorrected": {**AHEAD, "vllm_importance_sampling_correction": False},
    "grpo, informative": {"schedule": "grpo", "drop_uniform_groups": True},
}
SHARED = {"schedule": "grpo", "submit_order": "longest"}  # in this order, lengths are learned with GRPO too


@dataclass(frozen=True)
class World:
    """What is trained on."""

    arms: Sequence[str]
    steps: int  # of GRPO, after the epoch that all share
    slots: int = 2 * PROMPTS * NUM_GENERATIONS  # candidates that the engine decodes at once
    reward: Callable[..., list[float]] = grade_reward


WORLDS = {
    "tail": World([arm for arm in ARMS if arm != "grpo, informative"], 40),
    "equal": World([BASELINE, DEFAULT], 8),
    "full": World([BASELINE, DEFAULT], 8, slots=16),
    "half": World([BASELINE, "grpo, informative"], 20, reward=half_reward),
}
METRICS = {  # of TRL's log, by the name in the results
    "train_reward": "reward",
    "grad_norm": "grad_norm",
    "tokens": "darts/rollout/generated_tokens",
    "kept_length": "completions/mean_length",
    "redundancy": "darts/budget/redundancy",
    "aborted": "darts/rollout/aborted_candidates",
    "off_policy": "darts/staleness/off_policy_share",
    "sync": "darts/sync/seconds",
}


# Trainings


class PacedSteps(TrainerCallback):
    """
    Has each step take `seconds_per_token` for each token that is trained on, beside its rollout, and records what
    plain sampling would give after it. A step for which the CPU was too slow counts as late, and with the seconds that
    it should have taken; those that it took where the next rollout, which ran meanwhile, had them too. Ends the
    training at a reward, after so many steps at least.
    """

    def __init__(
        self, trainer: Any, pace: Callable[[], Pace], seconds_per_token: float, stop: tuple[float, int]
    ) -> None:
        self.trainer = trainer
        self.pace = pace  # of the engine
        self.before = pace()
        self.seconds_per_token = seconds_per_token
        self.stop = stop
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sleeps for what is left of the step."""
        metrics = self.trainer._metrics["train"]  # of this step alone: each is logged
        rollout = sum(metrics.get("darts/rollout/wait_seconds") or metrics.get("darts/rollout/seconds", []))
        trained = sum(metrics["completions/mean_length"]) * args.per_device_train_batch_size
        due = rollout + trained * self.seconds_per_token
        left = self.begun + due - time.perf_counter()
        time.sleep(max(0.0, left))
        real = time.perf_counter() - self.begun
        engine, self.before = self.pace().since(self.before), self.pace()
        answers = Answers.of(self.trainer.model)
        is_paced = self.seconds_per_token and not args.rollout_ahead
        own = {"seconds": due if is_paced else real, "real": real, "rollout": rollout}
        own |= {"trained": trained, "late": float(left < 0)}
        self.steps.append(own | {"engine_late": engine.late / max(1, engine.steps), **asdict(answers)})
        reward, least = self.stop
        control.should_training_stop |= answers.reward >= reward and len(self.steps) >= least


@dataclass(frozen=True)
class Server:
    """A paced server, and the model that it starts with."""

    start: Path
    url: str
    pace: Callable[[], Pace]


@contextmanager
def server_of(world: str) -> Iterator[Server]:
    """Yields the server of a world."""
    with TemporaryDirectory() as directory:
        start = make_checkpoint(Path(directory) / "start", equal=world == "equal")
        curve, slots = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES), WORLDS[world].slots
        with paced_server(start, curve, max_num_seqs=slots, max_model_len=2 * LIMIT) as (server, pace):
            yield Server(start, server.base_url, pace)


def task_args(server: Server, output_dir: str | Path, seed: int, steps: int, **fields: Any) -> DARTSGRPOConfig:
    """Returns a config for a training on the task."""
    own: dict[str, Any] = {
        "num_generations": NUM_GENERATIONS,
        "per_device_train_batch_size": PROMPTS * NUM_GENERATIONS,
        "max_completion_length": LIMIT,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "seed": seed,
    }
    return training_args(server.url, output_dir, **{**own, **fields})


def train(
    server: Server,
    world: str,
    seed: int,
    steps: int,
    arm: str | None,
    start: Path,
    output_dir: Path,
    seconds_per_token: float = 0.0,
    target: float = math.inf,
) -> dict[str, list[float]]:
    """One training, from a checkpoint of the task, or of a trainer. What each of its steps was like."""
    most = EPOCH + (0 if arm is None else math.ceil(steps * (1 if arm == BASELINE else PATIENCE)))
    saves = {"save_strategy": "steps" if arm is None else "no", "save_steps": EPOCH}
    args = task_args(server, output_dir, seed, most, **saves, **(ARMS[arm] if arm else SHARED))
    trainer = make_trainer(load_model(start), WORLDS[world].reward, args, make_dataset(PROMPTS * EPOCH), TOKENIZER)
    paced = PacedSteps(trainer, server.pace, seconds_per_token, (target, steps))
    trainer.add_callback(paced)
    trainer.train(resume_from_checkpoint=None if arm is None else str(start))
    trainer.vllm_generation.engine.close()
    logs = {entry["step"]: entry for entry in trainer.state.log_history if "reward" in entry}
    first = trainer.state.global_step - len(paced.steps) + 1
    each = [
        own | {name: logs[first + place].get(metric, math.nan) for name, metric in METRICS.items()}
        for place, own in enumerate(paced.steps)
    ]
    return {name: [step[name] for step in each] for name in each[0]}


@contextmanager
def epoch_of(shared: Shared, world: str, seed: int, steps: int) -> Iterator[tuple[Path, float]]:
    """
    Yields the checkpoint after the epoch that all arms share, and the seconds that the rest of a step takes per token.
    The checkpoint is kept, so that a later call goes on from the same one.
    """
    path = shared.results / f"{world}.shared.seed{seed}.json"
    folder = ROOT / "outputs" / "training" if shared.results == RESULTS else shared.results
    checkpoint = folder / path.stem / f"checkpoint-{EPOCH}"
    if not (checkpoint.exists() and path.exists()):
        server = shared(server_of, world)
        by_step = train(server, world, seed, steps, None, server.start, checkpoint.parent)
        (checkpoint / ADMISSION_FILE).unlink()  # of another schedule's admission; the lengths stay
        store(path, {"world": world, "seed": seed, "steps": steps, "arm": None, "by_step": by_step})
    epoch = load(path)[0]["by_step"]
    yield checkpoint, (1 / ROLLOUT_SHARE - 1) * sum(epoch["rollout"][1:]) / sum(epoch["trained"][1:])


def steps_of(run: Run) -> int:
    """Returns GRPO's steps."""
    return run["steps"] or WORLDS[run["world"]].steps


def run(shared: Shared, world: str, seed: int, arm: str, steps: int) -> dict[str, Any]:
    """Trains one arm. GRPO comes first: its reward is what the others train for."""
    own = {"world": world, "seed": seed, "arm": BASELINE, "steps": steps}
    server, asked, target = shared(server_of, world), steps_of(own), math.inf
    checkpoint, per_token = shared(epoch_of, shared, world, seed, asked)
    if arm != BASELINE:
        target = load(shared.results / file_of(own))[0]["by_step"]["reward"][-1]
    before = server.pace()
    with TemporaryDirectory() as directory:
        by_step = train(server, world, seed, asked, arm, checkpoint, Path(directory), per_token, target)
    print(server.pace().since(before), end=" ")
    return {"by_step": by_step}


def file_of(run: Run) -> str:
    """Returns the name of a run's file."""
    return f"{run['world']}.{re.sub('[^a-z0-9]+', '_', run['arm']).strip('_')}.seed{run['seed']}.json"


def facts(run: Run) -> dict[str, Any]:
    """What a stored run must have been made with."""
    return {"steps": steps_of(run), "settings": ARMS[run["arm"]], "learning_rate": LEARNING_RATE}


# What came of them


def runs_of(results: Path) -> dict[str, list[Run]]:
    """Returns the runs that are there, by world."""
    worlds: dict[str, list[Run]] = {}
    for name, world in WORLDS.items():
        for arm in world.arms:
            for seed in SEEDS:
                for run in load(results / file_of({"world": name, "arm": arm, "seed": seed})):
                    steps = {key: np.array(values) for key, values in run["by_step"].items()}
                    worlds.setdefault(name, []).append({"arm": arm, "seed": seed, **steps})
    return worlds


def _spent(name: str) -> Callable[[Run, Run], float]:
    """What GRPO spends to the reward that it has at its end, over what this arm does."""
    return lambda own, base: spent_to(base, base["reward"][-1], name) / spent_to(own, base["reward"][-1], name)


def _ratio(name: str) -> Callable[[Run, Run], float]:
    """GRPO's sum over as many steps, over this arm's."""
    return lambda own, base: float(base[name].sum() / own[name][: len(base[name])].sum())


def _mean(name: str, last: int = 0) -> Callable[[Run, Run], float]:
    """The mean of as many steps as GRPO has, or of the last of them. NaN if the schedule does not log it."""

    def of(own: Run, base: Run) -> float:
        values = own[name][: len(base[name])][-last:]
        return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan

    return of


SPEED: Columns = {
    "to GRPO's reward": (seconds_to_reward, cells.ratio),
    "steps": (_ratio("seconds"), cells.ratio),
    "rollouts": (_ratio("rollout"), cells.ratio),
    "seconds per step": (_mean("seconds"), cells.mean),
}
SPENT: Columns = {
    "to it, in steps": (_spent("steps"), cells.ratio),
    "to it, in tokens": (_spent("tokens"), cells.ratio),
    "tokens of as many steps": (lambda own, base: 1 / _ratio("tokens")(own, base), cells.ratio),
    "off-policy": (_mean("off_policy"), cells.mean),
}
LEARNED: Columns = {
    "plain sampling": (lambda own, base: float(own["reward"][: len(base["reward"])][-1]), cells.mean),
    "p99": (_mean("p99", LAST), cells.mean),
    "if wrong": (_mean("mean_wrong", LAST), cells.mean),
    "gradient norm": (_mean("grad_norm"), cells.mean),
}
ROWS: Columns = {
    "kept ÷ plain length": (
        lambda own, base: _mean("kept_length")(own, base) / _mean("mean")(own, base),
        cells.ratio,
    ),
    "late engine steps": (_mean("engine_late"), cells.mean),
    "late optimizer steps": (_mean("late"), cells.mean),
}


def table(worlds: Mapping[str, Sequence[Run]], columns: Columns) -> str:
    """A line for each arm that has a GRPO of the same seed beside it, in Markdown: means and 95 % intervals."""
    return cells.compare("world: arm (seeds)", {f"{world}: ": own for world, own in worlds.items()}, columns, ARMS)


FIXED = {"as it is": 0.0, "half of the rest fixed": 0.5, "all of the rest fixed": 1.0}


def rest_table(runs: Sequence[Run]) -> str:
    """The speed-up to GRPO's reward if a part of what a step costs beside its rollout were the same for all arms."""
    rows = []
    for arm in ("darts (paper)", DEFAULT):
        pairs = cells.pairs_of(runs, arm)
        rows.append([arm, *(cells.ratio([speedup_with(share, *pair) for pair in pairs]) for share in FIXED.values())])
    return cells.table(["arm", *FIXED], rows)


def speedup_with(fixed: float, own: Run, base: Run) -> float:
    """The speed-up to GRPO's reward if a share of the rest of GRPO's mean step were fixed."""
    usual = float((base["seconds"] - base["rollout"]).mean())
    mine, theirs = (
        {**run, "seconds": run["rollout"] + fixed * usual + (1 - fixed) * (run["seconds"] - run["rollout"])}
        for run in (own, base)
    )
    return seconds_to_reward(mine, theirs)


def draw(runs: Sequence[Run]) -> Any:
    """Plain sampling's reward against seconds, and its p99 against steps: each seed's line."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    arms = cells.arms_of(runs)
    for run in runs:
        is_first = run is next(own for own in runs if own["arm"] == run["arm"])
        look = {"color": f"C{arms.index(run['arm'])}", "linewidth": 1.1, "label": run["arm"] if is_first else None}
        left.plot(run["seconds"].cumsum(), run["reward"], **look)
        right.plot(np.arange(1, len(run["p99"]) + 1), run["p99"], **look)
    left.set(xlabel="seconds", ylabel="reward of plain sampling")
    right.set(xlabel="step", ylabel="p99 of lengths", ylim=(0, LIMIT))
    left.legend(frameon=False, fontsize=8)
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def tables(results: Path) -> str:
    """Returns the tables, and draws the picture."""
    worlds = runs_of(results)
    if "tail" in worlds:
        folder = ROOT / "benchmarks" if results == RESULTS else results
        save_picture(lambda: draw(worlds["tail"]), folder / PICTURE, dpi=110)
    return "\n\n".join(table(worlds, columns) for columns in (SPEED, SPENT, LEARNED, ROWS))


SEEDS = range(5)
BENCHMARK = Benchmark(
    "training",
    __doc__,
    {"world": list(WORLDS), "seed": SEEDS, "arm": list(ARMS)},
    run,
    tables,
    options={"steps": 0},
    quick={"world": ["tail"], "arm": [BASELINE, DEFAULT], "steps": 2},
    file=file_of,
    named=("world", "seed", "arm"),
    facts=facts,
    baseline=BASELINE,
    exists=lambda run: run["arm"] in WORLDS[run["world"]].arms,
)

if __name__ == "__main__":
    main(BENCHMARK)
