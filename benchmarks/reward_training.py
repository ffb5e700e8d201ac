"""Trainings of the tiny reasoner on a real vLLM server on CPU, with what they cost counted. Each leaves a file."""

import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"))

import torch
from measure import sample
from rich.console import Console
from task import accuracy_reward, make_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from benchmarks.schedule_rows import Row
from tests.servers import free_port, start_vllm_server
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.errors import ConfigurationError
from trl_darts.analysis.profile import ProfileOptions, profile_servers
from trl_darts.scheduling import Command, RolloutResult, Scheduler, Submit


ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "examples" / "tiny_reasoner" / "checkpoint"
PROMPTS, NUM_GENERATIONS = 8, 8  # of a step
TRAIN_PROMPTS, TEST_PROMPTS = 128, 128  # 16 steps per epoch
TEST_GENERATIONS = 4
MAX_COMPLETION_LENGTH = 256
ROOM = 256  # sequences of the server whose slots are not what limits
PROFILED = (1, 2, 4, 8, 16, 32, 64, 128)
DIFFICULTIES = ("easy", "hard")
console = Console()


@dataclass(frozen=True)
class Training:
    """
    What one training is.

    Args:
        row ([`~benchmarks.schedule_rows.Row`]):
            Schedule and settings.
        seed (`int`):
            Of prompts, weights and samples.
        steps (`int`):
            Optimizer steps.
        learning_rate (`float`):
            Constant.
        family (`str`, *optional*):
            Of the prompts: `"sum"` or `"chain"`. Both by default.
        penalty (`Callable`, *optional*):
            A reward that is added to the one for right answers.
    """

    row: Row
    seed: int
    steps: int
    learning_rate: float
    family: str | None = None
    penalty: Callable[..., Any] | None = None

    @property
    def file_name(self) -> str:
        """Of its results."""
        words = [self.row.name, self.family] if self.family else [self.row.name]
        return "_".join(re.sub("[^a-z0-9]+", "_", word).strip("_") for word in words) + f".seed{self.seed}.json"

    @property
    def facts(self) -> dict[str, Any]:
        """What its results say of it."""
        return {
            "row": self.row.name,
            "family": self.family,
            "seed": self.seed,
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "settings": dict(self.row.settings),
        }


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


def train(training: Training, url: str, curve: Path) -> dict[str, Any]:
    """One training, and what the model then makes of prompts that it was never trained on."""
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
            max_steps=training.steps,
            learning_rate=training.learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
            seed=training.seed,
            **training.row.settings,
        )
        trainer = DARTSGRPOTrainer(
            str(CHECKPOINT),
            reward_funcs=[accuracy_reward, training.penalty] if training.penalty else accuracy_reward,
            args=args,
            train_dataset=make_dataset(TRAIN_PROMPTS, training.seed, training.family),
        )
        trainer.remove_callback(PrinterCallback)
        counts = Counts(trainer, PROMPTS * NUM_GENERATIONS if training.row.capped else None)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        trainer.vllm_generation.engine.close()
    held_out = evaluate(trainer.model.eval(), trainer.processing_class)
    rewards = [reward for answers in held_out["easy"].values() for _, reward in answers]
    return {
        **training.facts,
        "seconds": seconds,
        "accuracy": sum(rewards) / len(rewards),
        "held_out": held_out,
        "rollouts": counts.steps,
        "log_history": trainer.state.log_history,
    }


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Length and reward of each answer to held-out prompts, by difficulty and family."""
    torch.manual_seed(0)
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for difficulty in DIFFICULTIES:
        prompts = make_dataset(TEST_PROMPTS, 0, difficulty=difficulty, split="test")
        samples = sample(model, tokenizer, prompts, TEST_GENERATIONS, MAX_COMPLETION_LENGTH)
        found[difficulty] = {}
        for family, lengths, rewards in zip(prompts["family"], samples.lengths, samples.rewards, strict=True):
            answers = zip(lengths.tolist(), rewards.tolist(), strict=True)
            found[difficulty].setdefault(family, []).extend(answers)
    return found


def evaluate_checkpoint() -> dict[str, Any]:
    """The same of the model that all trainings begin with."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    return {"held_out": evaluate(model.eval(), AutoTokenizer.from_pretrained(CHECKPOINT))}


@contextmanager
def servers(capped: bool) -> Iterator[dict[bool, str]]:
    """Addresses of servers of the tiny reasoner: with room for all, and (`True`) with room for N × M, if asked for."""
    slots = {False: ROOM, True: PROMPTS * NUM_GENERATIONS} if capped else {False: ROOM}
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(
                start_vllm_server(CHECKPOINT, max_model_len=2 * MAX_COMPLETION_LENGTH, max_num_seqs=number)
            ).base_url
            for kind, number in slots.items()
        }


def check_results(trainings: Sequence[Training], results: Path) -> None:
    """
    Refuses a folder whose trainings would be taken for those asked for and are others.

    Args:
        trainings (`Sequence[Training]`):
            What is asked for: at least one, all of the same steps and learning rate.
        results (`Path`):
            Their folder, which need not exist.

    Raises:
        [`ConfigurationError`]: If a file's steps or learning rate are others, or its settings those of another
            training than its name says.
    """
    asked = {training.file_name: dict(training.row.settings) for training in trainings}
    kind = {"steps": trainings[0].steps, "learning_rate": trainings[0].learning_rate}
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        expected = kind | ({"settings": asked[path.name]} if path.name in asked else {})
        for name, value in expected.items():
            if found.get(name) != value:
                raise ConfigurationError(
                    f"`--results` ({results}) holds {path.name} with {name} {found.get(name)}, and {value} is asked "
                    "for. Ask for what is there, name another folder, or empty this one."
                )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A setting that can't work ends the command with exit code 2 and one line."""
    try:
        yield
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run_missing(trainings: Sequence[Training], results: Path) -> None:
    """Runs those that have no file yet. What is there was seen by [`check_results`]."""
    results.mkdir(parents=True, exist_ok=True)
    todo = [training for training in trainings if not (results / training.file_name).exists()]
    if not todo:
        return
    curve = results / "latency.curve"  # not one of the trainings
    with servers(any(training.row.capped for training in todo)) as urls:
        if not curve.exists():
            profiled = ProfileOptions((urls[False],), batch_sizes=PROFILED, context_lengths=(64,), repeats=3)
            profile_servers(profiled).profile.curve.save(curve)
        for number, training in enumerate(todo, 1):
            console.print(f"{time.strftime('%H:%M:%S')} {number} of {len(todo)}: {training.file_name}")
            write(results / training.file_name, train(training, urls[training.row.capped], curve))
            gc.collect()


def write(path: Path, outcome: dict[str, Any]) -> None:
    """All of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(outcome))
    part.rename(path)
