"""Table and picture of `schedule_rewards.py`, from the files that it has written."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl_darts.analysis.plots import save_picture, smooth
from trl_darts.errors import ConfigurationError


LAST = 20  # steps that count as the end of a training
WINDOW = 10  # steps that the picture takes the mean of

# Those of the picture's upper and lower panels. "grpo" is in both.
FAMILIES = {
    "candidates": (
        "darts (paper)",
        "darts, patience 2",
        "darts, patience auto",
        "darts, auto, bubbles filled",
        "uniform, auto",
    ),
    "prompts": (
        "tail batching",
        "tail batching, dual-end, auto",
        "partial rollout",
        "sorted, on-policy",
        "sorted, partial",
    ),
}
COLORS = {
    "candidates": ("C1", "C2", "C3", "C4", "C5"),
    "prompts": ("C6", "C7", "C8", "C9", "C10"),
}
BASELINE, BASELINE_COLOR = "grpo", "C0"
# Of axes: where candidates are called off, their lengths are lower bounds.
ALL_CANDIDATES = "all candidates\n(aborted ones: what they had)"


Answers = Sequence[tuple[int, float]]  # lengths and rewards


@dataclass(frozen=True)
class Run:
    """One training. Arrays have one entry per step."""

    seed: int
    accuracy: float
    reward: np.ndarray  # for right answers, without penalties
    seconds: np.ndarray  # of rollouts
    step_seconds: np.ndarray  # of whole steps
    # Of all candidates, aborted ones with what they had; NaN in steps without a rollout.
    length: np.ndarray  # mean
    p99: np.ndarray
    off_policy: np.ndarray
    decoded: np.ndarray
    critical: np.ndarray
    held_out: Mapping[str, Mapping[str, Answers]]  # by difficulty and family

    @classmethod
    def load(cls, outcome: Mapping[str, Any]) -> "Run":
        """From a file's content."""
        steps = {entry["step"]: entry for entry in outcome["log_history"] if "reward" in entry}
        rollouts = {entry["step"]: entry for entry in outcome["rollouts"]}
        numbers = range(1, outcome["steps"] + 1)

        def logged(name: str, otherwise: float) -> np.ndarray:
            return np.array([steps[number].get(name, otherwise) for number in numbers])

        def counted(name: str) -> np.ndarray:
            return np.array([rollouts.get(number, {}).get(name, 0) for number in numbers])

        return cls(
            seed=outcome["seed"],
            accuracy=outcome["accuracy"],
            reward=logged("rewards/accuracy_reward/mean", math.nan),
            seconds=logged("darts/rollout/seconds", 0.0),
            step_seconds=logged("step_time", math.nan),
            length=logged("darts/pool/length_mean", math.nan),
            p99=logged("darts/pool/length_p99", math.nan),
            off_policy=logged("darts/staleness/off_policy_share", 0.0),
            decoded=counted("decoded"),
            critical=counted("critical"),
            held_out=outcome.get("held_out", {}),
        )

    @property
    def final_reward(self) -> float:
        """Mean of the last steps."""
        return float(self.reward[-LAST:].mean())

    def reaches(self, reward: float, cost: np.ndarray) -> float:
        """What it has cost when the mean reward of `LAST` steps is first as high as `reward`; NaN if it never is."""
        means = np.array(smooth(self.reward.tolist(), LAST))[LAST - 1 :]
        reached = np.flatnonzero(means >= reward - 1e-9)
        return float(cost.cumsum()[LAST - 1 + reached[0]]) if len(reached) else math.nan


Runs = Mapping[str, Sequence[Run]]  # by row, one for each seed


def load_runs(results: Path, names: Sequence[str], family: str | None = None) -> dict[str, list[Run]]:
    """
    The trainings of a folder on one family of prompts, or on both, by row in the order of `names`. Rows without one
    are left out.

    Raises:
        [`ConfigurationError`]: If there are none, or their numbers of steps or learning rates differ.
    """
    outcomes = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    kinds = {(outcome["steps"], outcome["learning_rate"]) for outcome in outcomes}
    if len(kinds) != 1:
        raise ConfigurationError(
            f"`results` ({results}) must hold trainings of one kind, and holds {len(kinds) or 'none'}. "
            + ("Name another folder, or move those that don't belong." if kinds else "Name another, or train first.")
        )
    own = [outcome for outcome in outcomes if outcome.get("family") == family]
    runs = {name: [Run.load(outcome) for outcome in own if outcome["row"] == name] for name in names}
    return {name: found for name, found in runs.items() if found}


