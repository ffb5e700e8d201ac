"""
Draws the timelines of README and docs as SVGs in `docs/figures`, on a light card, always the same from the same data.

    python -m benchmarks.pictures           # draws all
    python -m benchmarks.pictures record    # records `one_rollout` again, in minutes

- one_rollout.svg: one rollout of GRPO over one of the default, of the same prompts and weights: 8 prompts × 8 rows of
  SmolLM2-135M's answers, with the lengths that it wrote, on a real vLLM server at a GPU's pace (`pacing.py`, 4 times
  slower than Llama-3.1-8B). Drawn by the report's own code from `results/one_rollout.parquet`: two epochs of 8 steps,
  whose steps take turns. The rollout is the one whose speed-up is nearest to the median of all steps. The default is
  that of engines in the trainer's process, with `long_end_every=4`.
- lengths.svg: of the same run, what the model writes (GRPO's candidates) and what the default trains on.
- schedules_NAME.svg: two steps of each schedule with the same eight prompts, in virtual time, by the trainer's own
  scheduler, in the third epoch, when lengths are known.
- schedules_synchronous.svg, schedules_rollout_ahead.svg, schedules_continuous.svg: servers and trainer of
  `schedule="grpo"`, in virtual time.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.lines import RESULTS, ROOT
from benchmarks.schedules import PACED, Replay, Row, server_of, train
from benchmarks.smollm2_rollouts import MACHINES, Recorded, read_lengths
from trl_darts.analysis.colors import GREY, INK, MUTED, color_of
from trl_darts.analysis.report import charts, tables
from trl_darts.analysis.report.runs import outcomes
from trl_darts.analysis.simulation import (
    LLAMA_8B_NIM,
    ClusterSpec,
    LogNormalLengths,
    SimulatedTraining,
    Workload,
)
from trl_darts.scheduling import GroupSummary, RolloutResult, ScheduleSettings


FIGURES = ROOT / "docs" / "figures"
RECORDED = RESULTS / "one_rollout.parquet"
BATCHES, EPOCHS = 8, 2  # that are recorded
DEFAULT = {"schedule": "darts", "long_end_every": 4}
NAMES = {"grpo": "GRPO", "darts": "DARTS, the default"}

PROMPTS, ROWS, MOST = 4, 4, 6  # of a step; most candidates of a prompt
SHOWN = (4, 5)  # the steps of the third epoch
SCHEDULES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "darts": {"max_num_generations": MOST, "long_end_every": 4},
    "tail_batching": {},
    "partial_rollout": {"prompt_oversampling": 2},
    "sorted": {"sorted_group_batches": 2},
}
TITLES = {
    "grpo": "grpo: a step waits for its longest answer",
    "darts": "darts: spare answers, the slowest are stopped",
    "tail_batching": "tail_batching: the slowest prompts run later",
    "partial_rollout": "partial_rollout: unfinished answers go on",
    "sorted": "sorted: the first to finish train first",
}
AHEAD: dict[str, Any] = {"synchronous": 0, "rollout_ahead": 1, "continuous": "continuous"}
TITLES |= {"synchronous": "rollout_ahead=0", "rollout_ahead": "rollout_ahead=1"}
TITLES |= {"continuous": 'rollout_ahead="continuous"'}


class Recording:
    """Keeps the rollouts of a [`SimulatedTraining`], on servers or in virtual time."""

    results: list[RolloutResult]

    def learn_shape(self, result: RolloutResult, lengths: Any) -> None:
        self.results = [*getattr(self, "results", ()), result]
        super().learn_shape(result, lengths)  # type: ignore[misc]


class VirtualTraining(Recording, SimulatedTraining):
    """A training in virtual time, whose rollouts are kept."""


class ServedTraining(Recording, Replay):
    """The same on a server."""


def candidates_of(results: Sequence[RolloutResult], keeps_tokens: bool = False) -> pd.DataFrame:
    """Returns a row for each candidate of each rollout, in the columns of a trace that a picture needs."""
    rows = [
        (step, own.prompt_key, index, own.lengths[index], index in own.selected, reason, carried, *own.times[index])
        for step, result in enumerate(results, start=1)
        for carried, groups in ((False, result.groups), (keeps_tokens, result.deferred))
        for own in map(GroupSummary.of, groups)
        for index, reason in enumerate(own.finish_reasons)
    ]
    names = ["step", "prompt_key", "candidate", "length", "selected", "finish_reason", "carried_over"]
    table = pd.DataFrame(rows, columns=[*names, "start_seconds", "end_seconds"])
    return table.assign(outcome=outcomes(table))


# One rollout


def record() -> None:
    """Runs GRPO and the default step by step in turn, on a real server at a GPU's pace."""
    machine = MACHINES["cpu"]
    lines = read_lengths(RESULTS / machine.lengths)[: BATCHES * machine.prompts]
    size: Any = Recorded(lines, machine.prompts, machine.rows, machine.limit)
    rows = {"grpo": Row("grpo", {"schedule": "grpo"}), "darts": Row("darts", DEFAULT)}
    with server_of(PACED, None, size) as (server, spec):
        replays = {name: ServedTraining(row, size, spec, server) for name, row in rows.items()}
        train([*replays.values()], EPOCHS * BATCHES)
    table = pd.concat([candidates_of(own.results).assign(run=name) for name, own in replays.items()])
    starts = table.groupby(["run", "step"])["start_seconds"].transform("min")
    for name in ("start_seconds", "end_seconds"):
        table[name] = (table[name] - starts).round(4).astype("float32")
    table["prompt_key"] = table["prompt_key"].astype("int32")
    table.reset_index(drop=True).to_parquet(RECORDED, compression="zstd")
    print(speedups(table).describe())


