"""
What a step costs beside its rollout: TRL's class, ours with trimmed rows, and ours with shared prompts.

    python -m benchmarks.step [--prompts 128,512,2048] [--rows 64] [--scale 43] [--repeats 5]

Completions are given, as in `padding.py`: `--rows` in groups and micro-batches of 8, lengths of LLaMA-3.1-8B on
DeepScaleR divided by `--scale` (the default gives a median of 64 tokens). A step has forward and backward passes, and
one optimizer step. The arms alternate, with the same model, rows and seed.

Columns: seconds of a step and their ratio to TRL's and to the trimmed arm's (geometric means and 95 % intervals over
paired repeats), tokens through the model over tokens there are, below 1 with shared prompts, peak memory above what
was there, and by how much the gradient differs from TRL's. Without a GPU, seconds are CPU time of this process. The
first repeat warms up. The others are appended to benchmarks/results/step.jsonl.
"""

import argparse
import math
import statistics
import tempfile
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table

from benchmarks import padding
from benchmarks.cells import ratio
from benchmarks.lines import record


ARMS: dict[str, dict[str, Any]] = {"TRL": {}, "trimmed": {"share_prompts": False}, "shared": {"share_prompts": True}}
BATCH_SIZE = 8
console = Console(width=160)


def prompts_of(num_tokens: int, num_rows: int) -> Dataset:
    """Returns different prompts of as many tokens: the tokenizer has one for each letter."""
    letters = np.random.default_rng(1).integers(97, 123, (num_rows // padding.NUM_GENERATIONS, num_tokens))
    return Dataset.from_dict({"prompt": ["".join(map(chr, row)) for row in letters]})


def compare(num_tokens: int, lengths: np.ndarray, repeats: int, make_model: Any) -> dict[str, Any]:
    """Prints a table and returns what it shows."""
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    gradients: dict[str, torch.Tensor] = {}
    for repeat in range(repeats + 1):
        for arm, fields in list(ARMS.items()) if repeat % 2 else list(ARMS.items())[::-1]:
            name = "TRL" if arm == "TRL" else "trim_padding=True"
            more = {"per_device_train_batch_size": BATCH_SIZE, "steps_per_generation": None, **fields}
            more["gradient_accumulation_steps"] = len(lengths) // BATCH_SIZE
            with tempfile.TemporaryDirectory() as out:
                data = prompts_of(num_tokens, len(lengths))
                cost, gradients[arm] = padding.step(name, make_model(), lengths, out, data=data, **more)
            runs[arm] += [cost] if repeat else []
    whole = gradients["TRL"]
    apart = {arm: ((own - whole).norm() / whole.norm()).item() for arm, own in gradients.items()}
    names = ("arm", "s per step", "over TRL's", "over trimmed", "computed ÷ there", "peak MiB", "gradient")
    table = Table(*names, title=f"Prompts of {num_tokens} tokens, {padding.describe(lengths)}")
    for arm, costs in runs.items():
        over = [
            ratio([theirs["seconds"] / ours["seconds"] for theirs, ours in zip(runs[other], costs, strict=True)])
            for other in ("TRL", "trimmed")
        ]
        own, memory, there = (statistics.median(cost[n] for cost in costs) for n in ("seconds", "memory", "padding"))
        table.add_row(
            arm, f"{own:.2f}", *over, "" if math.isnan(there) else f"{there:.2f}", f"{memory:.0f}", f"{apart[arm]:.1e}"
        )
    console.print(table)
    return {"runs": runs, "gradient": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="128,512,2048", help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--scale", type=float, default=43.0, help="lengths are divided by it")
    options = parser.parse_args()
    lengths = padding.tail(options.scale)[: options.rows]
    make_model = partial(padding.random_model, options.hidden_size, options.num_layers)
    for num_tokens in map(int, options.prompts.split(",")):
        found = compare(num_tokens, lengths, options.repeats, make_model)
        size = {"hidden_size": options.hidden_size, "num_layers": options.num_layers}
        record("step", {"prompt_tokens": num_tokens, "rows": padding.describe(lengths), **size, **found})


if __name__ == "__main__":
    main()
