"""
Train with GRPO and shaped rollouts. A script for `accelerate launch`, with the options of TRL's own:

    accelerate launch examples/train_grpo.py --config configs/tiny_reasoner.yaml

With a vLLM server (see docs/servers.md), add:

    --use_vllm --vllm_mode server --vllm_server_base_url http://127.0.0.1:8000

`--dataset_name tiny_reasoner` makes the data set of examples/tiny_reasoner; any other name or path goes to
`datasets.load_dataset`. `--reward_funcs` takes import paths such as `tiny_reasoner.task.accuracy_reward`, and the
names of TRL's rewards, such as `accuracy_reward`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trl.rewards
from datasets import load_dataset
from tiny_reasoner.task import make_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trl.scripts.grpo import GRPOScriptArguments

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """TRL's arguments, and the size of data sets that are made on the spot."""

    num_prompts: int = field(default=512, metadata={"help": "Prompts of a made data set (`tiny_reasoner`)."})


def load_reward(name: str) -> Callable[..., Any]:
    """A reward function by TRL's name or by import path."""
    if "." not in name:
        if not hasattr(trl.rewards, name):
            raise ValueError(f"`reward_funcs` ({name!r}) must name a reward of `trl.rewards`, or be an import path.")
        return getattr(trl.rewards, name)
    module, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), function)


def load_splits(script_args: ScriptArguments, seed: int) -> dict[str, Any]:
    """The data set's splits by name."""
    if script_args.dataset_name == "tiny_reasoner":
        return {
            script_args.dataset_train_split: make_dataset(script_args.num_prompts, seed),
            script_args.dataset_test_split: make_dataset(64, seed, split="test"),
        }
    return load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )


def main() -> None:
    parser = TrlParser((ScriptArguments, DARTSGRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    if not script_args.reward_funcs:
        raise ValueError("`reward_funcs` (empty) must name at least one reward function.")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    splits = load_splits(script_args, training_args.seed)
    evaluates = training_args.eval_strategy != "no"
    trainer = DARTSGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_reward(name) for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=splits[script_args.dataset_train_split],
        eval_dataset=splits[script_args.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