def speedups(recorded: pd.DataFrame) -> pd.Series:
    """Returns GRPO's seconds over the default's, by step."""
    seconds = recorded.groupby(["step", "run"])["end_seconds"].max().unstack()
    return seconds["grpo"] / seconds["darts"]


def typical(recorded: pd.DataFrame) -> int:
    """Returns the step whose speed-up is nearest to the median."""
    ratios = speedups(recorded)
    return int((ratios - ratios.median()).abs().idxmin())


def one_rollout(recorded: pd.DataFrame) -> str:
    """Draws the same step of both runs."""
    own = recorded[recorded["step"] == typical(recorded)]
    seconds, draws = float(own["end_seconds"].max()), []
    for place, (run, name) in enumerate(NAMES.items()):
        rollout = own[own["run"] == run]
        title = f"{name}: {len(rollout)} answers, {rollout['selected'].sum()} trained on"
        lanes = tables.lanes(rollout)
        draws.append(partial(charts.candidates, title=title, color=f"C{place}", lanes=lanes, seconds=seconds))
    looks = ("trained on", "discarded", "idle")
    return charts.svg(draws, list(NAMES), "one_rollout", 4.6, looks=looks, background="white")


def lengths(recorded: pd.DataFrame) -> str:
    """Draws the lengths of GRPO's candidates and of the default's rows."""
    pool, kept = recorded[recorded["run"] == "grpo"], recorded[(recorded["run"] == "darts") & recorded["selected"]]
    edges = tables.length_edges(int(pool["length"].max()), num_bins=24)
    shares = tables.length_shares(pd.concat([pool.assign(selected=False), kept.assign(carried_over=True)]), edges)

    def draw(axes: Any) -> None:
        title = f"% of answers. Area: all, mean {pool['length'].mean():.0f} tokens.\n"
        title += f"Line: trained on, mean {kept['length'].mean():.0f} tokens"
        charts.distribution(axes, title, 0, shares, edges, float(shares.max().max()))

    return charts.svg([draw], ["darts"], "lengths", 3.0, background="white")


# Schedules


def two_steps(name: str) -> pd.DataFrame:
    """Returns the candidates of two steps of a schedule, with seconds from the first one's start."""
    model = LogNormalLengths(2 * PROMPTS, 400.0, 0.5, 0.6, seed=3)
    settings = ScheduleSettings(name, num_generations=ROWS, **SCHEDULES[name])
    slots = PROMPTS * ROWS if name == "sorted" else None
    cluster = ClusterSpec(LLAMA_8B_NIM, max_num_seqs=slots)
    training = VirtualTraining(Workload(model, PROMPTS, 4000), settings, cluster, seed=1)
    training.run(SHOWN[-1] + 1)
    table = candidates_of(training.results, settings.keeps_tokens)
    table = table[table["step"].isin([step + 1 for step in SHOWN])]
    ends = table.groupby("step")["end_seconds"].max()
    later = table["step"].map(ends.cumsum() - ends)
    return table.assign(
        begin=table["start_seconds"] + later,
        end=table["end_seconds"] + later,
        lane=table["prompt_key"] * (MOST + 1) + table["candidate"],
    )


def draw_steps(axes: Any, name: str, table: pd.DataFrame, seconds: float) -> None:
    """Draws the candidates of each prompt under each other, and a line at the end of each step."""
    charts.spans(axes, table, color_of(name) or GREY)
    ends = table.groupby("step")["end"].max()
    height = 2 * PROMPTS * (MOST + 1)
    for place, end in enumerate(ends, start=1):
        axes.plot([end, end], [-1.5, height - 1], color=MUTED, linewidth=1)
        text = f"step {place}, {end:.0f} s"
        axes.text(end - 0.01 * seconds, -2, text, ha="right", va="bottom", color=INK, fontsize=10)
    middles = [prompt * (MOST + 1) + (MOST - 1) / 2 for prompt in range(2 * PROMPTS)]
    axes.set_yticks(middles, [f"prompt {letter}" for letter in "ABCDEFGH"[: 2 * PROMPTS]])
    axes.tick_params(axis="y", length=0)
    axes.set(title=TITLES[name] + "\n", xlabel="seconds", xlim=(0, 1.02 * seconds), ylim=(height - 1, -2))
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)


