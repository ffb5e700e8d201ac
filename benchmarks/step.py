"""
What a step costs beside its rollout: TRL's class, ours with trimmed rows, and ours with shared prompts.

    python -m benchmarks.step [--prompts 128,512,2048] [--rows 64] [--scale 43] [--repeats 5]

Completions are given, as in `padding.py`: `--rows` in groups and micro-batches of 8, lengths of LLaMA-3.1-8B on
DeepScaleR divided by `--scale` (the default gives a median of 64 tokens). A step has forward and backward passes, and
one optimizer step. The arms alternate, with the same model, rows and seed.

Stored are seconds of a step, tokens through the model over tokens there are (below 1 with shared prompts), peak memory
above what was there before it, and by how much the gradient differs from TRL's. Without a GPU, seconds are CPU time of
this process.
"""

from typing import Any

import numpy as np
import torch
from datasets import Dataset

from benchmarks import padding, parts
from benchmarks.harness import Benchmark, Shared, main


ARMS: dict[str, dict[str, Any]] = {"TRL": {}, "trimmed": {"share_prompts": False}, "shared": {"share_prompts": True}}
BATCH_SIZE = 8


def prompts_of(num_tokens: int, num_rows: int) -> Dataset:
    """Returns different prompts of as many tokens: the tokenizer has one for each letter."""
    letters = np.random.default_rng(1).integers(97, 123, (num_rows // padding.NUM_GENERATIONS, num_tokens))
    return Dataset.from_dict({"prompt": ["".join(map(chr, row)) for row in letters]})


def run(
    shared: Shared, prompt: int, repeats: int, hidden_size: int, num_layers: int, scale: float, rows: int
) -> dict[str, Any]:
    """Measures all arms in turn, with prompts of this many tokens."""
    lengths = padding.tail(scale)[:rows]
    data = prompts_of(prompt, rows)
    batches = {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": rows // BATCH_SIZE}

    def step_of(arm: str, out: str) -> tuple[dict[str, float], torch.Tensor]:
        name, model = "TRL" if arm == "TRL" else "trim_padding=True", padding.random_model(hidden_size, num_layers)
        return padding.step(name, model, lengths, out, data, **batches, **ARMS[arm])

    found = padding.compare(step_of, ARMS, repeats)
    return {"rows": padding.describe(lengths), "hidden_size": hidden_size, "num_layers": num_layers, **found}


BENCHMARK = Benchmark(
    "step",
    __doc__,
    {"prompt": [128, 512, 2048]},
    run,
    parts.step,
    options={"repeats": 5, "hidden_size": 128, "num_layers": 2, "scale": 43.0, "rows": 64},
    quick={"repeats": 1, "rows": 16},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
