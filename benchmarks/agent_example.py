"""
The agent of `examples/agent`: reward against seconds with TRL's loop, with each conversation by itself, and with spare
candidates.

    python -m benchmarks.agent_example [--arms lockstep,grpo,default] [--seeds 0,1,2,3,4] [--steps 20]

Model, tools, data and settings are the example's, on a real vLLM server without a pace. Its tools take milliseconds,
so that this is a case in which running conversations apart saves little. The arms are those of `agents.py`.

The primary metric, named before any run, is the seconds until the mean reward of five steps is 0.7. The others: all
seconds, and the accuracy on 128 held-out questions before and after.
"""

import sys
from importlib import import_module
from itertools import accumulate
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PrinterCallback

from benchmarks import training_parts
from benchmarks.agents import take_lockstep
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.lines import ROOT
from benchmarks.servers import StepSeconds
from benchmarks.vllm_server import start_vllm_server


EXAMPLE = ROOT / "examples" / "agent"
SCHEDULES = {"lockstep": "grpo", "grpo": "grpo", "default": "darts"}
GOAL, SMOOTH = 0.7, 5  # reward, over steps


def seconds_to_goal(rewards: list[float], seconds: list[float]) -> float:
    """Returns the seconds of the steps until the reward is there, infinite if it never is."""
    ends = list(accumulate(seconds))
    means = (fmean(rewards[end - SMOOTH : end]) for end in range(SMOOTH, len(rewards) + 1))
    return next((ends[place + SMOOTH - 1] for place, mean in enumerate(means) if mean >= GOAL), float("inf"))


def run(shared: Shared, seed: int, arm: str, steps: int) -> dict[str, Any]:
    """Trains an arm."""
    sys.path.insert(0, str(EXAMPLE))  # here, because other examples have modules of the same names
    make_trainer, tools = import_module("train").make_trainer, import_module("task").TOOLS
    with TemporaryDirectory() as directory, start_vllm_server(EXAMPLE / "checkpoint", max_model_len=512) as server:
        trainer = make_trainer(server.base_url, SCHEDULES[arm], steps, seed, directory, tools=tools)
        trainer.remove_callback(PrinterCallback)
        if arm == "lockstep":
            take_lockstep(trainer)
        trainer.add_callback(StepSeconds())
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        after = trainer.evaluate()["eval_reward"]
        trainer.vllm_generation.engine.close()
    log = [entry for entry in trainer.state.log_history if "step_seconds" in entry]
    rewards, seconds = [float(own["reward"]) for own in log], [own["step_seconds"] for own in log]
    return {
        "to_goal": seconds_to_goal(rewards, seconds),
        "seconds": sum(seconds),
        "before": before,
        "after": after,
        "by_step": {"reward": rewards, "seconds": seconds},
    }


BENCHMARK = Benchmark(
    "agent_example",
    __doc__,
    {"seed": range(5), "arm": list(SCHEDULES)},
    run,
    training_parts.agent_example,
    options={"steps": 20},
    quick={"steps": 6},
    facts=lambda run: {"steps": run["steps"]},
)

if __name__ == "__main__":
    main(BENCHMARK)
