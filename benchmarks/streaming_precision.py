"""
How far streamed log-probs are from TRL's one pass, in float32 and in bfloat16.

    python benchmarks/streaming_precision.py

The tiny reasoner scores answers that it has sampled: once as TRL does, all rows in one padded batch; once in chunks of
any length, with a cache, in batches of any rows. In bfloat16 each order of summation rounds differently, so there is a
third way to compare with: TRL's own, each row in a batch of its own. That is what the same rows get where only the
batch size differs.

Columns: largest and mean difference of a token's log-prob, and what it does to the importance sampling ratio of whole
sequences (`vllm_importance_sampling_mode="sequence_mask"` multiplies the ratios of all tokens): the median and the
largest of |ratio − 1|.
"""

import random
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"))

import torch
from rich.console import Console
from rich.table import Table
from task import make_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar
from trl.trainer.utils import add_fused_lm_head

from tests.streaming.test_forward import full_log_probs, streamed_log_probs


CHECKPOINT = Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner" / "checkpoint"
ROWS = 48
MAX_LENGTH = 512
Texts = list[list[int]]


def sample(seed: int) -> tuple[Texts, Texts]:
    """Prompts of the task, and answers as the model writes them."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    prompts = list(make_dataset(ROWS, seed=seed)["prompt"])
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**batch, do_sample=True, max_new_tokens=MAX_LENGTH)
    width = batch["input_ids"].shape[1]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    answers = [[token for token in row[width:].tolist() if token != tokenizer.pad_token_id] for row in output]
    return ids, answers


def compare(dtype: torch.dtype, prompts: Texts, answers: Texts) -> dict[str, list[torch.Tensor]]:
    """Differences to TRL's one pass, by way and row."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype).eval()
    add_fused_lm_head(model)
    whole = full_log_probs(model, prompts, answers)
    alone = [full_log_probs(model, [prompt], [answer])[0] for prompt, answer in zip(prompts, answers, strict=True)]
    streamed = streamed_log_probs(model, prompts, answers, random.Random(0), max_chunk=64)
    return {
        name: [(ours - trl).float() for ours, trl in zip(rows, whole, strict=True)]
        for name, rows in (("one row at a time", alone), ("streamed", streamed))
    }


def main() -> None:
    """Prints the table."""
    disable_progress_bar()
    prompts, answers = sample(0)
    tokens = sum(map(len, answers))
    table = Table(title=f"{ROWS} answers, {tokens:,} tokens, against one padded batch")
    for name in ("precision", "way", "token, max", "token, mean", "sequence ratio, median", "max"):
        table.add_column(name, justify="left" if name in ("precision", "way") else "right")
    for dtype in (torch.float32, torch.bfloat16):
        for name, rows in compare(dtype, prompts, answers).items():
            flat = torch.cat(rows).abs()
            ratios = torch.stack([(row.sum().exp() - 1).abs() for row in rows])
            values = (flat.max(), flat.mean(), ratios.median(), ratios.max())
            table.add_row(str(dtype).removeprefix("torch."), name, *(f"{value:.1e}" for value in values))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
