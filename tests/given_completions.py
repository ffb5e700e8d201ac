"""Trains on random completions of given lengths, so that results don't depend on an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks.models import EOS_ID
from benchmarks.tool_calls import make_chat_tokenizer
from tests.trl_parity import common
from tests.zoo import random_model, save, text_config
from trl_darts import DARTSGRPOTrainer
from trl_darts.training.reused_logprobs import ReusedLogprobs


LIMIT = 40  # tokens
ARGUMENTS = ("peft_config", "train_dataset", "eval_dataset", "processing_class")


class GivenCompletions(DARTSGRPOTrainer):
    """Generates random completions with heavy-tailed lengths and slightly wrong log-probs."""

    fillers: frozenset[int] = frozenset()

    def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch.fillers = self.fillers
        rng = np.random.default_rng(1000 * self.state.global_step + self.accelerator.process_index)
        lengths = np.minimum(np.ceil(np.exp(rng.normal(1.5, 1.0, len(prompt_ids)))).astype(int), LIMIT)
        rows = [rng.integers(5, 60, length).tolist() for length in lengths]
        rows = [row if len(row) == LIMIT else [*row[:-1], EOS_ID] for row in rows]
        return rows, [rng.normal(-4.0, 0.3, len(row)).tolist() for row in rows]


def rows_of_prompts(num_prompts: int = 16, least: int = 1) -> Dataset:
    """Returns prompts of 1 to 25 tokens, or of `least` and up to 24 more."""
    return Dataset.from_dict({"prompt": ["x" * (least + 7 * i % 25) for i in range(num_prompts)]})


def trained(
    model_dir: Path,
    out: Path,
    trims: bool,
    sampler: bool = False,
    reuses: bool | None = False,
    fillers: tuple[int, ...] = (),
    **settings: Any,
) -> tuple[Any, Any]:
    """
    Returns a trainer after two steps, and its parameters before. With `sampler`, log-probs are corrected like vLLM's,
    with `reuses` as `reuse_logprobs`. `fillers` are filler rows of a dropped group.
    """
    more = {name: settings.pop(name) for name in ARGUMENTS if name in settings}
    fields = {
        "schedule": "grpo",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_completion_length": LIMIT,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "trim_padding": trims,
        **settings,
    }
    more = {"processing_class": AutoTokenizer.from_pretrained(model_dir), "train_dataset": rows_of_prompts(), **more}
    args = common.make_args(out, **fields)
    trainer = GivenCompletions(str(model_dir), reward_funcs=common.variety, args=args, **more)
    trainer.use_vllm, trainer.fillers = sampler, frozenset(fillers)
    args.reuse_logprobs = reuses  # after `use_vllm`, without which there is nothing to reuse
    trainer._reused = ReusedLogprobs.of(trainer)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    return trainer, before


def make_model(out_dir: Path, class_name: str = "Qwen3ForCausalLM", config: Any = None) -> Path:
    model = random_model(class_name, config or text_config("qwen3"), seed=0)
    return save(out_dir, model, make_chat_tokenizer())
