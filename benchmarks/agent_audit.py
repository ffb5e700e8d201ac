"""Conversations with tools while servers are killed and frozen, for `faults.py`."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Dataset

from benchmarks.agents import Waiter, make_caller, tokens
from benchmarks.servers import make_trainer, training_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.scheduling import RolloutResult


NUM_PROMPTS, NUM_GENERATIONS = 4, 8
FIELDS = {
    "schedule": "grpo",  # all conversations are kept, so that all calls can be counted
    "num_generations": NUM_GENERATIONS,
    "per_device_train_batch_size": NUM_PROMPTS * NUM_GENERATIONS,
    "max_completion_length": 4000,
    "max_tool_calling_iterations": 6,
    "max_steps": 100_000,
    "learning_rate": 0.0,
}
THINKING = 100  # mean tokens of a turn
TOLERANCE = 1e-3
THREADS = ("trl_darts-conversation", "trl_darts-tool")
LOGP_DIFFERENCE = "sampling/sampling_logp_difference/max"


class AgentAudit:
    """Counts the calls of a tool, and the answers to it in the conversations that come of them."""

    def __init__(self, trainer: DARTSGRPOTrainer, waiter: Waiter | None = None) -> None:
        self.trainer, self.waiter = trainer, waiter
        self.counts: Counter[str] = Counter()
        self.rollouts: list[tuple[float, float]] = []  # start and end
        source: Any = trainer._sources[0]
        engine = trainer.vllm_generation.engine
        open_turns, run = engine.open_turns, source.run

        def opened(*args: Any) -> Any:
            turns, future = open_turns(*args)
            take = turns.scheduler.take

            def taken(group_ids: Any, now: float) -> RolloutResult:
                result: RolloutResult = take(group_ids, now)
                self.counts["turns"] += len(result.groups)
                self.counts["resumed"] += result.num_resumed
                return result

            turns.scheduler.take = taken
            return turns, future

        def audited(*args: Any) -> Any:
            begin = time.perf_counter()
            result = run(*args)
            self.rollouts.append((begin, time.perf_counter()))
            self._count(result, source)
            return result

        engine.open_turns, source.run = opened, audited  # type: ignore[method-assign]

    def _count(self, result: RolloutResult, source: Any) -> None:
        self.counts["rows"] += sum(len(group.rows) for group in result.groups)
        self.counts["expected rows"] += NUM_PROMPTS * NUM_GENERATIONS
        self.counts["answers"] += sum(own.outcome[4] for own in source._played.values())  # as TRL counts calls

    @property
    def worst(self) -> float:
        """Largest difference of a token's log-prob to the trainer's."""
        return max(float(line[LOGP_DIFFERENCE]) for line in self.trainer.state.log_history if LOGP_DIFFERENCE in line)

    @property
    def nothing_lost(self) -> bool:
        """Whether each call was answered in one conversation, and no row is missing."""
        assert self.waiter is not None
        self.counts["calls"] = self.waiter.num_calls
        return self.counts["calls"] == self.counts["answers"] and self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether no row is missing, no token has another log-prob, and no thread is left."""
        counts = self.counts
        counts["threads left"] = sum(t.name.startswith(THREADS) for t in threading.enumerate())
        return counts["rows"] == counts["expected rows"] and not counts["threads left"] and self.worst <= TOLERANCE


def make_model(directory: Path, **sizes: int) -> Path:
    """Saves a chain whose turns take long enough to be interrupted."""
    return make_caller(directory, THINKING, **sizes)


def audited_trainer(
    urls: list[str], model_dir: Path, seed: int, output_dir: str, answer: str = "done", **fields: Any
) -> AgentAudit:
    """Returns the audit of a trainer whose conversations call a tool of 0.05 to 0.5 s, which says an answer."""
    waiter = Waiter(seed, longest_s=0.5, answer=answer)
    return AgentAudit(agent_trainer(urls, model_dir, seed, output_dir, {"tools": [waiter.tool()]}, **fields), waiter)


def agent_trainer(
    urls: list[str], model_dir: Path, seed: int, output_dir: str, tools: dict[str, Any], **fields: Any
) -> DARTSGRPOTrainer:
    """Returns a trainer with these tools or environments."""
    args = training_args(",".join(urls), output_dir, seed=seed, **{**FIELDS, **fields})
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": f"task {i}"}]} for i in range(64)])
    trainer: DARTSGRPOTrainer = make_trainer(str(model_dir), tokens, args, prompts, **tools)
    return trainer
