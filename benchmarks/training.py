"""
The evidence for shaped rollouts, on two cores at a GPU's pace: how long each way takes to the same reward.

    python benchmarks/training.py [--quick] [--seeds 0,1] [--arms grpo,default] [--worlds tail,equal,full,half]

Each seed begins with one epoch of GRPO on the task of `long_tail.py`. From its checkpoint, which also knows the
prompts' lengths, each arm trains with the same prompts in the same order: for as many steps as GRPO, and on until
plain sampling has GRPO's reward at its end. vLLM is real, and follows the published curve of an 8 B model, four times
as slow (`pacing.py`). What a step takes beside its rollout is paced too, per token that is trained on: 30 % of a step
of GRPO, as in the paper. A seed goes through all arms before the next one begins.

Worlds: `tail` is the task. Two controls have GRPO and the default alone: in `equal` all answers are equally long, so
nothing can be gained, and in `full` the engine decodes a sixteenth of a batch at once, so further candidates queue. In
`half`, all answers to half of the prompts are worth the same, and GRPO is compared with dynamic sampling.

Each training leaves a file of some kilobytes in `--results`, and a later call runs those that are missing: all take
some three hours. Then, and with `--only-tables`, the tables are printed and the picture of
benchmarks/REPORT.md is drawn.
"""

import argparse
import json
import logging
import math
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib import pyplot as plt
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from benchmarks import cells
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
from benchmarks.servers import training_args
from benchmarks.speedups import spent_to
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.plots import save_picture
from trl_darts.callbacks import ADMISSION_FILE


ROOT = Path(__file__).resolve().parents[1]
PICTURE = "training.png"
PROMPTS, NUM_GENERATIONS = 32, 8  # of a step
EPOCH = 8  # steps
PATIENCE = 1.5  # the others get so many times as many to reach its reward
LEARNING_RATE = 1e-3
ROLLOUT_SHARE = 0.7  # of a step of GRPO, in the paper
LAST = 10  # steps: the end of a training

BASELINE, DEFAULT = "grpo", "default"
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"schedule": "grpo"},
    "darts (paper)": {"schedule": "darts", "long_end_patience": None},
    DEFAULT: {"schedule": "darts"},
    "long end every 4": {"schedule": "darts", "long_end_every": 4},
    "long end every 8": {"schedule": "darts", "long_end_every": 8},
    "tail batching": {"schedule": "tail_batching"},
    "partial rollout": {"schedule": "partial_rollout"},
    "default, ahead": {"schedule": "darts", "rollout_ahead": 1},
    "ahead, uncorrected": {
        "schedule": "darts",
        "rollout_ahead": 1,
        "vllm_importance_sampling_correction": False,
    },
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


