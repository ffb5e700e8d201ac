"""
Ratios to GRPO, seed by seed or repeat by repeat, from the lines of `benchmarks/results`. GRPO's side of each ratio is
its run of the same seed or repeat. Nothing here imports torch, so that pages and figures take seconds.
"""

import json
import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from benchmarks.cells import Pairs, Run, geometric, pairs_of
from benchmarks.lines import RESULTS, latest, read


NEW, KNOWN = slice(0, 2), slice(2, None)  # steps of a repeat in which prompts are new, or their lengths are known


@cache
def lines_of(file: str) -> list[dict[str, Any]]:
    """Returns the lines of a raw file, or its only object."""
    path = RESULTS / file
    if not path.exists():
        raise FileNotFoundError(f"`file` ({file}) must be in {RESULTS}. Run the benchmark that writes it.")
    return read(path) if path.suffix == ".jsonl" else [json.loads(path.read_text())]


def _seeds(stem: str) -> list[dict[str, Any]]:
    return [lines_of(path.name)[0] for path in sorted(RESULTS.glob(f"{stem}.seed*.json"))]


def each(pairs: Pairs, value: Callable[[Run, Run], float]) -> list[float]:
    """Computes a value for each pair."""
    return [float(value(*pair)) for pair in pairs]


# Trainings in virtual time: learning.py and continuous.py


def learning(world: str, arm: str) -> Pairs:
    """Runs of benchmarks/learning.py, with the seconds of their steps."""
    return pairs_of([timed(run) for run in lines_of(f"learning.{world}.jsonl")], arm)


def timed(run: Run) -> Run:
    """A run of benchmarks/learning.py with the `seconds` of its steps, and their sum until `now`."""
    rollouts, trained = (np.array(run["by_step"][name]) for name in ("rollout", "trained"))
    seconds = rollouts + run["per_token"] * trained
    return {**run, **run["by_step"], "seconds": seconds, "now": seconds.cumsum()}


def continuous(arm: str) -> Pairs:
    """Runs of benchmarks/continuous.py in the world `published`, with learning.py's learning rate."""
    runs = lines_of("continuous.jsonl")
    return pairs_of([run for run in runs if (run["world"], run["rate"]) == ("published", 1e-3)], arm)


def time_to_reward(own: Run, base: Run, kinds: str = "hard") -> float:
    """
    GRPO's seconds until the lower of both best rewards of plain sampling, over the arm's. `kinds` are those of the
    prompts: `hard`, or `reward` for all.
    """
    curves = [np.array(run[kinds]) for run in (own, base)]
    target = min(curve.max() for curve in curves)
    mine, theirs = (run["now"][np.argmax(c >= target)] for run, c in zip((own, base), curves, strict=True))
    return float(theirs / mine)


def reward_at_end(own: Run, base: Run) -> float:
    """The reward of plain sampling after the last step."""
    return float(own["hard"][-1])


def reward_difference(own: Run, base: Run) -> float:
    """The same minus GRPO's, after as many steps."""
    return float(own["hard"][-1] - base["hard"][-1])


# Trainings on a real server at a GPU's pace: training.py


def training(world: str, arm: str) -> Pairs:
    """Runs of benchmarks/training.py."""
    runs = [
        {**run, **{name: np.array(values) for name, values in run["by_step"].items()}, "arm": own}
        for own in {arm, "grpo"}
        for run in _seeds(f"{world}.{own}")
    ]
    return pairs_of(runs, arm)


def seconds_to_reward(own: Run, base: Run) -> float:
    """GRPO's seconds until the reward that it has at its end, over the arm's, interpolated between steps."""
    return spent_to(base, base["reward"][-1], "seconds") / spent_to(own, base["reward"][-1], "seconds")


def spent_to(steps: Run, reward: float, name: str) -> float:
    """Sum of `seconds`, `tokens` or `steps` until plain sampling has a reward; infinite where it never does."""
    spent = steps.get(name, np.ones_like(steps["reward"])).cumsum()
    if steps["reward"].max() < reward:
        return math.inf
    place = int(np.argmax(steps["reward"] >= reward))
    if place == 0:
        return float(spent[0])
    return float(np.interp(reward, steps["reward"][place - 1 : place + 1], spent[place - 1 : place + 1]))


