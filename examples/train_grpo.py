"""
Train with GRPO and shaped rollouts: TRL's `trl/scripts/grpo.py` with our trainer. A script for `accelerate launch`:

    accelerate launch examples/train_grpo.py --config configs/tiny_reasoner.yaml

With a vLLM server (see docs/servers.md), add:

    --use_vllm --vllm_mode server --vllm_server_base_url http://127.0.0.1:8000

Other recipes are in `configs` (see docs/recipes.md), and `--config hf://org/name` takes one of the Hub. Beside what
TRL's script takes, `--dataset_name tiny_reasoner` makes the data set of examples/tiny_reasoner, and `--prompt_column`
and `--solution_column` bring a data set into the form of TRL's math rewards.
"""

import importlib
import os
import sys
from typing import Any

from datasets import load_dataset
from tiny_reasoner.task import make_dataset
from trl import DatasetMixtureConfig, TrlParser, get_dataset, get_peft_config, get_quantization_config

from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.recipe import ARGUMENTS, MADE_DATASET, OVERLONG, ScriptArguments
from trl_darts.errors import ConfigurationError, TRLDARTSError
from trl_darts.hub import resolve_config_arguments


def load_rewards(script_args: ScriptArguments, max_completion_length: int) -> list[Any]:
    """The reward model if there is one, then functions of TRL or of import paths, also of the working directory."""
    rewards: list[Any] = []
    if script_args.reward_model_name_or_path:
        rewards.append(script_args.reward_model_name_or_path)
    sys.path.insert(0, os.getcwd())
    for name in script_args.reward_funcs or []:
        module, _, function = name.rpartition(".")
        try:
            reward = getattr(importlib.import_module(module or "trl.rewards"), function)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"`reward_funcs` ({name!r}) can't be imported: {error}.") from error
        rewards.append(reward(max_completion_length, script_args.soft_punish_cache) if name == OVERLONG else reward)
    return rewards


def load_splits(script_args: ScriptArguments, dataset_args: DatasetMixtureConfig, seed: int) -> Any:
    """The data set's splits by name."""
    if dataset_args.datasets:  # wins over `dataset_name`, as in TRL's script
        return get_dataset(dataset_args)
    if script_args.dataset_name == MADE_DATASET:
        return {
            script_args.dataset_train_split: make_dataset(script_args.num_prompts, seed),
            script_args.dataset_test_split: make_dataset(64, seed, split="test"),
        }
    if not script_args.dataset_name:
        raise ConfigurationError("`dataset_name` (empty) must be a data set. Or set `datasets`.")
    name, streaming = script_args.dataset_config, script_args.dataset_streaming
    return load_dataset(script_args.dataset_name, name=name, streaming=streaming)


def to_conversations(dataset: Any, script_args: ScriptArguments) -> Any:
    """With the columns `prompt` and `solution`, made of those that the arguments name."""
    columns = {"prompt": script_args.prompt_column, "solution": script_args.solution_column}
    for name, column in columns.items():
        if column is not None and dataset.column_names is not None and column not in dataset.column_names:
            known = ", ".join(dataset.column_names)
            raise ConfigurationError(f"`{name}_column` ({column!r}) must be a column of the data set: {known}.")
    system = [{"role": "system", "content": script_args.system_prompt}] if script_args.system_prompt else []

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        made = {name: row[column] for name, column in columns.items() if column is not None}
        if "prompt" in made:
            made["prompt"] = [*system, {"role": "user", "content": made["prompt"]}]
        return made

    return dataset.map(convert) if any(columns.values()) else dataset


def make_trainer(words: list[str]) -> tuple[DARTSGRPOTrainer, ScriptArguments]:
    """The trainer that a command line describes, with all that can be checked before its first step."""
    words, origin = resolve_config_arguments(words)
    script_args, training_args, model_args, dataset_args = TrlParser(ARGUMENTS).parse_args_and_config(words)
    training_args.origin = origin
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    rewards = load_rewards(script_args, training_args.max_completion_length)
    splits = load_splits(script_args, dataset_args, training_args.seed)
    evaluates = training_args.eval_strategy != "no"
    trainer = DARTSGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=to_conversations(splits[script_args.dataset_train_split], script_args),
        eval_dataset=to_conversations(splits[script_args.dataset_test_split], script_args) if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    return trainer, script_args


def main() -> None:
    try:
        trainer, script_args = make_trainer(sys.argv[1:])
    except TRLDARTSError as error:  # nothing has run yet: the message has the remedy, and a traceback would hide it
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(trainer.args.output_dir)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