@dataclass(frozen=True)
class Training:
    """What one training is. The arm `None` is the epoch that the others go on from."""

    world: str
    seed: int
    steps: int
    arm: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What its results say of it."""
        return asdict(self) | {"settings": ARMS[self.arm] if self.arm else {}, "learning_rate": LEARNING_RATE}

    def file(self, results: Path) -> Path:
        """Where its results are, or will be."""
        return (
            results / f"{self.world}.{re.sub('[^a-z0-9]+', '_', self.arm or 'shared').strip('_')}.seed{self.seed}.json"
        )

    def load(self, results: Path) -> dict[str, Any]:
        """What it came to."""
        path = self.file(results)
        found: dict[str, Any] = json.loads(path.read_text())
        for name, asked in self.facts.items():
            if found.get(name) != asked:
                sys.exit(
                    f"error: `--results` ({results}) holds {path.name} with {name} {found.get(name)}, and {asked} is "
                    "asked for. Ask for what is there, name another folder, or remove that file."
                )
        return found


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


def train(
    training: Training,
    url: str,
    pace: Callable[[], Pace],
    start: Path,
    output_dir: Path,
    seconds_per_token: float = 0.0,
    target: float = math.inf,
) -> dict[str, list[float]]:
    """One training, from a checkpoint of the task, or of a trainer. What each of its steps was like."""
    shared = training.arm is None
    steps = EPOCH if shared else EPOCH + math.ceil(training.steps * (1 if training.arm == BASELINE else PATIENCE))
    args = training_args(
        url,
        output_dir,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=PROMPTS * NUM_GENERATIONS,
        max_completion_length=LIMIT,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        seed=training.seed,
        save_strategy="steps" if shared else "no",
        save_steps=EPOCH,
        **(ARMS[training.arm] if training.arm else SHARED),
    )
    trainer = DARTSGRPOTrainer(
        load_model(start),
        WORLDS[training.world].reward,
        args,
        make_dataset(PROMPTS * EPOCH),
        processing_class=TOKENIZER,
    )
    trainer.remove_callback(PrinterCallback)
    paced = PacedSteps(trainer, pace, seconds_per_token, (target, training.steps))
    trainer.add_callback(paced)
    trainer.train(resume_from_checkpoint=None if shared else str(start))
    trainer.vllm_generation.engine.close()
    logs = {entry["step"]: entry for entry in trainer.state.log_history if "reward" in entry}
    first = trainer.state.global_step - len(paced.steps) + 1
    each = [
        own | {name: logs[first + place].get(metric, math.nan) for name, metric in METRICS.items()}
        for place, own in enumerate(paced.steps)
    ]
    return {name: [float(f"{step[name]:.5g}") for step in each] for name in each[0]}


def run_missing(trainings: Sequence[Training], results: Path) -> None:
    """Runs those that have no file yet, world by world and seed by seed."""
    results.mkdir(parents=True, exist_ok=True)
    for world in dict.fromkeys(training.world for training in trainings):
        todo = [own for own in trainings if own.world == world and not own.file(results).exists()]
        if not todo:
            continue
        with tempfile.TemporaryDirectory() as directory:
            start = make_checkpoint(Path(directory) / "start", equal=world == "equal")
            curve, slots = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES), WORLDS[world].slots
            with paced_server(start, curve, max_num_seqs=slots, max_model_len=2 * LIMIT) as (server, pace):
                for seed in dict.fromkeys(own.seed for own in todo):
                    own = [training for training in todo if training.seed == seed]
                    run_seed(own, results, start, server.base_url, pace)


def run_seed(todo: Sequence[Training], results: Path, start: Path, url: str, pace: Callable[[], Pace]) -> None:
    """The shared epoch, and what goes on from it. GRPO comes first: its reward is what the others train for."""
    shared = Training(todo[0].world, todo[0].seed, todo[0].steps)
    checkpoint = ROOT / "outputs" / f"{results.name}.{shared.file(results).stem}" / f"checkpoint-{EPOCH}"
    if not (checkpoint.exists() and shared.file(results).exists()):  # else this seed was interrupted
        steps = train(shared, url, pace, start, checkpoint.parent)
        (checkpoint / ADMISSION_FILE).unlink()  # of another schedule's admission; the lengths stay
        write(shared, results, {"by_step": steps})
    epoch = shared.load(results)["by_step"]
    seconds_per_token = (1 / ROLLOUT_SHARE - 1) * sum(epoch["rollout"][1:]) / sum(epoch["trained"][1:])
    for training in todo:
        print(f"{time.strftime('%H:%M:%S')} {training.file(results).name}", end=" ", flush=True)
        grpo = Training(training.world, training.seed, training.steps, BASELINE)
        target = math.inf if training == grpo else grpo.load(results)["by_step"]["reward"][-1]
        before = pace()
        with tempfile.TemporaryDirectory() as output_dir:
            steps = train(training, url, pace, checkpoint, Path(output_dir), seconds_per_token, target)
        print(f"{sum(steps['seconds']):.0f} s, {pace().since(before)}")
        write(training, results, {"by_step": steps})


def write(training: Training, results: Path, outcome: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    path = training.file(results)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(training.facts | outcome))
    part.rename(path)


# What came of them

Steps = Mapping[str, np.ndarray]
Runs = dict[str, dict[int, Steps]]  # by arm and seed


def load(trainings: Sequence[Training], results: Path) -> dict[str, Runs]:
    """Those that have ended, by world."""
    worlds: dict[str, Runs] = {}
    for training in trainings:
        if training.file(results).exists():
            steps = {name: np.array(values) for name, values in training.load(results)["by_step"].items()}
            worlds.setdefault(training.world, {}).setdefault(str(training.arm), {})[training.seed] = steps
    return worlds


def _to_equal_reward(name: str) -> Callable[[Steps, Steps], float]:
    """What GRPO spends to the reward that it has at its end, over what this arm does."""
    return lambda own, base: spent_to(base, base["reward"][-1], name) / spent_to(own, base["reward"][-1], name)


def _ratio(name: str) -> Callable[[Steps, Steps], float]:
    """GRPO's sum over as many steps, over this arm's."""
    return lambda own, base: float(base[name].sum() / own[name][: len(base[name])].sum())


def _end(name: str) -> Callable[[Steps, Steps], float]:
    """The mean over the last steps of as many as GRPO has."""
    return lambda own, base: _known_mean(own[name][: len(base[name])][-LAST:])


def _mean(name: str) -> Callable[[Steps, Steps], float]:
    return lambda own, base: _known_mean(own[name][: len(base[name])])


def _known_mean(values: np.ndarray) -> float:
    """The mean of what a schedule logs, NaN where it logs nothing."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


