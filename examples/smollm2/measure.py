"""
Shows how the families of the tasks were chosen: samples each candidate and prints accuracy and lengths.

    python examples/smollm2/measure.py [--families gcd,lcm] [--prompts 6] [--temperature 0.7]

A family is taken if at least half of its groups of 8 answers have both right and wrong ones, at most a quarter of the
answers is cut off at 192 tokens, half have fewer than 70, and the answer is not one of two.
"""

import argparse
import os
from pathlib import Path
from typing import Any


os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")

import numpy as np
from rich.console import Console
from rich.table import Table
from tasks import FAMILIES, TEMPERATURE, accuracy_reward, draw, to_prompt
from vllm import LLM, SamplingParams

from trl_darts.cli.exits import one_line_errors


CHECKPOINT = Path(__file__).parent / "checkpoint"
NUM_ANSWERS, LIMIT = 8, 192
SIZES = {"other": 80, "shown": 6}  # the prompts that are sampled are not the first ones
CANDIDATES: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "lcm": {"min_value": 2, "max_value": 12},
    "count_bits": {"min_n": 1, "max_n": 500},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "decimal_chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "aiw": {},
    "number_sequence": {"max_complexity": 1, "min_value": 0, "max_value": 20},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20},
    "gsm_symbolic": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(CANDIDATES), help="with commas")
    parser.add_argument("--prompts", type=int, default=6, help="of each family")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    options = parser.parse_args()
    with one_line_errors(ImportError):
        sizes = SIZES | {"shown": options.prompts}
        rows = {name: draw(name, CANDIDATES.get(name, {}), sizes)["shown"] for name in options.families.split(",")}
    llm = LLM(str(CHECKPOINT), dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=64)
    every = [row for own in rows.values() for row in own]
    sampling = SamplingParams(n=NUM_ANSWERS, temperature=options.temperature, max_tokens=LIMIT)
    outputs = iter(llm.chat([to_prompt(row["question"]) for row in every], sampling))  # type: ignore[arg-type]
    table = Table("family", "right", "groups with both", "p50", "p90", "p99", "cut off")
    for name, own in rows.items():
        answers = [(row, answer) for row in own for answer in next(outputs).outputs]
        rewards = accuracy_reward(
            [[{"role": "assistant", "content": answer.text}] for _, answer in answers],
            [row["family"] for row, _ in answers],
            [row["entry"] for row, _ in answers],
        )
        groups = np.reshape(rewards, (-1, NUM_ANSWERS)).mean(1)
        percentiles = np.percentile([len(answer.token_ids) for _, answer in answers], (50, 90, 99))
        cut = np.mean([answer.finish_reason == "length" for _, answer in answers])
        both = ((groups > 0) & (groups < 1)).mean()
        table.add_row(name, f"{np.mean(rewards):.0%}", f"{both:.0%}", *(f"{p:.0f}" for p in percentiles), f"{cut:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
