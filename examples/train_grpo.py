"""
Train with GRPO and shaped rollouts. A script for `accelerate launch`, with the options of TRL's own:

    accelerate launch examples/train_grpo.py --config configs/tiny_reasoner.yaml

With a vLLM server (see docs/servers.md), add:

    --use_vllm --vllm_mode server --vllm_server_base_url http://127.0.0.1:8000

Other recipes are in `configs` (see docs/recipes.md), and `--config hf://org/name` takes one of the Hub.

`--dataset_name tiny_reasoner` makes the data set of examples/tiny_reasoner; any other name or path goes to
`datasets.load_dataset`. `--reward_funcs` takes import paths such as `tiny_reasoner.task.accuracy_reward`, and the
names of TRL's rewards, such as `accuracy_reward`; `--reward_model_name_or_path` adds a reward model before them.
"""

import sys
from typing import Any

from datasets import load_dataset
from tiny_reasoner.task import make_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.errors import TRLDARTSError
from trl_darts.hub import resolve_config_arguments
from trl_darts.recipes import MADE_DATASET, ScriptArguments, check_dataset, load_rewards, take_split


def load_splits(script_args: ScriptArguments, seed: int, evaluates: bool) -> tuple[Any, Any]:
    """The data sets of training and evaluation, the latter `None` without one."""
    check_dataset(script_args)
    if script_args.dataset_name == MADE_DATASET:
        splits = {
            script_args.dataset_train_split: make_dataset(script_args.num_prompts, seed),
            script_args.dataset_test_split: make_dataset(64, seed, split="test"),
        }
    else:
        splits = load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    train = take_split(splits, "dataset_train_split", script_args)
    return train, take_split(splits, "dataset_test_split", script_args) if evaluates else None


def make_trainer(words: list[str]) -> DARTSGRPOTrainer:
    """The trainer that the words of a command line describe, with all that can be checked before its first step."""
    parser = TrlParser((ScriptArguments, DARTSGRPOConfig, ModelConfig))
    arguments = resolve_config_arguments(words)
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    reward_funcs = load_rewards(script_args, training_args.max_completion_length)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    train, evaluation = load_splits(script_args, training_args.seed, training_args.eval_strategy != "no")
    return DARTSGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train,
        eval_dataset=evaluation,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def main() -> None:
    try:
        trainer = make_trainer(sys.argv[1:])
    except TRLDARTSError as error:  # nothing has run yet: the message has the remedy, and a traceback would hide it
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(trainer.args.output_dir)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