Columns = Mapping[str, Callable[[Steps, Steps], float]]
SPEED: Columns = {
    "to GRPO's reward": _to_equal_reward("seconds"),
    "steps": _ratio("seconds"),
    "rollouts": _ratio("rollout"),
    "seconds per step": _mean("seconds"),
}
SPENT: Columns = {
    "to it, in steps": _to_equal_reward("steps"),
    "to it, in tokens": _to_equal_reward("tokens"),
    "tokens of as many steps": lambda own, base: 1 / _ratio("tokens")(own, base),
    "off-policy": _mean("off_policy"),
}
LEARNED: Columns = {
    "plain sampling": lambda own, base: float(own["reward"][: len(base["reward"])][-1]),
    "p99": _end("p99"),
    "if wrong": _end("mean_wrong"),
    "gradient norm": _mean("grad_norm"),
}
ROWS: Columns = {
    "kept ÷ plain length": lambda own, base: _mean("kept_length")(own, base) / _mean("mean")(own, base),
    "late engine steps": _mean("engine_late"),
    "late optimizer steps": _mean("late"),
}
RATIOS = {*list(SPEED)[:3], *list(SPENT)[:3], *list(ROWS)[:1]}


def table(worlds: Mapping[str, Runs], columns: Columns) -> str:
    """A line for each arm that has a GRPO of the same seed beside it, in Markdown: means and 95 % intervals."""
    rows = []
    for world, runs in worlds.items():
        bases = runs.get(BASELINE, {})
        for arm, own in runs.items():
            pairs = [(own[seed], bases[seed]) for seed in own if seed in bases]
            rows.append(
                [f"{world}: {arm} ({len(pairs)})", *(_cell(name, own, pairs) for name, own in columns.items())]
            )
    return cells.table(["world: arm (seeds)", *columns], rows)


def _cell(name: str, value: Callable[[Steps, Steps], float], pairs: Sequence[tuple[Steps, Steps]]) -> str:
    known = [found for pair in pairs if math.isfinite(found := value(*pair))]
    return cells.ratio(known) if name in RATIOS else cells.mean(known)


FIXED = {"as it is": 0.0, "half of the rest fixed": 0.5, "all of the rest fixed": 1.0}


