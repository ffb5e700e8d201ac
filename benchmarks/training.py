"""
The evidence for shaped rollouts, on two cores: what each way to over-provision makes of the same trainings.

    python benchmarks/training.py [--quick] [--rows schedules]

The tiny reasoner of examples/tiny_reasoner is trained from its checkpoint on a real vLLM server on CPU, with equal
numbers of prompts and the same prompts for all rows of a seed: TRL's GRPO, DARTS as in its paper, with other ratios of
long and short rows, with bounded waits, and the alternatives that the paper argues against. Each seed goes through all
rows before the next one begins, so that a machine that others use disturbs all of them alike. Then the same on one
family of prompts at a time: where long answers are mostly wrong ("sum"), and where short ones are ("chain").

Each training leaves a JSON file in `--results`, and a benchmark that was interrupted goes on where it stopped. At the
end, and with `--only-page`, the tables and pictures of docs/evidence.md are written anew from what is there; the words
around them are not. A set of trainings that is not the full one leaves its page and pictures in `--results`.

`--rows schedules` trains under the rows of `schedules.py` instead, and prints the table of docs/schedules.md.
"""

import argparse
import gc
import json
import logging
import math
import re
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from heapq import heapreplace
from itertools import product
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"))

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt
from measure import sample
from rich.console import Console
from task import accuracy_reward, make_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from transformers.utils.logging import disable_progress_bar
from trl.rewards import get_soft_overlong_punishment

from benchmarks.schedules import ROWS as SCHEDULE_ROWS
from benchmarks.schedules import Row
from benchmarks.servers import training_args
from benchmarks.vllm_server import start_vllm_server
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.plots import save_picture, smooth
from trl_darts.errors import ConfigurationError
from trl_darts.telemetry.traces import read_traces


ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "examples" / "tiny_reasoner" / "checkpoint"
PAGE = ROOT / "docs" / "evidence.md"
PROMPTS, NUM_GENERATIONS = 8, 8  # of a step
TRAIN_PROMPTS, TEST_PROMPTS, TEST_GENERATIONS = 128, 128, 4  # 16 steps per epoch
MAX_COMPLETION_LENGTH = 256
LEARNING_RATE = 2e-4
ROOM = 256  # sequences of the server whose slots are not what limits
DIFFICULTIES, FAMILIES = ("easy", "hard"), ("sum", "chain")
LAST, EARLY, WINDOW = 20, 40, 10  # steps: the end of a training, those with a tail, what the pictures average over

BASELINE, PAPER, AUTO = "grpo", "darts (paper)", "darts, patience auto"
PENALIZED = "grpo, length penalty"
# An aggressive one: half of all answers are longer than the 16 tokens at which it begins; it is 1 from 48 on.
PENALTY = get_soft_overlong_punishment(max_completion_len=48, soft_punish_cache=32)


def _darts(name: str, long_end_patience: float | str | None = None, **settings: object) -> Row:
    return Row(name, {"schedule": "darts", "long_end_patience": long_end_patience, **settings})


ROWS = [
    Row(BASELINE, {"schedule": "grpo"}),
    Row(PENALIZED, {"schedule": "grpo"}),
    _darts(PAPER),  # L : K is 1 : 7
    _darts("darts, L : K 2 : 6", num_longest=2),
    _darts("darts, L : K 4 : 4", num_longest=4),
    _darts("shortest only", num_longest=0),
    # 1.5 · M candidates of every prompt, and all of them are waited for.
    _darts("uniform redundancy", max_num_generations=12, tail_pruning=False),
    _darts("darts, patience 2", 2.0),
    _darts(AUTO, "auto"),
    _darts("uniform selection, auto", "auto", selection="uniform"),
]
SHOWN = (BASELINE, PAPER, AUTO)  # of trainings on one family, and of answers
PANELS = {
    "How long is waited": (BASELINE, PAPER, "darts, patience 2", AUTO, "uniform selection, auto"),
    "What is kept, and other ways": (
        *(BASELINE, PENALIZED, "darts, L : K 2 : 6", "darts, L : K 4 : 4"),
        *("shortest only", "uniform redundancy"),
    ),
}

Answers = Sequence[tuple[int, float]]  # lengths and rewards
HeldOut = Mapping[str, Mapping[str, Answers]]  # by difficulty and family


