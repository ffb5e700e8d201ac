"""
Samples from the tiny reasoner and prints accuracy and lengths of each family of prompts.

    python examples/tiny_reasoner/measure.py

Exits with 1 and a message if a family does not show its pattern from the DARTS paper (section 3.2.2).
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_darts.tiny_reasoner.task import DIFFICULTIES, FAMILIES, SPLITS, accuracy_reward, make_dataset


CHECKPOINT_DIR = Path(__file__).parent / "checkpoint"
BATCH_SIZE = 256  # sequences per call of `generate`


@dataclass(frozen=True)
class Samples:
    """Completions of a set of prompts, `num_generations` for each."""

    texts: list[str]  # (N·M,), by prompt
    lengths: np.ndarray  # (N, M), in tokens, including the end-of-sequence token
    truncated: np.ndarray  # (N, M), whether a completion hit the limit
    rewards: np.ndarray  # (N, M), 1.0 for a right answer, otherwise 0.0

    def stats(self) -> dict[str, float]:
        """Returns the rows of the table."""
        right, stds = self.rewards == 1.0, self.lengths.std(axis=1)
        p50, p90, p99 = np.percentile(self.lengths, (50, 90, 99))
        return {
            "accuracy": float(right.mean()),
            "groups with both": float((right.any(axis=1) & ~right.all(axis=1)).mean()),
            "E[l | right]": _mean(self.lengths[right]),
            "E[l | wrong]": _mean(self.lengths[~right]),
            "mean": float(self.lengths.mean()),
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "p99 / p50": float(p99 / p50),
            "max": float(self.lengths.max()),
            "truncated": float(self.truncated.mean()),
            "intra-prompt std, mean": float(stds.mean()),
            "intra-prompt std, p10": float(np.percentile(stds, 10)),
            "intra-prompt std, p90": float(np.percentile(stds, 90)),
        }


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    num_generations: int,
    max_new_tokens: int,
    temperature: float = 1.0,
) -> Samples:
    """Samples and scores completions with torch's global random generator."""
    prompts = [prompt for prompt in dataset["prompt"] for _ in range(num_generations)]
    answers = [answer for answer in dataset["answer"] for _ in range(num_generations)]
    texts, lengths, truncated = [], [], []
    for start in range(0, len(prompts), BATCH_SIZE):
        inputs = tokenizer(prompts[start : start + BATCH_SIZE], return_tensors="pt", padding=True)
        completion_ids = _complete(model, inputs, temperature, max_new_tokens)
        texts += tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        lengths += (completion_ids != tokenizer.pad_token_id).sum(dim=1).tolist()
        truncated += (completion_ids != tokenizer.eos_token_id).all(dim=1).tolist()
    shape = (len(dataset), num_generations)
    rewards = np.array(accuracy_reward(prompts, texts, answers))
    return Samples(texts, *(np.array(x).reshape(shape) for x in (lengths, truncated, rewards)))


def missing_patterns(stats: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a message for each family whose right and wrong completions don't differ in length as expected."""
    messages = []
    for family, sign in (("sum", "<"), ("chain", ">")):
        right, wrong = stats[family]["E[l | right]"], stats[family]["E[l | wrong]"]
        if not (right < wrong if sign == "<" else right > wrong):  # also if one of them is NaN
            messages.append(f"`{family}`: expected E[l | right] {sign} E[l | wrong], got {right:.1f} and {wrong:.1f}.")
    return messages


def print_table(stats: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Prints one column per set of samples."""
    table = Table(title=title)
    table.add_column("")
    for name in stats:
        table.add_column(name, justify="right")
    for row in next(iter(stats.values())):
        form = "{:.1%}" if row in ("accuracy", "groups with both", "truncated") else "{:.1f}"
        table.add_row(escape(row), *(form.format(column[row]) for column in stats.values()))
    Console().print(table)


def _complete(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], temperature: float, max_new_tokens: int
) -> torch.Tensor:
    """Returns completion IDs of one batch, of shape `(B, T)`, padded on the right."""
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        output = model.generate(
            **inputs, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=max_new_tokens
        )
    return output[:, inputs["input_ids"].shape[1] :]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT_DIR, help="checkpoint directory")
    parser.add_argument("--num_prompts", type=int, default=100, help="prompts per family")
    parser.add_argument("--num_generations", type=int, default=16, help="completions per prompt")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="limit of a completion's length")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature")
    parser.add_argument("--difficulty", choices=DIFFICULTIES, default="easy", help="difficulty of the prompts")
    parser.add_argument("--split", choices=SPLITS, default="train", help="split of the prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and samples")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    for name in ("num_prompts", "num_generations", "max_new_tokens", "num_threads"):
        if getattr(args, name) < 1:
            parser.error(f"`{name}` ({getattr(args, name)}) must be at least 1.")
    if args.temperature <= 0:
        parser.error(f"`temperature` ({args.temperature}) must be positive.")
    if not (args.model / "config.json").is_file():
        parser.error(f"`model` ({args.model}) has no config.json. Run pretrain.py, or name a checkpoint directory.")
    return args


def main() -> None:
    """Samples, prints the table and reports missing patterns."""
    args = parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    samples = {}
    for family in FAMILIES:
        dataset = make_dataset(args.num_prompts, args.seed, family, args.difficulty, args.split)
        samples[family] = sample(
            model, tokenizer, dataset, args.num_generations, args.max_new_tokens, args.temperature
        )
    samples["both"] = Samples(
        samples["sum"].texts + samples["chain"].texts,
        *(
            np.concatenate([getattr(samples[f], name) for f in FAMILIES])
            for name in ("lengths", "truncated", "rewards")
        ),
    )
    stats = {name: value.stats() for name, value in samples.items()}
    print_table(stats, f"{args.num_prompts} prompts x {args.num_generations} per family, {args.difficulty}")
    if messages := missing_patterns(stats):
        sys.exit("\n".join(messages))


if __name__ == "__main__":
    main()