def rest_table(runs: Runs) -> str:
    """The speed-up to GRPO's reward if a part of what a step costs beside its rollout were the same for all arms."""
    rows = []
    for arm in ("darts (paper)", DEFAULT):
        speedups = [
            cells.ratio([speedup_with(share, own, runs[BASELINE][seed]) for seed, own in runs[arm].items()])
            for share in FIXED.values()
        ]
        rows.append([arm, *speedups])
    return cells.table(["arm", *FIXED], rows)


def speedup_with(fixed: float, own: Steps, base: Steps) -> float:
    """The speed-up to GRPO's reward if a share of the rest of GRPO's mean step were fixed."""
    usual = float((base["seconds"] - base["rollout"]).mean())
    mine, theirs = (
        {**run, "seconds": run["rollout"] + fixed * usual + (1 - fixed) * (run["seconds"] - run["rollout"])}
        for run in (own, base)
    )
    return _to_equal_reward("seconds")(mine, theirs)


def draw(runs: Runs) -> Any:
    """Plain sampling's reward against seconds, and its p99 against steps: each seed's line."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    for number, (arm, own) in enumerate(runs.items()):
        for place, steps in enumerate(own.values()):
            look = {"color": f"C{number}", "linewidth": 1.1, "label": None if place else arm}
            left.plot(steps["seconds"].cumsum(), steps["reward"], **look)
            right.plot(np.arange(1, len(steps["p99"]) + 1), steps["p99"], **look)
    left.set(xlabel="seconds", ylabel="reward of plain sampling")
    right.set(xlabel="step", ylabel="p99 of lengths", ylim=(0, LIMIT))
    left.legend(frameon=False, fontsize=8)
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


# The command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--seeds", type=split, default=list("01234"), help="some of them, with commas")
    parser.add_argument("--arms", type=split, default=list(ARMS), help=f"some of them; {BASELINE} always runs")
    parser.add_argument("--worlds", type=split, default=list(WORLDS), help="some of them")
    parser.add_argument("--quick", action="store_true", help="two steps, one seed: does it run?")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results; outputs/quick if quick")
    parser.add_argument(
        "--only-tables", action="store_true", help="train nothing: tables and picture of what is there"
    )
    options = parser.parse_args(arguments)
    for name, known in {"arms": ARMS, "worlds": WORLDS}.items():
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name} ({', '.join(sorted(unknown))}) must be some of {', '.join(known)}.")
    if not all(seed.isdecimal() for seed in options.seeds):
        parser.error(f"--seeds ({','.join(options.seeds)}) must be numbers with commas between them.")
    options.results = options.results or (Path("outputs/quick") if options.quick else ROOT / "benchmarks" / "results")
    return options


def trainings_of(options: argparse.Namespace) -> list[Training]:
    """World by world, seed by seed, GRPO first."""
    seeds = [int(seed) for seed in (options.seeds[:1] if options.quick else options.seeds)]
    return [
        Training(world, seed, 2 if options.quick else WORLDS[world].steps, arm)
        for world, seed in product(options.worlds, seeds)
        for arm in WORLDS[world].arms
        if arm in {BASELINE, *options.arms}
    ]


def main() -> None:
    """Trains what is missing, prints the tables and draws the picture."""
    options = parse()
    trainings = trainings_of(options)
    load(trainings, options.results)  # others than those asked for are refused before hours of training
    for name in ("transformers", "trl_darts"):  # the latter says with each arm that its admission begins anew
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if not options.only_tables:
        run_missing(trainings, options.results)
    worlds = load(trainings if options.quick else trainings_of(parse([])), options.results)  # also of earlier calls
    for columns in (SPEED, SPENT, LEARNED, ROWS):
        print(table(worlds, columns), end="\n\n")
    if "tail" in worlds:
        folder = options.results if options.quick else ROOT / "benchmarks"
        save_picture(lambda: draw(worlds["tail"]), folder / PICTURE, dpi=110)


if __name__ == "__main__":
    main()
