"""
What do rollouts that never end gain, and what does staleness cost?

    python -m benchmarks.continuous [--worlds published,needs_120] [--arms "grpo,grpo, continuous"] [--rates 1e-3]

The worlds and the virtual time are those of `learning.py`: the library's trainer, scheduler, buffer and optimizer, on
a chain whose answers decode by the published curve of an 8 B model. What a step takes beside its rollout is counted
per trained token, 30 % of a step of GRPO; a rollout without an end decodes meanwhile, and weight syncs are free. Each
sync changes the rest of every unfinished answer, whose tokens keep the log-probs that they were sampled with, and
TRL's importance sampling correction is on (`token_truncate`). Beside the rewards of plain sampling, computed exactly,
each arm's lag, effective sample size and length ratio are recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import cells
from benchmarks.cells import Columns, Run
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.learning import WORLDS, Recorder, Training, epoch_of
from benchmarks.lines import read
from benchmarks.speedups import reward_at_end, reward_difference, time_to_reward


CONTINUOUS = {"rollout_ahead": "continuous"}
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "unguarded": {},
    "grpo, ahead": {"schedule": "grpo", "rollout_ahead": 1},
    "darts, ahead": {"rollout_ahead": 1},
    "grpo, continuous": {"schedule": "grpo", **CONTINUOUS},
    "darts, continuous": CONTINUOUS,
    **{f"grpo, continuous, {s}": {"schedule": "grpo", **CONTINUOUS, "max_staleness": s} for s in (1, 2, 8)},
}
METRICS = {
    "lag": "darts/staleness/age_mean",
    "oldest": "darts/staleness/age_max",
    "sample": "darts/staleness/effective_sample_share",
    "kept_reward": "reward",
    "kept": "completions/mean_length",
}


class Clock(Recorder):
    """Records of each step when it ended, and what plain sampling would give after it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets the learning rate, which a checkpoint replaces by its own."""
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] = args.learning_rate
        kwargs["lr_scheduler"].base_lrs = [args.learning_rate] * len(kwargs["lr_scheduler"].base_lrs)

    def measured(self, metrics: Mapping[str, list[float]]) -> dict[str, float]:
        """What the clock and the log tell of a step."""
        engine = self.trainer._engine
        own = {name: float(metrics.get(key, [np.nan])[-1]) for name, key in METRICS.items()}
        return {"now": engine.now + engine._trains, **own}


def run(shared: Shared, world: str, seed: int, rate: float, arm: str, steps: int) -> dict[str, list[float]]:
    """Trains one arm."""
    own, fields = replace(WORLDS[world], steps=steps or WORLDS[world].steps), ARMS[arm]
    checkpoint, per_token = shared(epoch_of, own, seed)
    fields = {"vllm_importance_sampling_mode": "token_truncate", "learning_rate": rate, **fields}
    fields["vllm_importance_sampling_correction"] = bool(fields.get("rollout_ahead"))
    training = Training(own, seed, fields, 1 + list(ARMS).index(arm), per_token=per_token)
    with TemporaryDirectory() as directory:
        return training.run(checkpoint, Path(directory), Clock)[1].by_step()


def _known(name: str, value: Callable[[Any], Any], default: float) -> Callable[[Run, Run], float]:
    def of(own: Run, base: Run) -> float:
        known = np.array([step for step in own[name] if np.isfinite(step)])
        return float(value(known)) if len(known) else default

    return of


GAINED: Columns = {
    "speed-up": (time_to_reward, cells.ratio),
    "steps per second": (lambda own, base: base["now"][-1] / own["now"][-1], cells.ratio),
    "reward at the end": (reward_at_end, cells.mean),
    "minus GRPO's": (reward_difference, cells.mean),
}
STALE: Columns = {
    "kept ÷ plain length": (lambda own, base: float(np.divide(own["kept"], own["mean"]).mean()), cells.ratio),
    "mean lag": (_known("lag", np.mean, 0.0), cells.mean),
    "oldest": (_known("oldest", np.max, 0.0), cells.mean),
    "effective sample": (_known("sample", np.mean, 1.0), cells.mean),
}


def table(runs: Sequence[Run], columns: Columns) -> str:
    """A row per world, rate and arm, in Markdown: means over seeds with 95 % intervals."""
    keys = dict.fromkeys((run["world"], run["rate"]) for run in runs)
    cases = {
        f"{world}, {rate:g}: ": [run for run in runs if (run["world"], run["rate"]) == (world, rate)]
        for world, rate in keys
    }
    return cells.compare("world, learning rate: arm (seeds)", cases, columns, ARMS)


def tables(results: Path) -> str:
    """Returns both tables."""
    runs = read(results / "continuous.jsonl")
    return "\n\n".join(table(runs, columns) for columns in (GAINED, STALE))


BENCHMARK = Benchmark(
    "continuous",
    __doc__,
    {"world": list(WORLDS), "seed": range(5), "rate": (1e-3, 1e-2), "arm": list(ARMS)},
    run,
    tables,
    options={"steps": 0},
    usual={"world": ["published"]},
    quick={"steps": 2},
    baseline="grpo",
)

if __name__ == "__main__":
    main(BENCHMARK)