# Trainings


@dataclass(frozen=True)
class Training:
    """What one training is: its row, the seed of prompts, weights and samples, its steps, and its family, or both."""

    row: Row
    seed: int
    steps: int
    family: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What its results say of it."""
        facts = {"row": self.row.name, "settings": dict(self.row.settings), "family": self.family, "seed": self.seed}
        return facts | {"steps": self.steps, "learning_rate": LEARNING_RATE}

    def file(self, results: Path) -> Path:
        """Where its results are, or will be."""
        words = [self.row.name, self.family or ""]
        slug = "_".join(re.sub("[^a-z0-9]+", "_", word).strip("_") for word in words if word)
        return results / f"{slug}.seed{self.seed}.json"


def run_missing(trainings: Sequence[Training], results: Path) -> None:
    """Runs those that have no file yet."""
    results.mkdir(parents=True, exist_ok=True)
    todo = [training for training in trainings if not training.file(results).exists()]
    with servers({training.row.capped for training in todo}) as urls:
        for number, training in enumerate(todo, 1):
            Console().print(f"{time.strftime('%H:%M:%S')} {number} of {len(todo)}: {training.file(results).name}")
            write(training.file(results), train(training, urls[training.row.capped]))
            gc.collect()


@contextmanager
def servers(kinds: set[bool]) -> Iterator[dict[bool, str]]:
    """Addresses of servers of the tiny reasoner: with room for all, and (`True`) with room for N × M."""
    slots = {False: ROOM, True: PROMPTS * NUM_GENERATIONS}
    with ExitStack() as stack:
        options = {"max_model_len": 2 * MAX_COMPLETION_LENGTH}
        started = {kind: start_vllm_server(CHECKPOINT, max_num_seqs=slots[kind], **options) for kind in kinds}
        yield {kind: stack.enter_context(server).base_url for kind, server in started.items()}


def write(path: Path, outcome: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(outcome))
    part.rename(path)


def train(training: Training, url: str) -> dict[str, Any]:
    """One training, and what the model then makes of prompts that it was never trained on."""
    with tempfile.TemporaryDirectory() as directory:
        args = training_args(
            url,
            directory,
            num_generations=NUM_GENERATIONS,
            per_device_train_batch_size=PROMPTS * NUM_GENERATIONS,
            max_completion_length=MAX_COMPLETION_LENGTH,
            max_steps=training.steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            save_rollout_trace=True,
            seed=training.seed,
            **training.row.settings,
        )
        trainer = DARTSGRPOTrainer(
            str(CHECKPOINT),
            reward_funcs=[accuracy_reward, PENALTY] if training.row.name == PENALIZED else accuracy_reward,
            args=args,
            train_dataset=make_dataset(TRAIN_PROMPTS, training.seed, training.family),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.vllm_generation.engine.close()
        traces, _ = read_traces(Path(directory))
    slots = PROMPTS * NUM_GENERATIONS if training.row.capped else None
    steps = steps_of(trainer.state.log_history, traces, training.steps, slots)
    return {**training.facts, "by_step": steps, "held_out": evaluate(trainer.model, trainer.processing_class)}


def steps_of(
    log_history: Sequence[Mapping[str, Any]], traces: pd.DataFrame, num_steps: int, slots: int | None
) -> dict[str, list[float]]:
    """
    What each step was like. Steps without a rollout have waited for nothing, and their lengths are not known.

    The lengths are of all candidates, aborted ones with what they had. `decoded` and `waited` are what a rollout would
    also have cost on a machine without noise; tokens of an earlier rollout don't count.
    """
    logged = {entry["step"]: entry for entry in log_history if "reward" in entry}
    names = {  # the metric, and its value in a step without it
        "reward": ("rewards/accuracy_reward/mean", math.nan),  # for right answers, without penalties
        "seconds": ("darts/rollout/seconds", 0.0),
        "step_seconds": ("step_time", math.nan),
        "length": ("darts/pool/length_mean", math.nan),
        "p99": ("darts/pool/length_p99", math.nan),
        "off_policy": ("darts/staleness/off_policy_share", 0.0),
    }
    numbers = range(1, num_steps + 1)
    steps = {name: [logged[n].get(metric, other) for n in numbers] for name, (metric, other) in names.items()}
    work = (traces["length"] - traces["num_carried_tokens"]).groupby(traces["step"]).agg(list).to_dict()
    steps["decoded"] = [sum(work.get(n, [])) for n in numbers]
    steps["waited"] = [waited_for(work.get(n, []), slots) for n in numbers]
    return steps


def waited_for(work: Sequence[int], slots: int | None = None) -> int:
    """
    How many tokens, one after the other, a rollout takes whose candidates are decoded for so many tokens each. With
    `slots`, no more are decoded at once: the first one in the queue takes the first slot that is free.
    """
    ends = [0] * (slots or max(1, len(work)))
    for tokens in work:
        heapreplace(ends, ends[0] + tokens)
    return max(ends)


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, dict[str, list[Any]]]:
    """Length and reward of each answer to held-out prompts, by difficulty and family."""
    torch.manual_seed(0)
    found: dict[str, dict[str, list[Any]]] = {kind: {family: [] for family in FAMILIES} for kind in DIFFICULTIES}
    for difficulty in DIFFICULTIES:
        prompts = make_dataset(TEST_PROMPTS, 0, difficulty=difficulty, split="test")
        samples = sample(model.eval(), tokenizer, prompts, TEST_GENERATIONS, MAX_COMPLETION_LENGTH)
        for family, lengths, rewards in zip(prompts["family"], samples.lengths, samples.rewards, strict=True):
            found[difficulty][family] += zip(lengths.tolist(), rewards.tolist(), strict=True)
    return found


# What came of them


@dataclass(frozen=True)
class Run:
    """What one training came to; `steps` has a row for each."""

    seed: int
    steps: pd.DataFrame
    held_out: HeldOut
    family: str | None = None

    @classmethod
    def load(cls, training: Training, results: Path) -> "Run":
        """
        Of a training that has ended.

        Raises:
            [`ConfigurationError`]: If its file is another training's.
        """
        path = training.file(results)
        found = json.loads(path.read_text())
        for name, asked in training.facts.items():
            if found.get(name) != asked:
                raise ConfigurationError(
                    f"`--results` ({results}) holds {path.name} with {name} {found.get(name)}, and {asked} is asked "
                    "for. Ask for what is there, name another folder, or empty this one."
                )
        return cls(training.seed, pd.DataFrame(found["by_step"]), found["held_out"], training.family)

    def right(self, difficulty: str) -> float:
        """Share of right answers to held-out prompts of its family, or of both."""
        families = [self.family] if self.family else FAMILIES
        return statistics.fmean(reward for family in families for _, reward in self.held_out[difficulty][family])


Runs = dict[str, list[Run]]  # by row, one for each seed


def load_groups(trainings: Sequence[Training], results: Path) -> dict[str, Runs]:
    """Those that have ended, by kind of prompts (`"both"`, or a family) and row."""
    groups: dict[str, Runs] = {}
    for training in trainings:
        if training.file(results).exists():
            runs = groups.setdefault(training.family or "both", {})
            runs.setdefault(training.row.name, []).append(Run.load(training, results))
    return groups


@dataclass(frozen=True)
class Column:
    """A value of each run, beside the baseline's run of the same seed; `own` stands where they are the same."""

    form: str
    value: Callable[[Run, Run], float]
    own: str | None = None  # of those that compare with the baseline