# SmolLM2: smollm2.py and smollm2_rollouts.py


def smollm2(machine: str, arm: str) -> Pairs:
    """Trainings of SmolLM2-135M, by `machine`: `smollm2.gpu` or `smollm2`."""
    return pairs_of([run for own in {arm, "grpo"} for run in _seeds(f"{machine}.{own}")], arm)


def speed_of(*names: str) -> Callable[[Run, Run], float]:
    """GRPO's mean of the sum of some metrics over the arm's, over as many steps."""
    return lambda own, base: mean_of(_first(base, own), *names) / mean_of(_first(own, base), *names)


def step_with_equal_syncs(own: Run, base: Run) -> float:
    """The speed-up of a step, if weight syncs had taken GRPO's time."""
    sync = mean_of(base, "darts/sync/seconds") - mean_of(own, "darts/sync/seconds")
    return mean_of(base, "step_seconds") / (mean_of(own, "step_seconds") + sync)


def mean_of(run: Run, *names: str) -> float:
    """The mean over steps of the sum of some metrics."""
    return float(np.mean([sum(step.get(name, 0.0) for name in names) for step in run["steps"]]))


def _first(run: Run, other: Run) -> Run:
    return {**run, "steps": run["steps"][: len(other["steps"])]}


def accuracy_difference(own: Run, base: Run) -> float:
    """Held-out accuracy of plain sampling at the end, minus GRPO's."""
    mine, theirs = ([*run["held_out"].values()][-1]["accuracy"] for run in (own, base))
    return float(mine - theirs)


def rollouts(pace: str, schedule: str, epoch: slice = KNOWN) -> list[float]:
    """GRPO's seconds of rollouts of recorded lengths over a schedule's, by repeat."""
    lines = [own["rows"] for own in lines_of("smollm2.rollouts.jsonl") if own["pace"] == pace]
    seconds = [
        [sum(rows[name]["seconds"][epoch]) for name in ("grpo", schedule)] for rows in lines if schedule in rows
    ]
    return [base / own for base, own in seconds]


def agreement() -> list[tuple[str, str, slice, float, float]]:
    """
    Returns pace, schedule, epoch, and the speed-ups on the server and in virtual time: geometric means over the
    repeats that both have.
    """
    found = []
    for pace, epoch in product(("paced", "bare"), (NEW, KNOWN)):
        for schedule in _schedules():
            real = rollouts(pace, schedule, epoch)
            virtual = rollouts(f"{pace}, simulated", schedule, epoch)[: len(real)]
            found.append((pace, schedule, epoch, geometric(real)[0], geometric(virtual)[0]))
    return found


def _schedules() -> list[str]:
    names = (name for line in lines_of("smollm2.rollouts.jsonl") if line["pace"] == "paced" for name in line["rows"])
    return [name for name in dict.fromkeys(names) if name != "grpo"]


# In simulation: simulator.py


def simulated(part: str, key: str, **fields: Any) -> list[float]:
    """The speed-ups in the last line of a part with these fields."""
    own = latest(lines_of("simulator.jsonl"), part=part, **fields)
    if not own:
        raise ValueError(f"`fields` ({fields}) must be those of a line of simulator.jsonl. Run the part {part!r}.")
    return list(own[()]["speedups"][key])


def until_target(run: Run, with_syncs: bool = True) -> float:
    """Returns the seconds until a run of peers.py has its target, infinite if it never has."""
    if run["seconds_to_target"] is None:
        return math.inf
    syncs = zip(run["by_step"]["now"], run["by_step"]["sync"], strict=True)
    spent = sum(seconds for now, seconds in syncs if now <= run["seconds_to_target"])
    return float(run["seconds_to_target"] - (0.0 if with_syncs else spent))


def to_reward(own: Run, base: Run) -> float:
    """How many times as early an arm has the reward that the baseline has after three quarters of its steps."""
    rewards = base["by_step"]["reward"]
    target = rewards[3 * len(rewards) // 4 - 1]

    def seconds(run: Run) -> float:
        steps = zip(run["by_step"]["now"], run["by_step"]["reward"], strict=True)
        return next((now for now, reward in steps if reward >= target), math.nan)

    return float(seconds(base) / seconds(own))
