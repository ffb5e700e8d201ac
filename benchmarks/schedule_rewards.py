"""
What each schedule makes of the same training: reward, held-out accuracy, time and lengths, over several seeds.

    python benchmarks/schedule_rewards.py --results outputs/rewards

The tiny reasoner is trained from its checkpoint under each schedule, on a real vLLM server on CPU. All rows of one
seed see the same prompts, and each seed goes through all rows before the next one begins, so that a machine that
others use disturbs all of them alike. Each training leaves a JSON file in `--results`, and a benchmark that was
interrupted goes on where it stopped. At the end, and with `--only-table`, a table is printed and a picture drawn from
what is there.

Columns are means over seeds with their standard errors, or medians over seeds:

- reward at the end: mean of the last 20 steps. Held-out accuracy: on prompts that were never trained on, after the
  last step, with `generate`.
- rollouts: seconds from the first submission to the last end, over all steps.
- tokens decoded, and waited for: what does not depend on the machine. A rollout waits for its longest candidate, from
  where that was started in this rollout; the column is the sum over all steps. Up to 16 tokens more are decoded in
  truth before a candidate is called off.
- p99 length: of all candidates, over the last 20 steps. Where candidates are called off, it understates the tail.
- off-policy: tokens trained on that an older policy sampled.
- until grpo's reward: seconds of rollouts until the mean over 20 steps is first what grpo of the same seed has at its
  end, median over the seeds that get there.

All rows have the same latency curve, measured once, so that budgets don't depend on how busy the machine is. As in
`schedules.py`, the sorted rows run on a server that decodes no more than N × M sequences at once: they are made for a
queue.
"""

import argparse
import gc
import json
import logging
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from heapq import heappop, heappush
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"))

import torch
from measure import sample
from rich.console import Console
from task import accuracy_reward, make_dataset
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from benchmarks.reward_summary import draw, load_runs, table
from benchmarks.schedule_rows import ROWS as ALL_ROWS
from benchmarks.schedule_rows import Row
from tests.servers import free_port, start_vllm_server
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.profiling import ProfileOptions, profile_servers
from trl_darts.scheduling import Command, RolloutResult, Scheduler, Submit


ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "examples" / "tiny_reasoner" / "checkpoint"
LEFT_OUT = ("partial rollout, dual-end, auto", "sorted, post hoc")
ROWS = [row for row in ALL_ROWS if row.name not in LEFT_OUT]

PROMPTS, NUM_GENERATIONS = 8, 8  # of a step
TRAIN_PROMPTS, TEST_PROMPTS = 128, 128  # 16 steps per epoch
TEST_GENERATIONS = 4
MAX_COMPLETION_LENGTH = 256
ROOM = 256  # sequences of the server whose slots are not what limits
PROFILED = (1, 2, 4, 8, 16, 32, 64, 128)
console = Console()


class Counts:
    """
    Counts, for each rollout of a training, what it would also be on a machine without noise.

    `candidates` and `decoded` are all that were started and all tokens that were sampled; `critical` is how many
    tokens one after the other the rollout had to wait for: of the longest candidate, from where it began. Tokens of an
    earlier rollout don't count. With `slots`, candidates wait for each other in the server's queue.

    Args:
        trainer ([`DARTSGRPOTrainer`]):
            Its rollouts are watched.
        slots (`int`, *optional*):
            Sequences that the server decodes at once.
    """

    def __init__(self, trainer: DARTSGRPOTrainer, slots: int | None) -> None:
        self.trainer = trainer
        self.slots = slots
        self.steps: list[dict[str, int]] = []
        self._engine = trainer.vllm_generation.engine
        self._run = self._engine.run
        self._engine.run = self._watched

    def _watched(self, scheduler: Scheduler, *args: Any) -> RolloutResult:
        begun: dict[int, tuple[int, int]] = {}  # by candidate: tokens waited for before it, and those it came with
        start, handle = scheduler.start, scheduler.handle

        def note(commands: list[Command]) -> list[Command]:
            submits = [c for c in commands if isinstance(c, Submit) and c.candidate_id not in begun]
            if submits:
                lengths = {c.candidate_id: c.length for c in scheduler.ledger.candidates}
                now = max((before + lengths[i] - carried for i, (before, carried) in begun.items()), default=0)
                begun.update((c.candidate_id, (now, len(c.prior_tokens))) for c in submits)
            return commands

        scheduler.start = lambda *given: note(start(*given))  # type: ignore[method-assign]
        scheduler.handle = lambda event: note(handle(event))  # type: ignore[method-assign]
        result = self._run(scheduler, *args)
        lengths = {c.candidate_id: c.length for c in scheduler.ledger.candidates}
        work = [(before, lengths[number] - carried) for number, (before, carried) in begun.items()]
        self.steps.append(
            {
                "step": self.trainer.state.global_step + 1,
                "candidates": len(work),
                "decoded": sum(tokens for _, tokens in work),
                "critical": critical_path(work, self.slots),
            }
        )
        return result