def _ratio(name: str, first: int = 0, last: int | None = None) -> Column:
    def value(run: Run, base: Run) -> float:
        cost = base.steps[name][first:last].sum()
        return float(run.steps[name][first:last].sum() / cost) if cost else math.nan

    return Column("{:.2f}", value, "1")


LEARNED = {
    "reward at the end": Column("{:.3f}", lambda run, base: run.steps["reward"][-LAST:].mean()),
    "held-out": Column("{:.3f}", lambda run, base: run.right("easy")),
    "harder": Column("{:.3f}", lambda run, base: run.right("hard")),
}
HARDER = {f"harder − {BASELINE}": Column("{:+.3f}", lambda run, base: run.right("hard") - base.right("hard"), "–")}
COSTS = {f"seconds ÷ {BASELINE}": _ratio("step_seconds"), f"tokens decoded ÷ {BASELINE}": _ratio("decoded")}
WAITS = {
    f"waited for ÷ {BASELINE}": _ratio("waited"),
    f"… in the first {EARLY} steps": _ratio("waited", 0, EARLY),
    "… after them": _ratio("waited", EARLY),
}
STALE = {"off-policy": Column("{:.2f}", lambda run, base: run.steps["off_policy"].mean())}


def table(kinds: Mapping[str, Runs], columns: Mapping[str, Column], label: str | None = None) -> str:
    """A line for each row of each kind of prompts, in Markdown; `label` heads a column with the kind."""
    lines = []
    for kind, runs in kinds.items():
        baseline = {run.seed: run for run in runs.get(BASELINE, ())}
        for name, own in runs.items():
            cells = [_cell(column, own, baseline) for column in columns.values()]
            lines.append([*([f"`{kind}`"] if label else []), name, *cells])
    return _markdown([*([label] if label else []), "method", *columns], lines, words=2 if label else 1)


