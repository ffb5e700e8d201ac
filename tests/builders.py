"""Builds a model whose answers identify their prompts, data, and trainers, for several test files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import CLASS_SIZE, FIRST_CLASS_TOKEN, make_markov_model
from trl_darts import DARTSGRPOConfig
from trl_darts.errors import ConfigurationError


LETTERS = "ABCDE"
# (share, mean length) of the answers to each letter, with small and large spreads.
CLASSES = ((0.2, 4), (0.2, 8), (0.2, 15), (0.2, 30), (0.2, 60))

# With deferral, surplus groups of a rollout are trained on one optimizer step later.
ON_POLICY = {"defer_unsettled_groups": False}


def make_letter_model(out_dir: Path, tokenizer: Any) -> Path:
    """
    Builds a Markov chain whose answer to a prompt that ends in `LETTERS[c]` only has tokens of class `c`, and a mean
    length of `CLASSES[c][1]` tokens.
    """
    make_markov_model(out_dir, tokenizer, classes=CLASSES)
    model = AutoModelForCausalLM.from_pretrained(out_dir, dtype=torch.float32)
    scale = (1 / model.config.vocab_size + model.config.rms_norm_eps) ** -0.5
    with torch.no_grad():
        for index, letter in enumerate(LETTERS):
            probs = torch.full((model.config.vocab_size,), 1e-9)
            start = FIRST_CLASS_TOKEN + CLASS_SIZE * index
            probs[start : start + CLASS_SIZE] = 1 / CLASS_SIZE
            column = tokenizer.convert_tokens_to_ids(letter)
            model.lm_head.weight[:, column] = (probs / probs.sum()).log() / scale
    model.save_pretrained(out_dir)
    return out_dir


def letter_of(token_id: int) -> str | None:
    """Returns the letter whose class a completion's token belongs to, if any."""
    index = (token_id - FIRST_CLASS_TOKEN) // CLASS_SIZE
    return LETTERS[index] if 0 <= index < len(LETTERS) else None


def letters_dataset(num_prompts: int = 40, repeats: int = 1) -> Dataset:
    """Builds prompts `0A`, `1B`, …, over all letters, each `repeats` times."""
    rows = [{"prompt": f"{i}{LETTERS[i % len(LETTERS)]}"} for i in range(num_prompts)]
    return Dataset.from_list(rows * repeats)


def length_reward(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Returns rewards that differ between rows."""
    return [float(len(ids) % 7) for ids in completion_ids]


def make_args(output_dir: Path, **kwargs: Any) -> DARTSGRPOConfig:
    """Returns the config of a small run on the CPU: 4 prompts × 4 generations per step."""
    defaults: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 48,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    return DARTSGRPOConfig(**{**defaults, **kwargs})


def make_trainer(model_dir: Path, args: DARTSGRPOConfig, cls: type | None = None, **kwargs: Any) -> Any:
    """Builds a trainer for the letters, by default ours."""
    from trl_darts import DARTSGRPOTrainer

    arguments = {"reward_funcs": length_reward, "train_dataset": letters_dataset(), **kwargs}
    arguments.setdefault("processing_class", AutoTokenizer.from_pretrained(model_dir))
    return (cls or DARTSGRPOTrainer)(model=str(model_dir), args=args, **arguments)


def compare_with_trl(trainer: Any) -> list[tuple[str, float, int]]:
    """
    Makes TRL compute all streamed log-probs too. Returns the name of each call, the largest difference, and the number
    of rows that were not streamed. For log-probs below -1 the difference is relative, because of float32's precision.
    """
    stream = trainer._streams.log_probs
    differences: list[tuple[str, float, int]] = []
    served = stream.log_probs

    def both(name: str, input_ids: Any, attention_mask: Any, num_logits: int, compute: Any) -> Any:
        streamed = served(name, input_ids, attention_mask, num_logits, compute)
        expected = compute(input_ids, attention_mask)
        difference = ((streamed - expected).abs() / expected.abs().clamp(min=1)).max().item()
        differences.append((name, difference, stream.num_missed))
        return streamed

    stream.log_probs = both
    return differences


def record_batches(trainer: Any) -> list[dict[str, Any]]:
    """Collects the scored batches before they are shuffled, with the rows of their data."""
    batches: list[dict[str, Any]] = []
    score_batch = trainer._score_batch

    def recorded(score: Any, inputs: Any) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []

        def scored(inputs: Any) -> dict[str, Any]:
            rows.extend(inputs)
            return score(inputs)

        output = score_batch(scored, inputs)
        batches.append({"inputs": rows, **output})
        return output

    trainer._score_batch = recorded
    return batches


def record_rollouts(trainer: Any) -> list[Any]:
    """Collects the record of each rollout."""
    records, rollout = [], trainer._rollout

    def recorded(*args: Any) -> Any:
        rows, record = rollout(*args)
        records.append(record)
        return rows, record

    trainer._rollout = recorded
    return records


def record_ages(trainer: Any) -> list[list[list[tuple[int, int]]]]:
    """Collects the ages of the tokens of buffered batches: runs of age and count for each row."""
    ages, source = [], trainer._sources[0]
    next_batch = source.next

    def recorded(inputs: Any) -> Any:
        batch = next_batch(inputs)
        ages.append(trainer._batches.last.ages)
        return batch

    source.next = recorded
    return ages


def rollout_logs(trainer: Any) -> list[dict[str, float]]:
    """Returns the log entries of steps with a rollout."""
    return [entry for entry in trainer.state.log_history if "darts/rollout/seconds" in entry]


def assert_refused(make: Callable[..., Any], fields: dict[str, Any], words: str) -> None:
    """Asserts that an error names one of the fields, its value and then the words, in parts separated by ` ... `."""
    with pytest.raises(ConfigurationError) as caught:
        make(**fields)
    begins = "|".join(re.escape(f"`{name}` ({value!r}) ") for name, value in fields.items())
    assert re.match(f"({begins}){'.*'.join(map(re.escape, words.split(' ... ')))}", str(caught.value)), caught.value