def schedules() -> Iterator[tuple[str, str]]:
    """Yields name and picture of each schedule, over the same seconds."""
    found = {name: two_steps(name) for name in SCHEDULES}
    seconds = max(table["end"].max() for table in found.values())
    for name, table in found.items():
        draw = partial(draw_steps, name=name, table=table, seconds=seconds)
        looks = ("trained on", "discarded")
        yield name, charts.svg([draw], [name], name, 3.4, looks=looks, background="white")


# Servers and trainer


@dataclass(frozen=True)
class Overlap:
    """Seconds at which rollouts' candidates began and ended, by step, and at which the trainer trained on them."""

    candidates: pd.DataFrame
    training: list[tuple[float, float]]


def overlap(ahead: Any) -> Overlap:
    """Trains in virtual time."""
    model = LogNormalLengths(64, 400.0, 0.5, 0.6, seed=3)
    settings = ScheduleSettings("grpo", num_generations=8, rollout_ahead=ahead)
    workload = Workload(model, 8, 4000, train_seconds_per_token=1.4e-4)
    training = VirtualTraining(workload, settings, ClusterSpec(LLAMA_8B_NIM), seed=1)
    trained: list[tuple[float, float]] = []
    begins, free = [], 0.0
    for step in islice(training.optimizer_steps(), 24):
        if step.waited_seconds is not None:  # its candidates have the trainer's clock
            begins.append(0.0)
            start = free + step.waited_seconds
        else:
            begins.append(trained[-1][0] if trained and ahead else free)
            start = max(begins[-1] + step.occupancy.seconds, free)
        free = start + workload.train_seconds([length for length, _ in step.kept])
        trained.append((start, free))
    table = candidates_of(training.results)
    later = table["step"].map(dict(enumerate(begins, start=1)))
    times = {"begin": table["start_seconds"] + later, "end": table["end_seconds"] + later}
    return Overlap(table.assign(**times), trained)


def draw_overlap(axes: Any, title: str, own: Overlap, seconds: float) -> None:
    """Draws the running candidates of each step in the upper row, and the trainer in the lower one."""
    times = np.linspace(0, seconds, 300)
    running = {
        step: ((group["begin"].to_numpy() <= times[:, None]) & (times[:, None] < group["end"].to_numpy())).sum(axis=1)
        for step, group in own.candidates.groupby("step")
    }
    bottom, most = np.zeros(len(times)), max(sum(running.values()))
    for step, count in running.items():
        height = count / most
        look = charts.STRONG if step % 2 else charts.FAINT
        area = {"where": count > 0, "color": GREY, "alpha": look, "linewidth": 0}
        axes.fill_between(times, 1.2 + bottom, 1.2 + bottom + height, **area)
        bottom = bottom + height
    for step, (start, end) in enumerate(own.training, start=1):
        if start < seconds:
            look = charts.STRONG if step % 2 else charts.FAINT
            axes.barh(0.4, end - start, 0.7, start, color=GREY, alpha=look, linewidth=0)
            ink = "white" if step % 2 else INK
            number = str(step) if end - start > 0.03 * seconds else ""
            axes.text((start + end) / 2, 0.4, number, ha="center", va="center", color=ink, clip_on=True)
    axes.set_yticks([0.4, 1.7], ["trainer", "servers"])
    axes.tick_params(axis="y", length=0)
    axes.set(title=title, xlabel="seconds", xlim=(0, seconds), ylim=(0, 2.3))
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)


def overlaps() -> Iterator[tuple[str, str]]:
    """Yields name and picture of each way to overlap rollouts and training, over the same seconds."""
    found = {name: overlap(ahead) for name, ahead in AHEAD.items()}
    seconds = found["synchronous"].training[4][1]
    for name, own in found.items():
        done = sum(end <= seconds for _, end in own.training)
        title = f"{TITLES[name]}: {done} steps in {seconds:.0f} s"
        draw = partial(draw_overlap, title=title, own=own, seconds=seconds)
        yield name, charts.svg([draw], [name], name, 2.0, background="white")


def pictures() -> dict[str, str]:
    """Returns all pictures by their file's name."""
    recorded = pd.read_parquet(RECORDED)
    found = {"one_rollout": one_rollout(recorded), "lengths": lengths(recorded)}
    found |= {f"schedules_{name}": picture for part in (schedules, overlaps) for name, picture in part()}
    return {f"{name}.svg": picture for name, picture in found.items()}


def main() -> None:
    """Draws, after recording if that is asked for."""
    if sys.argv[1:] == ["record"]:
        record()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    FIGURES.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FIGURES / name).write_text(picture)
        print(FIGURES / name)


if __name__ == "__main__":
    main()