def _cell(column: Column, own: Sequence[Run], baseline: Mapping[int, Run]) -> str:
    if column.own is None:
        return mean_and_error([column.value(run, run) for run in own], column.form)
    pairs = [(run, baseline[run.seed]) for run in own if run.seed in baseline]
    if pairs and all(run is base for run, base in pairs):
        return column.own
    return mean_and_error([column.value(run, base) for run, base in pairs], column.form)


def answer_table(before: HeldOut, runs: Runs) -> str:
    """Lengths of right and wrong answers to held-out prompts, before and after."""
    lines = []
    for family in FAMILIES if runs else ():
        models = {"before": [before["easy"][family]]}
        models |= {name: [run.held_out["easy"][family] for run in runs[name]] for name in SHOWN if name in runs}
        for name, answers in models.items():
            stats = zip(*(_stats(own) for own in answers), strict=True)
            forms = ("{:.3f}", "{:.1f}", "{:.1f}", "{:.0f}")
            cells = [mean_and_error(list(values), form) for values, form in zip(stats, forms, strict=True)]
            lines.append([f"`{family}`", name, *cells])
    return _markdown(["prompts", "model", "right", "mean length if right", "if wrong", "p99 of all"], lines, words=2)


def _stats(answers: Answers) -> list[float]:
    lengths, rewards = np.array(answers).T
    right = rewards == 1.0
    means = [float(lengths[chosen].mean()) if chosen.any() else math.nan for chosen in (right, ~right)]
    return [float(right.mean()), *means, float(np.percentile(lengths, 99))]


def mean_and_error(values: Sequence[float], form: str) -> str:
    """With its standard error, where there are several."""
    if not values or math.isnan(statistics.fmean(values)):
        return "–"
    text = form.format(statistics.fmean(values))
    if len(values) > 1:
        text += " ± " + form.replace("+", "").format(statistics.stdev(values) / math.sqrt(len(values)))
    return text


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    if not lines:
        return "Not among these trainings."
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


# The page


def write_page(groups: Mapping[str, Runs], before: HeldOut, template: Path, page: Path) -> None:
    """Writes the page, and its pictures beside it. Where trainings are missing, it says so, and has no picture."""
    both = groups.get("both", {})
    families = {kind: runs for kind, runs in groups.items() if kind != "both"}
    save_picture(lambda: draw_waits(groups), page.parent / "evidence_waits.png", dpi=110)
    if both:
        save_picture(lambda: draw_training(both, PANELS), page.parent / "evidence_training.png", dpi=110)
        save_picture(lambda: draw_answers(before, both), page.parent / "evidence_answers.png", dpi=110)
    tables = {
        "extent": extent(groups),
        "training": table({"both": both}, LEARNED | HARDER | COSTS | WAITS),
        "families": table(families, LEARNED | WAITS, "prompts"),
        "answers": answer_table(before, both),
    }
    text = template.read_text()
    for name, content in tables.items():
        text = put(text, name, content)
    page.write_text(text)


def put(text: str, name: str, content: str) -> str:
    """The text with `content` between the marks of this name."""
    begin, end = f"<!-- {name}: written by benchmarks/training.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"The page must have one pair of the marks {begin!r} and {end!r}.")
    return pattern.sub(lambda _: f"{begin}\n\n{content}\n\n{end}", text)


