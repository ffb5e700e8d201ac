"""What the tests of this directory share: data, a reward, and a training that is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests import builders
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer


WORDS = ("plain", "what is flat", "sparse is", "a rare case", "now is better than", "why", "errors should never", "if")


def texts(num_prompts: int = 8) -> Dataset:
    """Prompts of different lengths, as text."""
    return Dataset.from_dict({"prompt": [f"{i} {WORDS[i % len(WORDS)]}" for i in range(num_prompts)]})


def chats(num_prompts: int = 8) -> Dataset:
    """The same prompts as conversations."""
    return texts(num_prompts).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """A completion's text, whether it is a string or messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def variety(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """A reward that differs within a group."""
    return [len(set(text)) + sum(map(ord, text)) % 7 / 10 for text in map(text_of, completions)]


def make_args(output_dir: Path, **kwargs: Any) -> DARTSGRPOConfig:
    """Two prompts × four rows a step, up to eight candidates each, two steps."""
    defaults = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 2,
        "learning_rate": 0.01,
    }
    return builders.make_args(output_dir, **{**defaults, **kwargs})


def make_trainer(model: Any, args: DARTSGRPOConfig, **kwargs: Any) -> DARTSGRPOTrainer:
    """A trainer on [`texts`] with [`variety`] for a reward, unless told otherwise."""
    model = str(model) if isinstance(model, Path) else model
    return DARTSGRPOTrainer(model, args=args, **{"reward_funcs": variety, "train_dataset": texts(), **kwargs})


def train(trainer: Any) -> set[str]:
    """
    Trains, checks that there is a loss and that more was sampled than trained on, and returns the names of the
    parameters that changed.
    """
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    if trainer.args.schedule == "darts" and trainer.args.max_num_generations > trainer.args.num_generations:
        assert max(step_logs(trainer, "darts/budget/redundancy")) > 1
    return {name for name, param in before.items() if not torch.equal(param, trainer.model.get_parameter(name))}


def train_all(trainer: Any) -> None:
    """Trains; every trainable parameter must change, and no other."""
    assert train(trainer) == {n for n, p in trainer.model.named_parameters() if p.requires_grad}


def step_logs(trainer: Any, name: str) -> list[float]:
    """What was logged under a name, in the order of steps."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def rows_of(batch: dict[str, Any], kind: str) -> list[list[int]]:
    """Token IDs of a batch's prompts or completions, without padding."""
    masks = batch[f"{kind}_mask"].bool()
    return [ids[mask].tolist() for ids, mask in zip(batch[f"{kind}_ids"], masks, strict=True)]