def table(runs: Runs) -> str:
    """The table, in Markdown."""
    baseline = {run.seed: run for run in runs.get(BASELINE, ())}
    columns = (
        "schedule",
        "reward at the end",
        "held-out accuracy",
        "rollouts (s)",
        f"÷ {BASELINE}",
        "tokens decoded (k)",
        "waited for (k tokens)",
        f"÷ {BASELINE}",
        "p99 length at the end",
        "off-policy",
        f"s until {BASELINE}'s reward",
    )
    lines = [columns, ("---", *["---:"] * (len(columns) - 1))]
    lines += [_line(name, own, baseline) for name, own in runs.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(name: str, own: Sequence[Run], baseline: Mapping[int, Run]) -> tuple[str, ...]:
    seconds = [run.seconds.sum() for run in own]
    critical = [run.critical.sum() for run in own]
    pairs = [(run, baseline[run.seed]) for run in own if run.seed in baseline]
    reached = [run.reaches(other.final_reward, run.seconds) for run, other in pairs]
    there = [value for value in reached if not math.isnan(value)]
    return (
        name,
        mean_and_error([run.final_reward for run in own], "{:.3f}"),
        mean_and_error([run.accuracy for run in own], "{:.3f}"),
        f"{statistics.median(seconds):.1f}",
        median_ratio(pairs, lambda run: run.seconds.sum()),
        f"{statistics.median([run.decoded.sum() for run in own]) / 1e3:.0f}",
        f"{statistics.median(critical) / 1e3:.1f}",
        median_ratio(pairs, lambda run: run.critical.sum()),
        mean_and_error([np.nanmean(run.p99[-LAST:]) for run in own], "{:.0f}"),
        f"{statistics.fmean([_off_policy(run) for run in own]):.0%}",
        f"{statistics.median(there):.1f} ({len(there)} of {len(reached)})" if there else f"– (0 of {len(reached)})",
    )


def _off_policy(run: Run) -> float:
    """Share of tokens trained on; steps count alike."""
    return float(run.off_policy.mean())


def mean_and_error(values: Sequence[float], form: str) -> str:
    """With its standard error, where there are several."""
    words = form.format(statistics.fmean(values))
    if len(values) > 1:
        words += " ± " + form.replace("+", "").format(statistics.stdev(values) / math.sqrt(len(values)))
    return words


def median_ratio(pairs: Sequence[tuple[Run, Run]], cost: Callable[[Run], float]) -> str:
    ratios = [cost(run) / cost(other) for run, other in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios else "–"


def draw(runs: Runs, path: Path) -> None:
    """Reward against rollout time and against steps, and p99 of lengths; one row of panels for each family."""
    save_picture(lambda: _panels(runs), path, dpi=130)


def _panels(runs: Runs) -> Any:
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(14, 8), layout="constrained", sharex="col", sharey="col")
    for (family, names), axes in zip(FAMILIES.items(), panels, strict=True):
        colors = {BASELINE: BASELINE_COLOR, **dict(zip(names, COLORS[family], strict=True))}
        for name in filter(runs.__contains__, colors):
            own = runs[name]
            rewards = [smooth(run.reward.tolist(), WINDOW) for run in own]
            seconds = np.mean([run.seconds.cumsum() for run in own], axis=0)
            for panel, x, values in zip(
                axes, (seconds, None, None), (rewards, rewards, [smooth_known(run.p99) for run in own]), strict=True
            ):
                draw_mean(panel, values, name, colors[name], x)
        axes[0].set_title(f"Schedules that choose {family}", loc="left", fontsize=11)
        axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    for axes in panels:
        axes[0].set(ylabel=f"reward (mean of {WINDOW} steps)")
        axes[1].set(ylabel="reward")
        axes[2].set(ylabel=f"p99 length of {ALL_CANDIDATES}")
        plain_log(axes[2].yaxis)
        for panel in axes:
            style(panel)
    for panel, label in zip(panels[-1], ("seconds of rollouts", "step", "step"), strict=True):
        panel.set_xlabel(label)
    figure.suptitle(caption(max(len(own) for own in runs.values())), fontsize=10)
    return figure


def caption(seeds: int) -> str:
    """What the lines of [`draw_mean`] are."""
    return f"Means over {seeds} seeds; bands: standard error" if seeds > 1 else "One seed"


def draw_mean(
    panel: Any, values: Sequence[Sequence[float]], name: str, color: str, x: np.ndarray | None = None
) -> None:
    """
    A line with a band of one standard error.

    Args:
        panel (`matplotlib.axes.Axes`):
            Where.
        values (`Sequence[Sequence[float]]` of shape `(seeds, steps)`):
            What the mean is taken of.
        name (`str`):
            In the legend.
        color (`str`):
            Of both.
        x (`np.ndarray` of shape `(steps,)`, *optional*):
            The numbers of the steps by default.
    """
    rows = np.array(values)
    x = np.arange(1, rows.shape[1] + 1) if x is None else x
    mean = rows.mean(0)
    panel.plot(x, mean, color=color, label=name, linewidth=1.6, zorder=3 if name == BASELINE else 2)
    if len(rows) > 1:
        error = rows.std(0, ddof=1) / math.sqrt(len(rows))
        panel.fill_between(x, mean - error, mean + error, color=color, alpha=0.13, linewidth=0)


def style(panel: Any) -> None:
    """A grid, no frame, and the numbers of all axes."""
    panel.grid()
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelbottom=True)


def plain_log(axis: Any) -> None:
    """A logarithmic axis with whole numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_formatter("{x:.0f}")
    axis.set_minor_formatter("{x:.0f}")


def smooth_known(values: np.ndarray) -> list[float]:
    """Trailing mean that leaves out what is not known; NaN where nothing is."""
    windows = (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    return [float(np.nanmean(part)) if not np.isnan(part).all() else math.nan for part in windows]