def extent(groups: Mapping[str, Runs]) -> str:
    """How much was run."""
    rows = [own for runs in groups.values() for own in runs.values()]
    few, many = min(map(len, rows)), max(map(len, rows))
    seeds = f"{few} to {many} seeds" if few < many else f"{many} {'seeds' if many > 1 else 'seed'}"
    return f"{sum(map(len, rows))} trainings of {len(rows[0][0].steps)} steps, {seeds} each."


def draw_training(runs: Runs, panels: Mapping[str, Sequence[str]]) -> Any:
    """Reward against steps and against time, mean and p99 of lengths; a row of panels for each question."""
    figure, grid = plt.subplots(
        len(panels), 4, figsize=(17, 4 * len(panels)), layout="constrained", sharex="col", sharey="col", squeeze=False
    )
    for axes, (title, names) in zip(grid, panels.items(), strict=True):
        for name in filter(runs.__contains__, names):
            seconds = np.mean([run.steps["step_seconds"].cumsum() for run in runs[name]], axis=0)
            for panel, column, x in zip(
                axes, ("reward", "reward", "length", "p99"), (None, seconds, None, None), strict=True
            ):
                draw_mean(panel, runs, name, column, x)
        axes[0].set_title(title, loc="left", fontsize=11)
        axes[0].legend(frameon=False, fontsize=8, loc="lower right")
        axes[0].set(ylabel=f"right answers (mean of {WINDOW} steps)")
        axes[2].set(ylabel="mean length of all candidates\n(aborted ones: what they had)")
        axes[3].set(ylabel="p99 length", yscale="log")
    for panel, label in zip(grid[-1], ("step", "seconds of whole steps", "step", "step"), strict=True):
        panel.set_xlabel(label)
    return _finished(figure, f"Means over {max(map(len, runs.values()))} seeds; bands: standard error")


def draw_waits(groups: Mapping[str, Runs]) -> Any:
    """Tokens that each step waited for, one panel for each kind of prompts."""
    figure, (panels,) = plt.subplots(
        1, len(groups), figsize=(14, 4.2), layout="constrained", sharey=True, squeeze=False
    )
    for panel, (kind, runs) in zip(panels, groups.items(), strict=True):
        for name in filter(runs.__contains__, (*SHOWN, "darts, patience 2")):
            draw_mean(panel, runs, name, "waited")
        panel.set_title(f"prompts: {kind}", loc="left", fontsize=11)
        panel.set(xlabel="step")
    panels[0].set(ylabel=f"tokens waited for (mean of {WINDOW} steps)")
    panels[0].legend(frameon=False, fontsize=8)
    return _finished(figure, "Means over seeds; bands: standard error")


def draw_answers(before: HeldOut, runs: Runs) -> Any:
    """Lengths of right and wrong answers to held-out prompts; a row of panels for each family."""
    models: dict[str, dict[str, list[Any]]] = {"before": {f: list(before["easy"][f]) for f in FAMILIES}}
    for name in filter(runs.__contains__, SHOWN):
        models[name] = {f: [answer for run in runs[name] for answer in run.held_out["easy"][f]] for f in FAMILIES}
    size = (3.6 * len(models), 6)
    figure, grid = plt.subplots(2, len(models), figsize=size, layout="constrained", sharex=True, sharey="row")
    for (row, family), (column, name) in product(enumerate(FAMILIES), enumerate(models)):
        panel = grid[row][column]
        lengths, rewards = np.array(models[name][family]).T
        for label, color, chosen in (("right", "C1", rewards == 1.0), ("wrong", "C2", rewards != 1.0)):
            weights = np.full(chosen.sum(), 1 / len(lengths))
            panel.hist(lengths[chosen], np.geomspace(2, 257, 29), weights=weights, color=color, alpha=0.5, label=label)
            if chosen.any():
                panel.axvline(lengths[chosen].mean(), color=color, linestyle="--", linewidth=1.2)
        panel.set_title(f"{family}: {name}", loc="left", fontsize=11)
        panel.set(xlabel="length (tokens)", ylabel="share of answers", xscale="log")
        panel.label_outer()
    grid[0][0].legend(frameon=False, fontsize=8)
    return _finished(figure, "Answers to held-out prompts. Dashed: mean length")