def critical_path(work: list[tuple[int, int]], slots: int | None = None) -> int:
    """
    How many tokens, one after the other, a rollout takes.

    Args:
        work (`list[tuple[int, int]]`):
            For each candidate, in the order of submission, after how many tokens it was submitted, and how many it was
            decoded for.
        slots (`int`, *optional*):
            Candidates that are decoded at once; the first one in the queue takes the first slot that is free. All of
            them are then taken to be submitted at the beginning.
    """
    if slots is None:
        return max((before + tokens for before, tokens in work), default=0)
    ends = [0] * slots
    for _, tokens in work:
        heappush(ends, heappop(ends) + tokens)
    return max(ends)


def train(row: Row, seed: int, url: str, steps: int, learning_rate: float, curve: Path) -> dict[str, Any]:
    """One training, and the accuracy on held-out prompts after it."""
    with tempfile.TemporaryDirectory() as directory:
        args = DARTSGRPOConfig(
            output_dir=directory,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_group_port=free_port(),
            latency_curve=str(curve),
            num_generations=NUM_GENERATIONS,
            per_device_train_batch_size=PROMPTS * NUM_GENERATIONS,
            max_completion_length=MAX_COMPLETION_LENGTH,
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
            seed=seed,
            **row.settings,
        )
        trainer = DARTSGRPOTrainer(
            str(CHECKPOINT),
            reward_funcs=accuracy_reward,
            args=args,
            train_dataset=make_dataset(TRAIN_PROMPTS, seed),
        )
        trainer.remove_callback(PrinterCallback)
        counts = Counts(trainer, PROMPTS * NUM_GENERATIONS if row.capped else None)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        trainer.vllm_generation.engine.close()
    torch.manual_seed(0)
    test_prompts = make_dataset(TEST_PROMPTS, 0, split="test")
    tokenizer = trainer.processing_class
    samples = sample(trainer.model.eval(), tokenizer, test_prompts, TEST_GENERATIONS, MAX_COMPLETION_LENGTH)
    return {
        "row": row.name,
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "settings": dict(row.settings),
        "seconds": seconds,
        "accuracy": samples.stats()["accuracy"],
        "rollouts": counts.steps,
        "log_history": trainer.state.log_history,
    }


@contextmanager
def servers() -> Iterator[dict[bool, str]]:
    """Addresses of two servers of the tiny reasoner: with room for all, and with room for N × M (`True`)."""
    with ExitStack() as stack:
        slots = {False: ROOM, True: PROMPTS * NUM_GENERATIONS}
        yield {
            capped: stack.enter_context(
                start_vllm_server(CHECKPOINT, max_model_len=2 * MAX_COMPLETION_LENGTH, max_num_seqs=number)
            ).base_url
            for capped, number in slots.items()
        }


def file_of(results: Path, row: Row, seed: int) -> Path:
    """Where a training is kept."""
    return results / f"{re.sub('[^a-z0-9]+', '_', row.name).strip('_')}.seed{seed}.json"


def write(path: Path, outcome: dict[str, Any]) -> None:
    """All of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(outcome))
    part.rename(path)


def run_missing(options: argparse.Namespace) -> None:
    """Trains what has no file yet."""
    curve = options.results / "latency.curve"  # not one of the trainings
    options.results.mkdir(parents=True, exist_ok=True)
    todo = [(seed, row) for seed in range(options.seeds) for row in ROWS]
    todo = [(seed, row) for seed, row in todo if not file_of(options.results, row, seed).exists()]
    if not todo:
        return
    with servers() as urls:
        if not curve.exists():
            profiled = ProfileOptions((urls[False],), batch_sizes=PROFILED, context_lengths=(64,), repeats=3)
            profile_servers(profiled).profile.curve.save(curve)
        for number, (seed, row) in enumerate(todo, 1):
            console.print(f"{time.strftime('%H:%M:%S')} {number} of {len(todo)}: {row.name}, seed {seed}")
            outcome = train(row, seed, urls[row.capped], options.steps, options.learning_rate, curve)
            write(file_of(options.results, row, seed), outcome)
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--results", type=Path, default=Path("outputs/rewards"), help="one JSON file per training")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "schedule_rewards.png")
    parser.add_argument("--only-table", action="store_true", help="train nothing: table and picture of what is there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if not options.only_table:
        run_missing(options)
    runs = load_runs(options.results, [row.name for row in ROWS])
    print(table(runs))
    draw(runs, options.picture)
    console.print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
