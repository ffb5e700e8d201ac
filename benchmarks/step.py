"""
What a step costs beside its rollout: TRL's class, ours with each of trimmed rows, shared prompts (which need trimmed
rows) and reused log-probs, and ours with all.

    python -m benchmarks.step [--prompts 128,512,2048] [--corrections on,off] [--checkpointings on,off]
                              [--size tiny|1.7b] [--rows 64] [--scale 43] [--repeats 5]

Completions are given, as in `padding.py`: `--rows` in groups and micro-batches of 8, lengths of LLaMA-3.1-8B on
DeepScaleR divided by `--scale` (43 gives a median of 64 tokens). A step has forward and backward passes, and one
optimizer step; with the correction for sampling log-probs, as with vLLM, also TRL's forward pass for the log-probs
before. The arms alternate, with the same model, rows and seed.

Stored are seconds of a step, tokens through the model over tokens there are (below 1 with shared prompts), peak memory
of the passes above what was there before them, and by how much the gradient differs from TRL's. Without a GPU, the
model has two layers in float32, and seconds are CPU time of this process. With one, it has the sizes of Qwen3-1.7B in
bfloat16 over float32 weights, as TRL trains by default; an arm without enough memory has no seconds.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import padding, parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.models import EOS_ID, PAD_ID


ARMS: dict[str, dict[str, Any]] = {
    "TRL": {},
    "reused": {"trim_padding": False, "reuses": True},
    "trimmed": {"share_prompts": False},
    "shared": {"share_prompts": True},
    "all": {"share_prompts": True, "reuses": True},
}
BATCH_SIZE = 8
NO_MEMORY = dict.fromkeys(("seconds", "memory", "padding", "share"), math.nan)


def qwen3(**sizes: int) -> PreTrainedModel:
    """Builds a Qwen3 with random float32 weights of the sizes of the 1.7B, on the GPU if there is one."""
    tokens = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    config = Qwen3Config(
        **tokens,
        **{
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            **sizes,
        },
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if padding.ON_GPU else "cpu"):
        return Qwen3ForCausalLM(config)


SIZES: dict[str, Callable[[], PreTrainedModel]] = {"tiny": partial(padding.random_model, 128, 2), "1.7b": qwen3}


def prompts_of(num_tokens: int, num_rows: int) -> Dataset:
    """Returns different prompts of as many tokens: the tokenizer has one for each letter."""
    letters = np.random.default_rng(1).integers(97, 123, (num_rows // padding.NUM_GENERATIONS, num_tokens))
    return Dataset.from_dict({"prompt": ["".join(map(chr, row)) for row in letters]})


def run(
    shared: Shared, correction: str, checkpointing: str, prompt: int, size: str, scale: float, rows: int, repeats: int
) -> dict[str, Any]:
    """Measures all arms in turn, with prompts of this many tokens."""
    lengths = padding.tail(scale)[:rows]
    fields = {
        "data": prompts_of(prompt, rows),
        "corrects": correction == "on",
        "vllm_importance_sampling_mode": "token_truncate",  # random log-probs of whole rows would be masked
        "gradient_checkpointing": checkpointing == "on",
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": rows // BATCH_SIZE,
    }

    def step_of(arm: str, out: str) -> tuple[dict[str, float], torch.Tensor]:
        try:
            return padding.step(SIZES[size](), lengths, out, arm != "TRL", **fields, **ARMS[arm])
        except torch.cuda.OutOfMemoryError:
            return NO_MEMORY, torch.tensor(math.nan)

    arms = [arm for arm in ARMS if correction == "on" or not ARMS[arm].get("reuses")]
    found = padding.compare(step_of, arms, repeats)
    return {"rows": padding.describe(lengths), "size": size, **found}


SWITCHES = ["on", "off"]
BENCHMARK = Benchmark(
    "step",
    __doc__,
    {"correction": SWITCHES, "checkpointing": SWITCHES, "prompt": [128, 512, 2048]},
    run,
    parts.step,
    options={"size": "1.7b" if padding.ON_GPU else "tiny", "scale": 43.0, "rows": 64, "repeats": 5},
    usual={"correction": ["on"], "checkpointing": ["on"] if padding.ON_GPU else ["off"]},
    quick={"size": "tiny", "rows": 16, "repeats": 1},
    resumes=False,
)

if __name__ == "__main__":
    main(BENCHMARK)