def draw_mean(panel: Any, runs: Runs, name: str, column: str, x: np.ndarray | None = None) -> None:
    """A row's line, smoothed, with a band of one standard error; against the numbers of the steps by default."""
    known = (run.steps[column].ffill() for run in runs[name])  # a step without a rollout has no lengths
    values = np.array([smooth(own.tolist(), WINDOW) for own in known])  # (seeds, steps)
    x = np.arange(1, values.shape[1] + 1) if x is None else x
    color, mean = f"C{list(runs).index(name)}", values.mean(0)
    panel.plot(x, mean, color=color, label=name, linewidth=1.6, zorder=3 if name == BASELINE else 2)
    if len(values) > 1:
        error = values.std(0, ddof=1) / math.sqrt(len(values))
        panel.fill_between(x, mean - error, mean + error, color=color, alpha=0.13, linewidth=0)


def _finished(figure: Any, title: str) -> Any:
    for panel in figure.axes:
        panel.grid()
        panel.spines[["top", "right"]].set_visible(False)
        for axis in (panel.xaxis, panel.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter("{x:.0f}")
                axis.set_minor_formatter("")
    figure.suptitle(title, fontsize=10)
    return figure


# The command


def trainings_of(options: argparse.Namespace) -> list[Training]:
    """All of them, seed by seed."""
    names = (BASELINE, PENALIZED, AUTO) if options.quick else [row.name for row in ROWS]
    kinds: list[tuple[Row, str | None]] = [(row, None) for row in ROWS if row.name in names]
    one_family = [row for row in ROWS if row.name in SHOWN and row.name in names]
    kinds += [(row, family) for family in FAMILIES for row in one_family]
    if options.rows == "schedules":
        kinds = [(row, None) for row in (SCHEDULE_ROWS[:1] + SCHEDULE_ROWS[-2:] if options.quick else SCHEDULE_ROWS)]
    return [Training(row, seed, options.steps, family) for seed in range(options.seeds) for row, family in kinds]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=("evidence", "schedules"), default="evidence", help="what is compared")
    parser.add_argument("--quick", action="store_true", help="few and short trainings: does it run?")
    parser.add_argument("--steps", type=int, help="of each training (default: 100; 10 if quick)")
    parser.add_argument("--seeds", type=int, help="default: 3; 1 if quick")
    parser.add_argument("--results", type=Path, help="default: outputs/<rows>, with -quick if quick")
    parser.add_argument("--only-page", action="store_true", help="train nothing: page and pictures of what is there")
    options = parser.parse_args(arguments)
    options.steps = (10 if options.quick else 100) if options.steps is None else options.steps
    options.seeds = (1 if options.quick else 3) if options.seeds is None else options.seeds
    for name in ("steps", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} ({getattr(options, name)}) must be at least 1.")
    # Not the same one: a short training would be taken for one that is finished.
    options.results = options.results or Path(f"outputs/{options.rows}{'-quick' if options.quick else ''}")
    return options


def page_of(options: argparse.Namespace) -> Path:
    """Where the page goes: to docs/ if all of the published trainings are there, or beside the results."""
    full = parse([])
    complete = all(training.file(options.results).exists() for training in trainings_of(full))
    published = complete and not options.quick and (options.steps, options.seeds) == (full.steps, full.seeds)
    return PAGE if published else options.results / PAGE.name


def main() -> None:
    """Trains what is missing, and writes tables and pictures."""
    options = parse()
    trainings = trainings_of(options)
    try:
        load_groups(trainings, options.results)  # others than those asked for are refused before hours of training
    except ConfigurationError as error:
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if not options.only_page:
        run_missing(trainings, options.results)
    groups = load_groups(trainings, options.results)
    if not groups:
        sys.exit(
            f"error: `--results` ({options.results}) holds none of these trainings. Name another, or train first."
        )
    if options.rows == "schedules":
        print(table(groups, LEARNED | COSTS | WAITS | STALE))
        panels = {"Schedules": list(groups["both"])}
        save_picture(lambda: draw_training(groups["both"], panels), options.results / "schedule_rewards.png", dpi=110)
        return
    before = options.results / "before.checkpoint"  # not one of the trainings
    if not before.exists():
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        write(before, evaluate(model, AutoTokenizer.from_pretrained(CHECKPOINT)))
    page = page_of(options)
    write_page(groups, json.loads(before.read_text()), PAGE, page)
    print(f"page: {page}")


if __name__ == "__main__":
    main()
