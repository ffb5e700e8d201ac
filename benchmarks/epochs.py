"""
Ten passes over the same prompts: answers of the last pass that are verified, and prompts that taught nothing skipped.

    python -m benchmarks.epochs [--worlds tail,half] [--arms grpo,reuse] [--seeds 0,1,2,3,4] [--steps 40]

Task, engine and clock are those of `peers.py`: the chain of `long_tail.py`, 32 × 8 rows a step, a real vLLM server at
the pace of an 8 B model, and `--per-token` seconds of training for each token. The data have 128 prompts, four steps
a pass. Worlds: `tail` is the task; in `half`, all answers to half of the prompts are worth the same.

- grpo: each answer is decoded from its beginning, and each prompt is sampled in each pass.
- reuse: with `reuse_answers`, in `tail`.
- skip, informative, both: with `skip_uniform_prompts`, with `drop_uniform_groups`, and with both, in `half`.

The primary metric, named before any run, is the seconds until the exact reward of plain sampling is what GRPO has
after three quarters of its steps (same seed). The others: seconds of rollouts, verification included; tokens decoded;
the exact reward at the end, which is held out: it is computed from the model, over all kinds of prompts; the share of
different answers within a group, and the share that is not among those of the pass before.
"""

from collections import defaultdict
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import training_parts
from benchmarks.async_grpo import FileTransfer
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.long_tail import TOKENIZER, grade_reward, half_reward, load_model, make_dataset
from benchmarks.peers import PER_TOKEN, ROWS, Clock
from benchmarks.servers import make_trainer
from benchmarks.training import server_of, task_args


NUM_PROMPTS = 128
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reuse": {"reuse_answers": True},
    "skip": {"skip_uniform_prompts": True},
    "informative": {"drop_uniform_groups": True},
    "both": {"drop_uniform_groups": True, "skip_uniform_prompts": True},
}
WORLDS = {"tail": (grade_reward, ("grpo", "reuse")), "half": (half_reward, ("grpo", "skip", "informative", "both"))}
METRICS = {
    "rollout": "darts/rollout/seconds",
    "verification": "darts/reuse/seconds",
    "decoded": "darts/rollout/generated_tokens",
    "reused": "darts/reuse/reused_ratio",
    "unknown": "darts/reuse/unknown_ratio",
    "skipped": "darts/skip/skipped_ratio",
}


class Variety:
    """A reward that also counts how many answers of a group differ, from others and from those of the last pass."""

    __name__ = "reward"

    def __init__(self, reward: Any) -> None:
        self._reward = reward
        self._last: dict[str, set[str]] = {}
        self.distinct: list[float] = []
        self.new: list[float] = []

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        groups: dict[str, list[str]] = defaultdict(list)
        for prompt, completion in zip(prompts, completions, strict=True):
            groups[prompt].append(completion)
        for prompt, own in groups.items():
            self.distinct.append(len(set(own)) / len(own))
            if prompt in self._last:
                self.new.append(sum(text not in self._last[prompt] for text in own) / len(own))
            self._last[prompt] = set(own)
        rewards: list[float] = self._reward(prompts=prompts, completions=completions)
        return rewards


def run(shared: Shared, world: str, seed: int, arm: str, steps: int, per_token: float) -> dict[str, Any]:
    """Trains one arm."""
    server, reward = shared(server_of, "tail"), Variety(WORLDS[world][0])
    with TemporaryDirectory() as directory:
        FileTransfer(server.url, directory).load(server.start)
        args = task_args(server, directory, seed, steps, schedule="grpo", **ARMS[arm])
        trainer = make_trainer(load_model(server.start), reward, args, make_dataset(NUM_PROMPTS), TOKENIZER)
        clock = Clock(trainer, per_token)
        trainer.add_callback(clock)
        trainer.train()
        trainer.vllm_generation.engine.close()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    by_step = {name: [step[name] for step in clock.steps] for name in ("now", "reward", "mean", "trained")}
    by_step |= {name: [float(entry.get(metric, 0.0)) for entry in log] for name, metric in METRICS.items()}
    return {
        "seconds": by_step["now"][-1],
        "reward": by_step["reward"][-1],
        "rollouts": sum(by_step["rollout"]) + sum(by_step["verification"]),
        "decoded": sum(by_step["decoded"]),
        "kept_over_plain": sum(by_step["trained"]) / (steps * ROWS) / fmean(by_step["mean"]),
        "distinct": fmean(reward.distinct),
        "new": fmean(reward.new) if reward.new else 1.0,
        "by_step": by_step,
    }


BENCHMARK = Benchmark(
    "epochs",
    __doc__,
    {"world": list(WORLDS), "seed": range(5), "arm": list(ARMS)},
    run,
    training_parts.epochs,
    options={"steps": 40, "per_token": PER_TOKEN},
    quick={"steps": 5, "arm": ["grpo", "reuse", "skip"]},
    facts=lambda run: {"steps": run["steps"], "per_token": run["per_token"]},
    exists=lambda run: run["arm"] in WORLDS[run["world"]][1],
)

if __name__ == "__main__":
    main(BENCHMARK)
